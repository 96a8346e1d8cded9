"""Buffers and graphs of one pair of models at one size: the device side of the engine.

The shapes that exist: each model's prefill chunks, and one cycle for each K (0 among them) and
attention window.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import cycle
from .adapt import adapt
from .blocks import Blocks
from .buckets import chunks, drafts, windows
from .config import SpecConfig
from .device import Device
from .drafters.base import Context, Drafter, Hosted
from .drafters.registry import pick
from .graphs import GraphRunner, Key, Work
from .metrics import Report
from .models.base import ModelAdapter
from .models.support import max_positions
from .parts import Parts
from .request import Request
from .sampling.options import Sampling
from .sampling.rules import Structure
from .schedule import Costs
from .state import State
from .timing import StepTimes

_TIMED = 3  # cycles of each K that are measured after the warm-up


class Runtime:
    """Allocates everything once; then fills caches and runs cycles over it.

    Args:
        target: The target model.
        draft: The draft model or None.
        config: Settings.
        device: Where the models are.
        batch: B.
        slots: S of the target; the draft gets as many, or as its own positions allow.
        widest: Largest K that will be asked for.

    Attributes:
        state: Device state.
        captures: Whether work is captured as graphs here.
        parts: What a cycle consists of.
        graphs: The graph runner with its counts.
        seconds: Wall time by phase; "cycle" where drafting and verification are one graph.
        trims: Whether proposals are cut by their confidence, so that the host chooses the width of
            the verification.
        times: What cycles have taken.
        prefill_forwards: Target calls made by `prefill` since `reset`.
        warned_room: Whether a caller was told that rows have outgrown the draft.
        warned_acceptance: Whether a caller was told that the draft is hardly ever right.
        held: Tokens of each row whose cache entries are sound, all but the last one's.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        config: SpecConfig,
        device: Device,
        batch: int,
        slots: int,
        widest: int,
    ) -> None:
        self.device, self.config = device, config
        self.captures = config.captures(device.captures)
        self.target: ModelAdapter = adapt(target, "target", device, config, batch, slots)
        self.state = State(
            batch,
            slots,
            widest + 1,
            self.target.vocab_size,
            device.torch_device,
            config.verification,
        )
        self.graphs = GraphRunner(device, self.captures, config.strict_shapes, config.max_graphs)
        self._hosted: dict[str, ModelAdapter] = {}
        self.drafter: Drafter | None = None
        kind = pick(config.drafter, draft is not None)
        if kind is not None:
            self.drafter = kind(Context(config, self.target, draft, batch, slots, self._host))
        self.trims = config.confidence is not None and self.drafter is not None
        fused = self.captures and config.fuse_cycle and not self.trims
        self._windows = windows(slots, config.bucket_size)
        self.blocks = Blocks(
            batch,
            self.target.vocab_size,
            device.torch_device,
            config.keep_logits,
            config.sync_every,
            cycle.FACTS + widest + 1,
        )
        self.parts = Parts(self.state, self.target, self.drafter, self.blocks, fused)
        self.times = StepTimes()
        self._fill_seconds = 0.0  # of a token of catching up, at best
        self._built: set[tuple[Structure, bool]] = set()
        self.warned_room = self.warned_acceptance = False
        self.held: list[list[int]] = [[] for _ in range(batch)]
        self.reset()
        if self.captures:
            self.graphs.origin = device.identify(self)

    def clean(self) -> None:
        """Zeroes all caches: a NaN in a stale slot would pass through every mask."""
        for model in self.models.values():
            model.cache.zero()
        self.held = [[] for _ in self.held]

    @property
    def models(self) -> dict[str, ModelAdapter]:
        """Every model that has a cache here, by role: the target and those of the drafter."""
        return {"target": self.target, **self._hosted}

    def _host(self, model: Any) -> Hosted:
        """Allocates a cache for a drafter's model, of S slots or as its own positions allow."""
        slots = self.state.slots
        room = min(slots, max_positions(model.config) or slots)
        adapter = adapt(model, "draft", self.device, self.config, self.state.batch, room)
        role = f"draft {len(self._hosted)}" if self._hosted else "draft"
        self._hosted[role] = adapter
        return Hosted(adapter, functools.partial(self._fill, role, adapter))

    def reset(self, kept: Sequence[int] = ()) -> None:
        """Starts a new call, to which the first `kept` cache entries of each row are of use."""
        self.seconds: dict[str, float] = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        if self.parts.fused:
            self.seconds = {"prefill": 0.0, "cycle": 0.0}
        self.prefill_forwards = 0
        if self.drafter is not None:
            self.drafter.reset(kept)

    def tell(self, report: Report) -> None:
        """Writes what is counted here into `report`."""
        report.seconds = dict(self.seconds)
        report.target_prefill_forwards = self.prefill_forwards
        report.target_shapes = len(self.target.shapes)
        report.graphs = dataclasses.replace(self.graphs.facts)
        if self.drafter is not None:
            report.drafter = {"auto": "model"}.get(self.config.drafter, self.config.drafter)
            report.draft_forwards = self.drafter.forwards
            report.draft_shapes = len(self.drafter.shapes)

    @torch.no_grad()
    def prefill(self, starts: Sequence[int], count: int) -> None:
        """Feeds `count` tokens of every row, from its start on, to the target."""
        self.prefill_forwards += self._fill("target", self.target, starts, count)
        self.device.synchronize()

    def window(self, need: int) -> int:
        """Returns the smallest attention window that covers `need` slots."""
        return next((w for w in self._windows if w >= need), self._windows[-1])

    def costs(self, lengths: list[int], live: list[bool], left: int) -> Costs:
        """Returns what is known of time for the next cycle; `left` is the largest rest of a row."""
        window = self.window(max(n for n, alive in zip(lengths, live) if alive))
        behind = 0 if self.drafter is None else self.drafter.behind(lengths, live)
        seconds = self.times.at(window, self.state.rules.structure)
        return Costs(seconds, behind * self._fill_seconds, left)

    @torch.no_grad()
    def catch_up(self, lengths: list[int], live: list[bool]) -> None:
        """Makes the drafter's cache cover what was committed without it."""
        assert self.drafter is not None
        begin, behind = time.perf_counter(), self.drafter.behind(lengths, live)
        self.drafter.catch_up(self.state, lengths, live)
        if behind:
            self.device.synchronize()
            seconds = (time.perf_counter() - begin) / behind
            self._fill_seconds = min(seconds, self._fill_seconds or seconds)
        self.seconds["cycle" if self.parts.fused else "draft"] += time.perf_counter() - begin

    @torch.no_grad()
    def cycle(self, k: int, lengths: list[int], live: list[bool], ahead: int = 0) -> torch.Tensor:
        """Runs one cycle.

        Args:
            k: Draft tokens; 0 decodes plainly. The drafter must have caught up.
            lengths: The host's copy of each row's length, `ahead` tokens old at most.
            live: Rows that still generate.
            ahead: Tokens that rows may have gained since.

        Returns:
            The packed outcome, see `cycle.check`; overwritten by the next cycle. Its K is smaller
            where confidence has left no row more to verify.
        """
        window = self.window(max(n for n, alive in zip(lengths, live) if alive) + ahead + k)
        todo = self.parts.of(k, k, window)
        packed = None
        while todo:
            role, width, work = todo.pop(0)
            begin = time.perf_counter()
            if role == "host":
                work()
            else:
                packed = self.graphs.run(self._cycle_key(role, k, width, window), work)
            self.device.border()
            if role == "draft" and self.trims and k:
                assert packed is not None
                most = int(packed)  # waits for the draft
                todo = self.parts.of(k, next(n for n in (0, *drafts(k)) if n >= most), window)[1:]
            self.seconds[role] = self.seconds.get(role, 0.0) + time.perf_counter() - begin
        return packed

    @torch.no_grad()
    def warm_up(self, sizes: set[int], quiet: bool, like: Request | None = None) -> None:
        """Builds every graph that can be needed for these K and closes the set.

        Args:
            sizes: Every K.
            quiet: No progress bar.
            like: Its rules are those of the graphs; None builds greedy ones.
        """
        rows, budget = self.state.batch, self.state.slots - 2
        ends, sampling = (like.eos_token_ids, like.sampling) if like else ((), Sampling())
        sampling = dataclasses.replace(sampling, seed=0)
        prompts = [torch.zeros(2, dtype=torch.long)] * rows
        self.state.reset(prompts, [budget] * rows, 0, ends, sampling)
        self.held = [[] for _ in self.held]
        self.graphs.warm_up(self._jobs(sizes), quiet)
        self._built.add((self.state.rules.structure, sampling.on_host))
        measured = self.config.policy == "auto" and self.drafter is not None
        if measured and not sampling.on_host:  # whose processors may have a memory
            self.state.reset(prompts, [budget] * rows, 0, ends, sampling)
            self._time(sizes)

    def _time(self, sizes: set[int]) -> None:
        """Measures a cycle of each K, so that none has to be tried for that."""
        rows = self.state.batch
        for k in sorted({0, *sizes}) * _TIMED:
            begin = time.perf_counter()
            self.cycle(k, [2] * rows, [True] * rows).tolist()
            seconds = time.perf_counter() - begin
            self.times.add(k, seconds, self.window(2), self.state.rules.structure)

    def knows(self, request: Request) -> bool:
        """Returns whether no graph has to be built for the rules of `request`."""
        sampling = dataclasses.replace(request.sampling, seed=0)
        plan = self.state.plan(sampling, request.eos_token_ids)
        return not self.captures or (plan.structure, sampling.on_host) in self._built

    def _jobs(self, sizes: set[int]) -> Iterator[tuple[Key, Work]]:
        for role, model in self.models.items():
            for width in self.config.prefill_chunks:
                yield self._fill_key(role, width, model), self._fill_work(model, width)
        for k in sorted({0, *sizes} if self.drafter is not None else {0}):
            verified = (0, *drafts(k)) if self.trims and k else (k,)
            for window, n in itertools.product(self._windows, verified):
                for role, width, work in self.parts.of(k, n, window):
                    if role != "host":
                        yield self._cycle_key(role, k, width, window), work

    def _cycle_key(self, role: str, k: int, width: int, window: int) -> Key:
        role = role if width == k else f"{role} of {k}"
        return Key(role, self.state.batch, width, window, self.state.rules.structure)

    def _fill(self, role: str, model: ModelAdapter, starts: Sequence[int], count: int) -> int:
        """Feeds `count` tokens of every row to a model, and returns in how many chunks."""
        start = torch.tensor(starts)
        free = self.device.free_tokens / self.state.batch
        widths = chunks(count, self.config.prefill_chunks, free)
        for width in widths:
            self.state.cursor.copy_(start)
            self.graphs.run(self._fill_key(role, width, model), self._fill_work(model, width))
            self.device.border()
            start = start + width
        return len(widths)

    def _fill_key(self, role: str, width: int, model: ModelAdapter) -> Key:
        return Key(f"fill {role}", self.state.batch, width, model.slots)

    def _fill_work(self, model: ModelAdapter, width: int) -> Work:
        state = self.state

        def work() -> torch.Tensor:
            model.cache.window = model.slots
            return cycle.fill(state, model, width)

        return work
