"""A linear layer for few rows on the CPU: verifying K + 1 tokens should cost what one costs.

Both read the weights once, and nothing else takes long; but the matrix products that PyTorch calls
here take up to 2.5 times as long for five rows as for one (bfloat16 without AMX; 1.6 in float32).
The kernels are C, compiled by the machine's own compiler when first used and kept on disk. The one
for 8-bit weights (`quant/linear.py`) needs AVX512-VNNI.

For many rows, a prompt's, PyTorch's own product is best, but in bfloat16 only where the processor
multiplies that; elsewhere it takes two to four times as long as turning the weights into float32,
a piece that stays in the processor's cache at a time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn

from ..paths import cache_directory

MAX_ROWS = 24  # beyond, the library's product of matrices is as fast
_PIECE = 1 << 20  # weights that are turned into float32 at a time
# Whether the processor has no instruction that multiplies bfloat16.
_SLOW_BFLOAT16 = platform.machine().lower() in ("x86_64", "amd64") and not (
    torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
)

_SOURCE = Path(__file__).with_name("linear.c")
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
# Of what the kernels take, with their C names.
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


class FewRowsLinear(nn.Linear):
    """`nn.Linear` that is fast for at most `MAX_ROWS` rows, and in bfloat16 for any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[..., in_features]` to `[..., out_features]`."""
        few = x.numel() <= MAX_ROWS * self.in_features
        ours = few or (x.dtype == torch.bfloat16 and _SLOW_BFLOAT16)
        if not ours or x.dtype != self.weight.dtype:
            return super().forward(x)
        return torch.ops.gaudi_spec.linear(x, self.weight, self.bias)

    @staticmethod
    def fits(layer: nn.Linear) -> bool:
        """Returns whether the kernel can read the weights of `layer`."""
        return layer.weight.dtype in TYPES and all(
            type(part) in (torch.Tensor, nn.Parameter)
            and part.is_cpu
            and part.is_contiguous()
            and part.dtype == layer.weight.dtype
            for part in (layer.weight, layer.bias)
            if part is not None
        )


def library() -> ctypes.CDLL | None:
    """Returns the compiled kernel, or None where no C compiler can make it."""
    found = _library()
    return None if isinstance(found, str) else found


def missing() -> str:
    """Returns why there is no kernel, or "" where there is one."""
    found = _library()
    return found if isinstance(found, str) else ""


@functools.cache
def _library() -> ctypes.CDLL | str:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "There is no C compiler: neither CC, nor cc, nor gcc."
    text = _SOURCE.read_bytes() + repr((compiler, _FLAGS, processor())).encode()
    path = cache_directory() / "kernels" / f"linear-{hashlib.sha256(text).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _build(compiler, path)
        found = ctypes.CDLL(str(path))
    except OSError as error:
        return f"It cannot be built or loaded: {error}"
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").splitlines() or ["no reason given"]
        return f"{compiler} does not compile it: {said[0]}"
    for name in TYPES.values():
        for kind, pointers, sizes in (("linear", 4, 3), ("int8", 5, 4)):
            if hasattr(found, f"{kind}_{name}"):
                arguments = [ctypes.c_void_p] * pointers + [ctypes.c_long] * sizes + [ctypes.c_int]
                getattr(found, f"{kind}_{name}").argtypes = arguments
    return found


def multiplies_int8() -> bool:
    """Returns whether there is a kernel for 8-bit weights: the operation `few_rows_int8`."""
    return hasattr(library(), "int8_float")


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        part = Path(place) / path.name
        command = [compiler, *_FLAGS, "-o", str(part), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(part, path)


def processor() -> str:
    """Returns what the machine code depends on: a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.numel() > MAX_ROWS * weight.shape[1]:
        return _many_rows(x, weight, bias)
    return _call("linear", x, (weight,), bias, ())


def _int8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    return _call("int8", x, (codes, scale), bias, (block,))


def _call(
    kind: str,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    more: tuple[int, ...],
) -> torch.Tensor:
    n, k = weights[0].shape
    y = _shape(x, weights[0])
    x = x.contiguous()
    failed = getattr(library(), f"{kind}_{TYPES[x.dtype]}")(
        x.data_ptr(),
        *(part.data_ptr() for part in weights),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // k,
        k,
        n,
        *more,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("No memory is left for the rows of a linear layer.")
    return y


def _many_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes in float32, which a bfloat16 product with float32 sums does too."""
    wide = x.float()
    pieces = weight.split(max(1, _PIECE // weight.shape[1]))
    parts = [nn.functional.linear(wide, piece.float()) for piece in pieces]
    y = torch.cat(parts, -1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


_OPERATIONS = torch.library.Library("gaudi_spec", "DEF")
_OPERATIONS.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATIONS.define(
    "few_rows_int8(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int block) -> Tensor"
)
_OPERATIONS.impl("linear", _linear, "CPU")
_OPERATIONS.impl("few_rows_int8", _int8, "CPU")


@torch.library.register_fake("gaudi_spec::linear")
@torch.library.register_fake("gaudi_spec::few_rows_int8")
def _shape(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    if x.shape[-1] != weight.shape[1]:
        raise RuntimeError(f"A layer of {weight.shape[1]} inputs was given {x.shape[-1]}.")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
