"""What the engine needs from a model, whatever library its code comes from."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..cache import SlotCache


class ModelAdapter(Protocol):
    """One model with its own slot cache.

    Attributes:
        vocab_size: V, width of the logits.
        max_positions: Positions the model was built for, or None if it has no limit.
        slots: S, slots of each cache row.
        model: The module that computes, quantized if it is.
        cache: The slot cache that `forward` and `fill` write.
        shapes: Every `(method, B, T)` seen so far: what a static-shape device would compile.
    """

    vocab_size: int
    max_positions: int | None
    slots: int
    model: Any
    cache: SlotCache
    shapes: set[tuple[str, int, int]]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, last: bool = False):
        """Runs the model over `ids` `[B, T]` at `positions` `[B, T]`.

        Writes the T new cache entries of each row first, then attends to all visible slots.

        Returns:
            Logits `[B, T, V]`, or `[B, 1, V]` of the last token where `last` is set.
        """

    def fill(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Writes cache entries like `forward`, without computing logits.

        Returns:
            `[B]`, a number that depends on every layer, so that none can be optimised away.
        """
