"""What `auto` estimates: acceptance by position, how a batch advances, what a cycle takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from .cycle import RowOutcome

_START = 0.7  # acceptance of a draft that nothing is known about
_WEIGHT = 2.0  # proposals that this, or the position before, counts for
_MEMORY = 1 - 1 / 32  # share of what was counted that a cycle leaves
_DOUBTED = 4.0  # proposals that what was counted is worth once the draft is turned off
_EVEN = 8.0  # gained tokens that rows are taken to have shared evenly


class Acceptance:
    """Running estimate of how often anything is proposed, and of what is accepted, by position.

    The acceptance of a position is that of proposals behind accepted ones. It is as good as that of
    the position before it until it is known better, and again when it has not been tried for long.

    Args:
        most: Positions.
    """

    def __init__(self, most: int) -> None:
        none = [0.0] * (most - 1)
        self._found, self._cycles = _WEIGHT, _WEIGHT
        self._hits, self._tries = [_WEIGHT * _START, *none], [_WEIGHT, *none]

    def expected(self) -> list[float]:
        """Returns the tokens that a row is expected to emit in a cycle of 0, 1, 2 ... drafts."""
        chances, rate, weight = [self._found / self._cycles], 0.0, 0.0
        for hits, tries in zip(self._hits, self._tries):
            rate = (hits + weight * rate) / (tries + weight)
            weight = _WEIGHT
            chances.append(chances[-1] * rate)
        return list(accumulate([1.0, *chances[1:]]))

    def add(self, k: int, rows: Sequence[RowOutcome]) -> None:
        """Counts what a cycle of k drafts has shown; the last of a row may be short for its end."""
        counted = [row for row in rows if row.n_proposed or not row.done]
        self._found = _MEMORY * self._found + sum(row.n_proposed > 0 for row in counted)
        self._cycles = _MEMORY * self._cycles + len(counted)
        tested = [row for row in counted if row.n_proposed]
        if tested:
            self._fade(_MEMORY)
        for row in tested:
            missed = row.rejected or (not row.done and row.n_accepted < k)
            for position in range(row.n_accepted + missed):
                self._tries[position] += 1
                self._hits[position] += position < row.n_accepted

    def doubt(self) -> None:
        """Makes what comes count for more than what was."""
        self._fade(min(1.0, _DOUBTED / self._tries[0]))

    def _fade(self, share: float) -> None:
        self._tries = [share * tries for tries in self._tries]
        self._hits = [share * hits for hits in self._hits]


class Pace:
    """What the slowest row of a batch gains by drafts, as a share of what its rows gain on average.

    A batch ends with its slowest row. Rows advance unevenly, by chance and because the draft is
    not equally good for all of them.
    """

    def __init__(self) -> None:
        self._slowest = self._mean = 0.0
        self.begin()

    def begin(self) -> None:
        """Starts a call; what was learned stays."""
        self._left, self._steps, self._gained = math.inf, 0, 0.0

    def add(self, rows: Sequence[RowOutcome]) -> None:
        """Counts the tokens that rows have gained over a plain step."""
        self._steps += 1
        self._gained += sum(row.n_emitted - 1 for row in rows) / len(rows)

    def share(self, left: float) -> float:
        """Returns the share; `left` says how far the slowest row has come."""
        if self._gained and self._left < math.inf:
            gained = min(self._left - left - self._steps, self._gained)  # it may have ended early
            self._slowest = _MEMORY * self._slowest + gained
            self._mean = _MEMORY * self._mean + self._gained
        self._left, self._steps, self._gained = left, 0, 0.0
        return (_EVEN + self._slowest) / (_EVEN + self._mean)


def estimate(k: int, known: Mapping[int, float], sizes: Collection[int]) -> float:
    """Returns what a cycle of k drafts takes, in seconds, as far as that can be told.

    Args:
        k: One of `sizes`.
        known: Seconds by K, 0 among them.
        sizes: Every K.
    """
    if k in known:
        return known[k]
    points = sorted(x for x in known if x in sizes)
    below = [x for x in points if x < k]
    above = [x for x in points if x > k]
    if above:
        left, right = below[-1], above[0]
    elif len(below) > 1:
        left, right = below[-2:]
    else:  # the smallest is tried first, as if drafts were free
        return known[0] if k == min(x for x in sizes if x) else math.inf
    slope = (known[right] - known[left]) / (right - left)
    return max(known[below[-1]] + slope * (k - below[-1]), known[0])
