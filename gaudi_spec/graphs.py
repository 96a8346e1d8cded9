"""Owns every compilation: which shapes exist, when each is built, and what is counted about it.

A *graph* is one function over persistent buffers, captured once for its key and replayed from then
on. The set of keys is closed by the warm-up; a key that comes later is an error in strict mode, and
otherwise built, counted and warned about once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tqdm import tqdm

from .device import Device
from .errors import ShapeError
from .sampling.rules import GREEDY, Structure

Work = Callable[[], "torch.Tensor | None"]


class Key(NamedTuple):
    """What tells one graph from another.

    Attributes:
        role: "fill target", "fill draft", "cycle", or "draft" and "verify" of a split cycle; where
            the host decides, "score" and "commit" stand for "verify". "verify of 5" verifies fewer
            than the 5 that were drafted.
        batch: B.
        width: K of a cycle, tokens of a fill.
        window: Slots that attention reads.
        rules: How tokens are chosen; a fill chooses none.
    """

    role: str
    batch: int
    width: int
    window: int
    rules: Structure = GREEDY

    def __str__(self) -> str:
        rules = ""
        if self.rules != GREEDY:
            rules = ", ".join(["", self.rules.verifier, *(name for name, *_ in self.rules.steps)])
        return f"{self.role} [B={self.batch}, width={self.width}, window={self.window}{rules}]"


@dataclass
class GraphFacts:
    """What was counted.

    Attributes:
        warmup: Graphs built before the set was closed.
        after_warmup: Graphs built later.
        hits: Calls that found their graph.
        ungraphed: Keys that run without a graph, because there were `max_graphs` already.
        seconds: Time spent building, first runs included.
    """

    warmup: int = 0
    after_warmup: int = 0
    hits: int = 0
    ungraphed: int = 0
    seconds: float = 0.0

    @property
    def built(self) -> int:
        """Graphs built, at any time."""
        return self.warmup + self.after_warmup


class GraphRunner:
    """Runs work by key, building each graph on its first call.

    Args:
        device: Captures the work.
        capture: False runs everything eagerly; keys are counted all the same.
        strict: Makes a new key after the warm-up an error.
        limit: Graphs that are captured at most; None: no limit.

    Attributes:
        facts: What was counted.
        origin: Names, with a key, the graph of that key in every process, so that it can be kept
            on disk; "": it is not.
    """

    def __init__(
        self, device: Device, capture: bool, strict: bool, limit: int | None = None
    ) -> None:
        self.origin = ""
        self.facts = GraphFacts()
        self._device, self._capture, self._strict = device, capture, strict
        self._limit = limit
        self._graphs: dict[Key, Work] = {}
        self._closed = False

    def run(self, key: Key, work: Work) -> torch.Tensor | None:
        """Runs `work`, or the graph that was captured for `key` before.

        Args:
            key: Must determine everything about `work` but the content of its buffers.
            work: Takes nothing, reads and writes persistent buffers only, and returns one tensor,
                which is the same at every replay.

        Raises:
            ShapeError: The key is new after the warm-up, in strict mode.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self.facts.hits += 1
            return graph()
        if self._closed:
            self._report_new(key)
        begin = time.perf_counter()
        graph = work
        if self._capture and not self._full(key):
            graph = self._device.capture(work, self.origin and f"{self.origin} {key!r}")
        self._graphs[key] = graph
        result = graph()
        self._device.synchronize()
        self.facts.seconds += time.perf_counter() - begin
        if self._closed:
            self.facts.after_warmup += 1
        else:
            self.facts.warmup += 1
        return result

    def warm_up(self, jobs: Iterable[tuple[Key, Work]], quiet: bool) -> None:
        """Builds all graphs, showing which one and how many are left, and closes the set."""
        self._closed = False
        new = {key: work for key, work in jobs if key not in self._graphs}
        jobs = list(new.items())
        with tqdm(jobs, desc="build", unit="graph", **({"disable": True} if quiet else {})) as bar:
            for key, work in bar:
                bar.set_postfix_str(str(key))
                self.run(key, work)
        self._closed = True

    def _full(self, key: Key) -> bool:
        if self._limit is None or len(self._graphs) < self._limit:
            return False
        if not self.facts.ungraphed:
            warnings.warn(
                f"There are max_graphs={self._limit} graphs: {key} and later ones run without "
                "one, which is slower.",
                stacklevel=4,
            )
        self.facts.ungraphed += 1
        return True

    def _report_new(self, key: Key) -> None:
        message = f"{key} was not built in the warm-up"
        if self._strict:
            raise ShapeError(f"{message}, and strict_shapes forbids building it now.")
        if not self.facts.after_warmup:
            warnings.warn(f"{message}; it is built now, which takes time.", stacklevel=4)
