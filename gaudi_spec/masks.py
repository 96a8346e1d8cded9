"""Attention masks from positions alone: a token sees a slot if the slot's position is not later."""

from __future__ import annotations

import torch


def attention_bias(
    positions: torch.Tensor, slots: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the additive mask for queries at `positions` over all cache slots.

    Args:
        positions: `[B, T]` int64, absolute position of each query.
        slots: `[S]` int64, `arange(S)`.
        window: Sliding-window size in tokens, or None for full attention.
        dtype: Dtype of the attention scores.

    Returns:
        `[B, 1, T, S]`, 0 where visible and the dtype's minimum elsewhere.
    """
    zero = torch.zeros((), dtype=dtype, device=positions.device)
    return torch.where(visible(positions, slots, window), zero, torch.finfo(dtype).min)


def visible(
    positions: torch.Tensor, slots: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Returns which slots a query sees, bool `[B, 1, T, S]`; arguments as for `attention_bias`.

    The token at position p sees slot j if `j <= p`, and with a sliding window also only if
    `p - j < window` (Transformers' convention). Padding needs no term: it never enters a cache.
    """
    age = positions[:, None, :, None] - slots
    seen = age >= 0
    return seen if window is None else seen & (age < window)
