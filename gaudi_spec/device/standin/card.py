"""The one emulated card of a process: its memory, its recipes, its events."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from ...errors import ConfigError
from ..recorder import Recorder, Recording

# generation -> (device name, bytes of memory, value of Intel's synDeviceType)
GENERATIONS = {"gaudi2": ("GAUDI2", 96_000_000_000, 4), "gaudi3": ("GAUDI3", 128_000_000_000, 5)}


class Card:
    """Counts what the emulated card does.

    Args:
        generation: "gaudi2" or "gaudi3".

    Attributes:
        recorder: The capture under way, or None.
        steps: Calls of `mark_step`.
    """

    def __init__(self, generation: str) -> None:
        if generation not in GENERATIONS:
            known = " or ".join(GENERATIONS)
            raise ConfigError(f"Unknown card {generation!r} to emulate: choose {known}.")
        self.generation = generation
        self.name, self.limit, self.kind = GENERATIONS[generation]
        self.recorder: Recorder | None = None
        self.steps = 0
        self._listeners: list[Callable[[str, str, float], None]] = []
        self._recipes: set[str] = set()
        self._held: weakref.WeakSet[Recording] = weakref.WeakSet()
        self._most = 0
        self._begin = 0.0

    def listen(self, listener: Callable[[str, str, float], None]) -> None:
        """Calls `listener(event, name, seconds)` for every event from now on."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[str, str, float], None]) -> None:
        """Ends what `listen` began."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def emit(self, event: str, name: str, seconds: float = 0.0) -> None:
        """Tells all listeners."""
        for listener in list(self._listeners):
            listener(event, name, seconds)

    def begin(self, dry_run: bool) -> None:
        """Begins a capture."""
        if self.recorder is not None:
            raise RuntimeError("A capture is already under way on this card.")
        self.recorder = Recorder(dry_run)
        self._begin = time.perf_counter()
        self.recorder.start()

    def end(self) -> Recording | None:
        """Ends the capture and compiles what it recorded; None if it broke a rule."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            raise RuntimeError("No capture is under way on this card.")
        recording = recorder.stop()
        for name in recorder.slow:
            self.emit("cpu_fallback", name)
        if recorder.failed:
            return None
        self._held.add(recording)
        self._most = max(self._most, self.in_use())
        recipe = recording.signature()
        new = recipe not in self._recipes
        self._recipes.add(recipe)
        self.emit("miss" if new else "hit", recipe)
        if new:
            self.emit("graph_compilation", recipe, time.perf_counter() - self._begin)
        return recording

    def in_use(self) -> int:
        """Returns the bytes of all tensors that live recordings read or write."""
        stores: dict[int, int] = {}
        for recording in self._held:
            stores.update(recording.storages())
        return sum(stores.values())

    def memory(self) -> dict[str, int]:
        """Returns the counters that the bridge's `memory_stats` has and that mean something here.

        Tensors that no graph has touched are not known to the emulator.
        """
        in_use = self.in_use()
        self._most = max(self._most, in_use)
        return {"Limit": self.limit, "InUse": in_use, "MaxInUse": self._most}

    def reset_peak(self) -> None:
        """Starts the peak again from what is in use."""
        self._most = self.in_use()
