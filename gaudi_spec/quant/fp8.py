"""The 8-bit float e4m3 as each device has it: what differs is the largest value.

Gaudi 2 keeps the highest exponent for infinity and NaN, so its range ends at 240; Gaudi 3 and
everybody else go to 448. Below 240 the values are the same, so `torch.float8_e4m3fn` holds both.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
TINY = 1e-12  # keeps the scale of a row of zeros from being zero


def cast(values: torch.Tensor, limit: float) -> torch.Tensor:
    """Rounds to the nearest e4m3 value, ties to even, saturating at `limit`; NaN stays NaN.

    Args:
        values: Any shape, float32 or bfloat16.
        limit: 240 or 448.

    Returns:
        The same shape, `torch.float8_e4m3fn`.
    """
    return values.clamp(-limit, limit).to(E4M3)


def scale_for(values: torch.Tensor, limit: float, pow2: bool = False) -> torch.Tensor:
    """Returns, for each row of `[..., N]`, the factor `[..., 1]` that takes `limit` to its maximum.

    Args:
        values: Any float dtype.
        limit: Largest value of the format.
        pow2: Round up to a power of two, as the scales of a Gaudi card are by default.

    Returns:
        float32, above zero.
    """
    scale = values.abs().amax(-1, keepdim=True).float().clamp(min=TINY) / limit
    return torch.exp2(torch.ceil(torch.log2(scale))) if pow2 else scale
