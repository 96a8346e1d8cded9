"""Graphs of the emulated card that are compared with their work before each replay."""

from __future__ import annotations

import torch

from ..errors import CaptureError
from .base import Work
from .recorder import address


class Checked:
    """Calls `graph`, after comparing `work` with what it has recorded.

    Args:
        graph: A captured work of `hpu.py`; its `graph` is None until the first call.
        work: What it captures.
    """

    def __init__(self, graph: Work, work: Work) -> None:
        self._graph, self._work = graph, work
        self._output: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor | None:
        """Captures, or checks and replays.

        Raises:
            CaptureError: The work would not do what the graph does.
        """
        if self._graph.graph is not None:
            self._compare(self._graph.graph.verify(self._work))
        self._output = self._graph()
        return self._output

    def _compare(self, result: torch.Tensor | None) -> None:
        same = result is self._output
        if not same and isinstance(result, torch.Tensor) and self._output is not None:
            same = address(result) == address(self._output)
        if not same:
            raise CaptureError(
                "The work is not what was captured: it returns another tensor than it did, and a "
                "replay would go on returning that one."
            )
