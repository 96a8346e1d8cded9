"""Streams and events, which order nothing where everything runs at once."""

from __future__ import annotations

import time
from typing import Any


class Event:
    """A point in time.

    Args:
        enable_timing: Accepted for the bridge's sake, as are others.
    """

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Notes the time."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds to another event."""
        return (end._time - self._time) * 1000


class Stream:
    """A queue of work.

    Args:
        device: Not used.
        priority: Not used.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.is_capture = False

    def wait_event(self, event: Event) -> None:
        """Waits for nothing."""

    def wait_stream(self, stream: Stream) -> None:
        """Waits for nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Returns an event of now."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Waits for nothing."""


_default = Stream()
_current = [_default]


class stream:
    """Context in which a stream is the current one.

    Args:
        stream: The stream, or None for no change.
    """

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _current.append(self._stream or _current[-1])

    def __exit__(self, *error: object) -> None:
        _current.pop()


def default_stream(device: Any = None) -> Stream:
    """Returns the stream that work goes to if no other is chosen."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Returns the stream that work goes to now."""
    return _current[-1]
