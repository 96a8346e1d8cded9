"""The bridge's metrics: recipes, fallbacks, recipe cache."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .card import Card


class MetricNotFound(Exception):
    """A metric of that name does not exist."""


class Metric:
    """Counts one kind of event of the card while it is started.

    Args:
        card: The card.
    """

    title = ""
    events: tuple[str, ...] = ()

    def __init__(self, card: Card) -> None:
        self._card = card
        self.reset()
        self.start()

    def name(self) -> str:
        """Returns the metric's name."""
        return self.title

    def start(self) -> None:
        """Begins to count."""
        self.stop()
        self._card.listen(self._note)

    def stop(self) -> None:
        """Ends counting."""
        self._card.forget(self._note)

    def reset(self) -> None:
        """Forgets what was counted."""
        self._counts = {event: Counter() for event in self.events}
        self._seconds = 0.0

    def stats(self) -> list[tuple[str, Any]]:
        """Returns names and values."""
        raise NotImplementedError

    def _note(self, event: str, name: str, seconds: float) -> None:
        if event in self._counts:
            self._counts[event][name] += 1
            self._seconds += seconds


class GraphCompilation(Metric):
    """Recipes built. Times are of this emulator, in microseconds, and measure nothing."""

    title = "graph_compilation"
    events = ("graph_compilation",)

    def stats(self) -> list[tuple[str, Any]]:
        """Returns number, total and mean time."""
        number, time = self._counts[self.title].total(), int(self._seconds * 1e6)
        mean = time / number if number else 0
        return [("TotalNumber", number), ("TotalTime", time), ("AvgTime", mean)]


class CpuFallback(Metric):
    """Operations that leave the card's compiler."""

    title = "cpu_fallback"
    events = ("cpu_fallback",)

    def stats(self) -> list[tuple[str, Any]]:
        """Returns the number and each operation's."""
        counts = self._counts[self.title]
        return [("TotalNumber", counts.total()), ("FallbackOps", dict(counts))]


class MemoryDefragmentation(Metric):
    """Never happens here."""

    title = "memory_defragmentation"

    def stats(self) -> list[tuple[str, Any]]:
        """Returns zeros."""
        return [("TotalNumber", 0), ("TotalSuccessful", 0), ("AvgTime", 0), ("MaxTime", 0)]


class RecipeCache(Metric):
    """Captures whose recipe existed already, and those whose did not."""

    title = "recipe_cache"
    events = ("hit", "miss")

    def stats(self) -> list[tuple[str, Any]]:
        """Returns hits and misses, altogether and by recipe."""
        hits, misses = self._counts["hit"], self._counts["miss"]
        return [
            ("TotalHit", hits.total()),
            ("RecipeHit", dict(hits)),
            ("TotalMiss", misses.total()),
            ("RecipeMiss", dict(misses)),
        ]


class Metrics:
    """All metrics of a card.

    Args:
        card: The card.
    """

    def __init__(self, card: Card) -> None:
        kinds = (GraphCompilation, CpuFallback, MemoryDefragmentation, RecipeCache)
        self._card = card
        self._kinds: dict[str, type[Metric]] = {kind.title: kind for kind in kinds}
        self._global = {name: kind(card) for name, kind in self._kinds.items()}

    def metric_global(self, name: str) -> Metric | None:
        """Returns the metric that counts from the start, or None if there is none."""
        return self._global.get(name) if self._enabled(name) else None

    @contextlib.contextmanager
    def metric_localcontext(self, name: str) -> Iterator[Metric]:
        """Counts inside a `with` block.

        Raises:
            MetricNotFound: There is no metric of that name.
        """
        if name not in self._kinds or not self._enabled(name):
            raise MetricNotFound(f"Metric {name!r} does not exist.")
        metric = self._kinds[name](self._card)
        try:
            yield metric
        finally:
            metric.stop()

    def _enabled(self, name: str) -> bool:
        wanted = os.environ.get("PT_HPU_ENABLE_CACHE_METRICS", "0").lower()
        return name != RecipeCache.title or wanted in ("1", "true", "t", "yes", "y", "on")
