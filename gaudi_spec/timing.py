"""How long cycles take, measured while they run."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

_KEPT, _ENOUGH = 9, 2


class StepTimes:
    """Running lower quartiles of the wall time of a cycle, host read included.

    Interruptions only ever add time, so of few measurements the smallest is the soundest.
    Times of each attention window and of each structure of rules are kept apart.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[Hashable, int, int], deque[float]] = {}

    def add(self, k: int, seconds: float, window: int, rules: Hashable) -> None:
        """Notes what a cycle of k drafts took."""
        place = (rules, window, k)
        self._samples.setdefault(place, deque(maxlen=_KEPT)).append(seconds)

    def at(self, window: int, rules: Hashable) -> dict[int, float]:
        """Returns seconds by K, of this window or the nearest that was measured twice."""

        def nearest_last(place: tuple[Hashable, int, int]) -> int:
            return -abs(place[1] - window)

        mine: Iterable = (
            place
            for place, times in self._samples.items()
            if place[0] == rules and len(times) >= _ENOUGH
        )
        return {
            place[2]: sorted(self._samples[place])[len(self._samples[place]) // 4]
            for place in sorted(mine, key=nearest_last)
        }
