"""Picks K, the draft tokens of the next cycle, from the closed set of compiled values."""

from __future__ import annotations

from typing import Protocol


class Schedule(Protocol):
    """Chooses how many tokens to draft.

    Attributes:
        sizes: Every K that `choose` can return: each is a shape of its own.
    """

    sizes: frozenset[int]

    def choose(self, cycle: int) -> int:
        """Returns K for the given cycle, counted from 0; K = 0 is plain decoding."""


class Constant:
    """The same K in every cycle.

    Args:
        k: Draft tokens.
    """

    def __init__(self, k: int) -> None:
        self.sizes = frozenset({k})
        self._k = k

    def choose(self, cycle: int) -> int:
        """Returns k."""
        return self._k
