"""Runs captured work once more without executing anything, and compares it with its recording.

A capture cannot see what will change later: a position that is a Python int, a flag, a tensor that
is allocated anew, a shape that grows. The card would replay the old values silently. Here each such
change is an error that names the operation.

The work's Python does run in a retrace, so side effects that a replay loses happen after all;
switch the check off to see them lost.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from . import rules
from .base import Work
from .recorder import Op, Recording, Unknown, enter


class Retrace(TorchDispatchMode):
    """Answers every operation with what the recording has in its place.

    Args:
        recording: What to compare with.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.position = 0
        self._recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.position == len(self._recording.ops):
            self.fail(f"{func} comes after the last of the {self.position} recorded operations")
        op = self._recording.ops[self.position]
        if func is not op.func:
            self.fail(f"{func} is done where the graph does {op.func}, recorded at {op.place}")
        key = self._recording.key(func, args, kwargs)
        for argument, (old, new) in enumerate(zip(op.key, key)):
            if old != new:
                self.fail(f"{func}: argument {argument} {self._change(old, new)}")
        if len(key) != len(op.key):
            self.fail(f"{func} takes {len(key)} arguments, not {len(op.key)}")
        self.position += 1
        return op.result

    def fail(self, what: str) -> None:
        """Raises a `CaptureError` that says what has changed and where."""
        raise CaptureError(
            f"The work is not what was captured: {what}. At {rules.caller()}. A replay would go on "
            "with what was captured."
        )

    def _change(self, old: Any, new: Any) -> str:
        """Says how an argument differs from the recorded one."""
        old, new = _first_difference(old, new)
        if isinstance(old, int) and isinstance(new, (int, Unknown)):
            was = self._recording.tensors[old]
            now = self._recording.tensors[new] if isinstance(new, int) else new.tensor
            if was.shape != now.shape:
                return f"has shape {list(now.shape)}, not {list(was.shape)}: shapes are fixed"
            if was.dtype != now.dtype:
                return f"is {now.dtype}, not {was.dtype}"
            if isinstance(new, int):
                return f"is another tensor of shape {list(now.shape)} than the one recorded"
            return (
                f"is a tensor of shape {list(now.shape)} at a new address: a graph reads fixed "
                "ones, so copy into the captured tensor"
            )
        return (
            f"is {_plain(new)}, not {_plain(old)}: Python values are constants of the graph, so "
            "make it a tensor"
        )


def retrace(recording: Recording, work: Work) -> Any:
    """Compares `work` as it is now with its recording, and returns what it returned.

    Raises:
        CaptureError: It would do something else than the recording.
    """
    mode = Retrace(recording)
    with contextlib.ExitStack() as stack:
        enter(stack, mode)
        result = work()
    if mode.position < len(recording.ops):
        op: Op = recording.ops[mode.position]
        raise CaptureError(
            f"The work is not what was captured: it ends after {mode.position} of "
            f"{len(recording.ops)} recorded operations; the next was {op.func} at {op.place}."
        )
    return result


def _first_difference(old: Any, new: Any) -> tuple[Any, Any]:
    """Returns where two tokens differ: the whole, or the first tensor of two lists that does."""
    lists = isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new)
    if lists and any(isinstance(item, (int, Unknown)) for item in new):
        return next((a, b) for a, b in zip(old, new) if a != b)
    return old, new


def _plain(token: Any) -> str:
    if isinstance(token, (int, Unknown)):
        return "a tensor"
    if not isinstance(token, tuple):
        return str(token)
    if len(token) == 2 and all(isinstance(part, str) for part in token):
        return token[1]
    return "[" + ", ".join(map(_plain, token)) + "]"
