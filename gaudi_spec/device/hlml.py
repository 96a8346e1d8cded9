"""What a Gaudi card says of itself through Intel's management library, where `pyhlml` is there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

# Ours, pyhlml's function, and how a value of ours comes of what it returns.
_COUNTERS: dict[str, tuple[str, Callable[[Any], float]]] = {
    # A number in older releases, then a structure; of the last second, in percent.
    "card_utilisation": ("UtilizationRates", lambda rates: getattr(rates, "aip", rates) / 100),
    "card_power_watts": ("PowerUsage", lambda milliwatts: milliwatts / 1000),
    "card_memory_gb": ("MemoryInfo", lambda memory: memory.used / 1e9),
}


class Counters:
    """The management library, opened once.

    It numbers cards in its own way, so it is asked only where it sees one card: one that belongs
    to somebody else would be worse than none.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._card: Any = None
        with contextlib.suppress(Exception):  # not installed, or no driver beneath it
            library = importlib.import_module("pyhlml")
            library.hlmlInit()
            if library.hlmlDeviceGetCount() == 1:
                self._card = library.hlmlDeviceGetHandleByIndex(0)
                self._library = library

    def read(self) -> dict[str, float]:
        """Returns what the card says, of the last second; what it does not say is left out."""
        values = {}
        for ours, (theirs, convert) in _COUNTERS.items() if self._library else ():
            with contextlib.suppress(Exception):  # not supported by this card or release
                values[ours] = convert(getattr(self._library, f"hlmlDeviceGet{theirs}")(self._card))
        return values
