"""What the engine asks of a drafter."""

from __future__ import annotations

from typing import Protocol

import torch

from ..state import State


class Drafter(Protocol):
    """Proposes K tokens for every row.

    A drafter may read `state` (`tokens`, `length`, `min_length`, `ends`) and must never write it,
    read a tensor on the host, or make a shape depend on data: what is not proposed is declared by
    `room`, not left out. It never learns what was accepted; it sees it in `state` next time.

    Attributes:
        forwards: Model calls made since `reset`.
        shapes: Every `(method, B, T)` its model was called with.
        window: Cache slots that its attention reads; set before `propose`, never inside.
    """

    forwards: int
    shapes: set[tuple[str, int, int]]
    window: int

    def reset(self) -> None:
        """Forgets the previous call; buffers are kept."""

    def catch_up(self, state: State, lengths: list[int], live: list[bool]) -> None:
        """Makes the drafter's own cache cover all committed tokens but the last two.

        Args:
            state: Device state.
            lengths: The host's copy of `state.length`.
            live: Rows that still generate.
        """

    def room(self, state: State) -> torch.Tensor:
        """Returns `[B]` int64, tokens that can be proposed at the current lengths (any size)."""

    def has_room(self, length: int) -> bool:
        """Returns whether a row of `length` committed tokens can be drafted for at all."""

    def propose(self, state: State, k: int) -> torch.Tensor:
        """Returns proposals `[B, k]` int64 for the indices `length .. length + k - 1`."""

    def committed(self, lengths: list[int], k: int) -> None:
        """Is told, after a cycle that drafted k tokens, the new lengths of all rows."""
