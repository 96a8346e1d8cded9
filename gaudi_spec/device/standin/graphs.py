"""HPU graphs: capture, replay, and the wrapper that keeps one graph for each kind of call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import rules
from ..base import Work
from ..recorder import Recording
from ..retrace import retrace
from .card import Card
from .streams import Stream, default_stream, stream


class HPUGraph:
    """Work that is recorded once and replayed without Python.

    Args:
        card: Given by the stand-in; not an argument of the real class.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._recording: Recording | None = None
        self._inputs: list[torch.Tensor] = []

    def capture_begin(self, dry_run: bool = False) -> None:
        """Begins to record; with `dry_run` what is recorded has no lasting effect yet."""
        self._card.begin(dry_run)

    def capture_end(self) -> None:
        """Ends recording and compiles."""
        self._recording = self._card.end()

    def replay(self, asynchronous: bool = False) -> None:
        """Runs what was recorded; `asynchronous` changes nothing on a CPU."""
        if self._card.recorder is not None:
            raise RuntimeError("A graph cannot be replayed while a capture is under way.")
        if self._recording is None:
            raise RuntimeError("This graph holds no capture.")
        self._recording.replay()

    def replayV3(self, tlistI: list[torch.Tensor], asynchronous: bool = False) -> None:
        """Replays with the content of other tensors in place of the marked inputs."""
        for captured, given in zip(self._inputs, tlistI):
            if captured is not given:
                captured.copy_(given)
        self.replay(asynchronous)

    def mark_user_inputs(self, static_tlist: list[torch.Tensor]) -> None:
        """Names the inputs that `replayV3` replaces."""
        self._inputs = list(static_tlist)

    def mark_user_outputs(self, static_tlist: list[torch.Tensor]) -> None:
        """Names the outputs that are kept; all are kept here."""

    def clear_inputs(self) -> None:
        """Frees inputs that are written in place; nothing is freed here."""

    def get_user_input_match_indices(self) -> list[int]:
        """Returns inputs that are model parameters: none are told apart here."""
        return []

    def reset(self) -> None:
        """Drops what was recorded."""
        self._recording = None

    def verify(self, work: Work) -> Any:
        """Checks that `work` would still do what was recorded. The real class has no such method.

        Returns:
            What `work` returned, in the tensors of the capture.
        """
        return retrace(self._recording, work)


class graph:
    """Context in which an `HPUGraph` records.

    Args:
        hpu_graph: The graph.
        stream: Where; means nothing here.
        dry_run: See `HPUGraph.capture_begin`.
    """

    def __init__(
        self, hpu_graph: HPUGraph, stream: Stream | None = None, dry_run: bool = False
    ) -> None:
        self._graph, self._dry_run = hpu_graph, dry_run

    def __enter__(self) -> None:
        self._graph.capture_begin(self._dry_run)

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()


class Watch(TorchDispatchMode):
    """Counts, in work that runs without a graph, what the card would hand to the CPU."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if rules.slow(func, args):
            self._card.emit("cpu_fallback", str(func))
        return func(*args, **(kwargs or {}))


class _Entry(NamedTuple):
    graph: HPUGraph
    inputs: Any
    outputs: Any


def input_key(value: Any) -> int:
    """Returns Intel's key of an input: tensors by shape and view, all else by value.

    It is a hash and nothing else, so values that hash alike (-1 and -2, 1 and True) share a graph.
    Dtype and device do not count.
    """
    if isinstance(value, dict):
        return input_key(tuple(value.items()))
    if isinstance(value, torch.Size):
        return hash(value)
    if isinstance(value, (list, tuple)):
        return hash(tuple(map(input_key, value)))
    if isinstance(value, torch.Tensor):
        view = (value.stride(), value.storage_offset()) if value._is_view() else None
        return hash((value.shape, view))
    return hash(value)


def copy_into(captured: Any, given: Any) -> None:
    """Copies the content of all given tensors into the captured ones."""
    if isinstance(captured, dict):
        for name, value in captured.items():
            copy_into(value, given[name])
    elif isinstance(captured, (list, tuple)):
        for mine, other in zip(captured, given):
            copy_into(mine, other)
    elif isinstance(captured, torch.Tensor) and captured is not given:
        captured.copy_(given)


class _Wrapped:
    """A function with one graph for each key."""

    def __init__(self, card: Card, func: Callable, dry_run: bool, max_graphs: int | None) -> None:
        self._card, self._func, self._dry_run = card, func, dry_run
        self._max_graphs = max_graphs
        self.entries: dict[int, _Entry] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        warm_up = kwargs.pop("warmup_mode", False)
        if kwargs.pop("bypass_hpu_graphs", False):
            return self._plain(args, kwargs)
        key = input_key((args, kwargs))
        kwargs.pop("cache_tensors_list", None)
        entry = self.entries.get(key)
        if entry is None:
            if self._max_graphs is not None and len(self.entries) >= self._max_graphs:
                return self._plain(args, kwargs)
            return self._capture(key, args, kwargs)
        if not warm_up:
            with torch.no_grad():
                copy_into(entry.inputs, (args, kwargs))
            entry.graph.replay()
        return entry.outputs

    def _plain(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        with Watch(self._card):
            return self._func(*args, **kwargs)

    def _capture(self, key: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        hpu_graph = HPUGraph(self._card)
        with stream(default_stream()), graph(hpu_graph, dry_run=self._dry_run):
            outputs = self._func(*args, **kwargs)
        if self._dry_run:
            hpu_graph.replay()
        self.entries[key] = _Entry(hpu_graph, (args, kwargs), outputs)
        return outputs


def wrap_in_hpu_graph_func(
    card: Card,
    func: Callable,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> Callable:
    """Returns `func` with one graph for each kind of call, up to `max_graphs`.

    Arguments as in the bridge, after the card. Without its tensor cache the bridge always makes a
    dry run first.
    """
    cache_off = os.environ.get("PT_HPUGRAPH_DISABLE_TENSOR_CACHE")
    cache_off = disable_tensor_cache if cache_off is None else cache_off == "1"
    return _Wrapped(card, func, dry_run or cache_off, max_graphs)


def wrap_in_hpu_graph(
    card: Card,
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:
    """Replaces `module.forward` as `wrap_in_hpu_graph_func` would, and returns the module."""
    original = module.forward
    wrapped = wrap_in_hpu_graph_func(
        card, original, asynchronous, disable_tensor_cache, dry_run, max_graphs
    )

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    def clear_inputs() -> None:
        for entry in wrapped.entries.values():
            entry.graph.clear_inputs()

    module.forward = forward
    module.clear_cache = wrapped.entries.clear
    module.clear_inputs = clear_inputs
    return module
