"""How long cycles take, measured while they run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Iterable

_KEPT = 9


class StepTimes:
    """Running medians of the wall time of a cycle, host read included.

    Times of each attention window and of each structure of rules are kept apart.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[Hashable, int, int], deque[float]] = {}

    def add(self, k: int, seconds: float, window: int, rules: Hashable) -> None:
        """Notes what a cycle of k drafts took."""
        place = (rules, window, k)
        self._samples.setdefault(place, deque(maxlen=_KEPT)).append(seconds)

    def at(self, window: int, rules: Hashable) -> dict[int, float]:
        """Returns seconds by K, of this window or the nearest that was measured."""

        def nearest_last(place: tuple[Hashable, int, int]) -> int:
            return -abs(place[1] - window)

        mine: Iterable = (place for place in self._samples if place[0] == rules)
        # Of an even number the lower one: the other may have met an interruption.
        return {
            place[2]: statistics.median_low(self._samples[place])
            for place in sorted(mine, key=nearest_last)
        }
