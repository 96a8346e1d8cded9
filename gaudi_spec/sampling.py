"""From logits to the token that the target chooses, as tensor code over static shapes."""

from __future__ import annotations

import torch

from .state import State


def block_early_eos(logits: torch.Tensor, index: torch.Tensor, state: State) -> torch.Tensor:
    """Forbids end-of-text at sequence indices below `state.min_length`.

    Args:
        logits: `[B, T, V]`.
        index: `[B, T]` int64, where in the sequence each predicted token would stand.
        state: Holds `min_length` `[B]` and the end-of-text ids.

    Returns:
        `[B, T, V]` with minus infinity at forbidden ids.
    """
    early = index < state.min_length[:, None]
    forbidden = early[:, :, None] & (state.ends[: logits.shape[-1]] > 0)
    return torch.where(forbidden, float("-inf"), logits)


def greedy(
    logits: torch.Tensor, index: torch.Tensor, state: State
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the most likely allowed token at each position.

    Args:
        logits: `[B, T, V]`.
        index: `[B, T]` int64, where in the sequence each predicted token would stand.
        state: See `block_early_eos`.

    Returns:
        Token ids `[B, T]` int64, and whether the logits behind each were sound `[B, T]` bool: a
        NaN or an infinite maximum is not.
    """
    best, ids = block_early_eos(logits, index, state).max(-1)
    return ids, torch.isfinite(best)
