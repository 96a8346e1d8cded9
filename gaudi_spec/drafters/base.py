"""What the engine asks of a drafter."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..state import State


class Proposal(NamedTuple):
    """What a drafter proposes for the indices `length .. length + k - 1` of every row.

    Attributes:
        tokens: `[B, k]` int64; those at and beyond `n_proposed` are fillers.
        n_proposed: `[B]` int64, how many of them are proposed. It may exceed k, or what the row's
            budget can use: that is the cycle's business.
    """

    tokens: torch.Tensor
    n_proposed: torch.Tensor


class Drafter(Protocol):
    """Proposes K tokens for every row.

    A drafter may read `state` (`tokens`, `length`, `min_length`, `ends`) and must never write it,
    read a tensor on the host, or make a shape depend on data: what is not proposed is declared by
    `Proposal.n_proposed`, not left out. It never learns what was accepted; it sees it in `state`
    next time.

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

    def has_room(self, length: int) -> bool:
        """Returns whether a row of `length` committed tokens can be drafted for at all."""

    def propose(self, state: State, k: int) -> Proposal:
        """Proposes up to k tokens for every row, as tensor code."""

    def committed(self, lengths: list[int], k: int) -> None:
        """Is told, after a cycle that drafted k tokens, the new lengths of all rows."""
