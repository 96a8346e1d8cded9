"""Linear layers with quantized weights, over the kernels that PyTorch itself maintains.

Activations are quantized with one scale for each token, never one for the whole input: a token's
result then does not depend on the tokens beside it, so that verifying K+1 tokens at once gives
what decoding them one by one gives.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..device.linear import MAX_ROWS, TYPES, multiplies_int8
from . import fp8

CUDA_ROWS = 32  # its kernel takes more than 16 only
GROUP = 32  # inputs of an int4 layer that share a scale and a zero


class QuantLinear(nn.Module):
    """What replaces an `nn.Linear`; subclasses hold the codes and multiply.

    Args:
        weight: `[N, K]`.
        bias: `[N]` or None, kept as it is.

    Attributes:
        scheme: As in `SpecConfig.target_quant`.
        in_features: K.
        out_features: N.
        codes: The weights in few bits.
        scale: Their scales, in the form that the kernel takes.
    """

    scheme = ""
    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `[..., N]` for `[..., K]`, in the dtype of `x`."""
        y = self.product(x.reshape(-1, self.in_features)).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies `[M, K]` by the weights; `[M, N]`, any float dtype."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Returns scheme and sizes."""
        return f"{self.scheme}, in_features={self.in_features}, out_features={self.out_features}"


class Int8(QuantLinear):
    """8-bit weights with a scale per output, times 8-bit activations with a scale per token.

    Activations have a few channels that are many times larger than the rest, which would be left
    with a handful of codes. So inputs and weights are both rotated first: the product stays what it
    is, and what was in one channel is in all of its block.

    Attributes:
        block: Inputs that are rotated among each other: the largest power of two that divides K.
    """

    scheme = "int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.block = self.in_features & -self.in_features
        # Hadamard's matrix of a block is the Kronecker product of two smaller ones.
        inner = 1 << (self.block.bit_length() // 2)
        sizes = (self.block // inner, inner)
        self.factors = tuple(hadamard(size, weight.device) for size in sizes)
        codes, scale = int8_codes(self.rotate(weight))
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale[:, 0])

    def rotate(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[M, K]` with each block of inputs rotated, float32."""
        outer, inner = self.factors
        blocks = rows.float().view(len(rows), -1, len(outer), len(inner))
        return (outer @ blocks @ inner).view_as(rows)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantLinear`; the integer sums are exact."""
        codes, scale = int8_codes(self.rotate(x))
        lacking = max(0, CUDA_ROWS - len(x)) if x.is_cuda else 0
        sums = torch._int_mm(nn.functional.pad(codes, (0, 0, 0, lacking)), self.codes.t())
        return sums[: len(x)].float() * scale * self.scale


class FewRowsInt8(Int8):
    """`Int8` that takes our own kernel for at most `MAX_ROWS` rows on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantLinear`."""
        typed = x.dtype in TYPES and (self.bias is None or self.bias.dtype == x.dtype)
        if x.numel() > MAX_ROWS * self.in_features or not typed:
            return super().forward(x)
        return torch.ops.gaudi_spec.few_rows_int8(x, self.codes, self.scale, self.bias, self.block)

    @staticmethod
    def fits(layer: Int8) -> bool:
        """Returns whether there is a kernel that can read `layer`; its sums have 32 bits."""
        short = layer.in_features <= 1 << 16
        plain = layer.codes.is_cpu and layer.scale.dtype == torch.float32
        return short and plain and multiplies_int8()


class Int8WeightOnly(QuantLinear):
    """8-bit weights with a scale per output; the kernel computes in bfloat16."""

    scheme = "int8wo"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        codes, scale = int8_codes(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale[:, 0].bfloat16())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantLinear`."""
        return torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.scale)


class Int4WeightOnly(QuantLinear):
    """4-bit weights; groups of inputs share a scale and a zero. The kernel computes in bfloat16."""

    scheme = "int4wo"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        groups = weight.float().view(self.out_features, -1, GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=fp8.TINY).bfloat16()
        middle = (low + 8 * scale.float()).bfloat16()  # the value of code 8
        codes = ((groups - middle.float()) / scale.float()).round().add(8).clamp(0, 15)
        codes = codes.view_as(weight).to(torch.int32)
        if weight.is_cuda:
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch._convert_weight_to_int4pack(pairs, 8)
        else:
            packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.register_buffer("codes", packed)
        scales = torch.cat([scale, middle], -1).transpose(0, 1).contiguous()
        self.register_buffer("scale", scales)  # [K / GROUP, N, 2]

    @staticmethod
    def fits(outputs: int, inputs: int) -> bool:
        """Returns whether the kernel takes a layer of this size."""
        return inputs % GROUP == 0 and outputs % 16 == 0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantLinear`."""
        cpu = torch._weight_int4pack_mm_for_cpu
        multiply = torch._weight_int4pack_mm if x.is_cuda else cpu
        return multiply(x.bfloat16(), self.codes, GROUP, self.scale)


class Fp8(QuantLinear):
    """e4m3 weights with a scale per output, times e4m3 activations with a scale per token.

    The values are multiplied in the dtype of the input, which holds every one of them exactly; it
    saves memory and shows what a card's text would be, but not a card's time.

    Args:
        weight: `[N, K]`.
        bias: `[N]` or None.
        limit: Largest e4m3 value of the device.
        pow2: Scales are powers of two.
    """

    scheme = "fp8"

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        limit: float = 448.0,
        pow2: bool = False,
    ) -> None:
        super().__init__(weight, bias)
        self.limit, self.pow2 = limit, pow2
        scale = fp8.scale_for(weight, limit, pow2)
        self.register_buffer("codes", fp8.cast(weight.float() / scale, limit))
        self.register_buffer("scale", scale[:, 0])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantLinear`."""
        scale = fp8.scale_for(x, self.limit, self.pow2)
        codes = fp8.cast(x.float() / scale, self.limit).to(x.dtype)
        return (codes @ self.codes.to(x.dtype).t()).float() * scale * self.scale


@functools.cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Returns Hadamard's matrix of `size`, a power of two, scaled to be its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)


def int8_codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row of `[..., N]` symmetrically.

    Returns:
        int8 codes of the same shape from -127 to 127, and float32 scales `[..., 1]`.
    """
    scale = values.abs().amax(-1, keepdim=True).float().clamp(min=fp8.TINY) / 127
    return (values.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


KINDS: dict[str, type[QuantLinear]] = {
    kind.scheme: kind for kind in (Int8, Int8WeightOnly, Int4WeightOnly, Fp8)
}
