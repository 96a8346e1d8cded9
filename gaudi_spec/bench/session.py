"""Runs contenders in turn over workloads, and makes one row of figures of each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import SpecConfig
from ..device import Device
from ..drafters.registry import pick
from ..engine import SpeculativeEngine
from ..loading import Pair
from .card import Card
from .contenders import Call, Contender, LlamaCpp, Ours, Transformers
from .figures import Sample
from .flags import BASELINES
from .rows import Entry, row
from .workloads import Workload


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        workloads: Prompts.
        batches: Every B.
        budgets: Every number of new tokens.
        sizes: Every K but 0, None being what the settings choose; none where nothing drafts.
        settings: What is varied, by name, and the settings with it.
        whole: Use all prompts of a workload, B at a time; else the first B.
        call: Ends and sampling; the budget is replaced.
        baselines: Of `BASELINES`; our own plain decoding always runs.
        gguf: For llama.cpp.
        repetitions: Timed, after `warmup` untimed ones.
        warmup: Untimed runs of the first batch.
    """

    workloads: list[Workload]
    batches: list[int]
    budgets: list[int]
    sizes: list[int | None]
    settings: list[tuple[dict[str, Any], SpecConfig]]
    whole: bool
    call: Call
    baselines: tuple[str, ...] = BASELINES
    gguf: str | None = None
    repetitions: int = 3
    warmup: int = 1

    def cases(self, batch: int) -> Iterator[tuple[Workload, int]]:
        """Yields what is run with `batch` rows."""
        for workload in self.workloads:
            for budget in self.budgets:
                yield workload if self.whole else workload.take(batch), budget

    def longest(self, batch: int) -> int:
        """Returns the tokens of the longest row."""
        return max(max(map(len, workload.rows)) + budget for workload, budget in self.cases(batch))


def interleave(
    contenders: Sequence[Contender],
    batches: Sequence[list[list[int]]],
    call: Call,
    repetitions: int,
    done: Callable[[Contender], object],
) -> list[list[list[Sample]]]:
    """Runs A B A B ...: every contender in turn on each batch, so that all see the same noise.

    Returns:
        For each contender, for each repetition, its samples.
    """
    rounds: list[list[list[Sample]]] = [[[] for _ in range(repetitions)] for _ in contenders]
    for repetition in range(repetitions):
        for prompts in batches:
            for contender, found in zip(contenders, rounds):
                found[repetition] += contender.run(prompts, call)
                done(contender)
    return rounds


class Session:
    """One run of the benchmark.

    Args:
        pair: The models.
        device: Where they are.
        plan: What to measure.
        card: Sizes and ceilings.
        progress: Makes a progress bar of a name and a total, see `results.progress`.
        quiet: No progress from the building of graphs.
    """

    def __init__(
        self, pair: Pair, device: Device, plan: Plan, card: Card, progress: Any, quiet: bool
    ) -> None:
        self.pair, self.device, self.plan, self.card = pair, device, plan, card
        self._progress, self._quiet = progress, quiet

    def run(self) -> Iterator[dict[str, Any]]:
        """Yields one row for each case and contender, as soon as the case is done."""
        for batch in self.plan.batches:
            entries = self._entries(batch)
            for workload, budget in self.plan.cases(batch):
                call = dataclasses.replace(self.plan.call, new_tokens=budget)
                self._measure(entries, workload, batch, call)
                yield from self._rows(entries, workload, batch, call)

    def _entries(self, batch: int) -> list[Entry]:
        """Makes the contenders for batches of this size."""
        plan, pair, entries = self.plan, self.pair, []
        slots = plan.longest(batch)
        fixed = [k for k in plan.sizes if k is not None]
        for values, config in plan.settings:
            draft = pair.draft if needs_draft(config, pair) else None
            config = config.replace(batch_size=batch, max_length=max(slots, 2))
            if fixed:
                config = config.replace(num_assistant_tokens=max(fixed))
            if None in plan.sizes and config.schedule is None:
                config = config.replace(schedule="auto")
            engine = SpeculativeEngine(pair.target, draft, config, self.device)
            plain = Entry(Ours(engine, 0, "plain"), values)
            entries.append(plain)
            split = config.fuse_cycle and config.captures(self.device.captures)
            for k in plan.sizes:
                name = "scheduled" if k is None else "speculative"
                entry = Entry(Ours(engine, k, name), values, plain)
                entries.append(entry)
                entry.parts = None if k is None else entry
                if split and k is not None:
                    entry.parts = Entry(Ours(engine, k, "parts", False), hidden=True)
                    entries.append(entry.parts)
        first = entries[0]
        if "transformers" in plan.baselines:
            entries.append(Entry(Transformers(pair), plain=first))
        drafter = plan.settings[0][1].drafter
        lookup = not needs_draft(plan.settings[0][1], pair)
        if "assisted" in plan.baselines and fixed and (drafter == "ngram" or not lookup):
            entries.append(Entry(Transformers(pair, fixed[0], lookup), plain=first))
        if "llama.cpp" in plan.baselines and LlamaCpp.missing(plan.gguf) is None:
            entries.append(Entry(LlamaCpp(str(plan.gguf), slots + 1), plain=first))
        return entries

    def _measure(self, entries: list[Entry], workload: Workload, batch: int, call: Call) -> None:
        plan, batches = self.plan, workload.batches(batch)
        everyone = [entry.contender for entry in entries]
        total = len(entries) * (plan.warmup + plan.repetitions * len(batches))
        name = f"{workload.name}, B={batch}"
        with self._progress(desc=name, total=total, unit="run") as bar:
            said: dict[int, list[dict[str, float]]] = {}

            def done(contender: Contender) -> None:
                said.setdefault(id(contender), []).append(self.device.counters())
                bar.update()

            for entry in entries:
                begin = time.perf_counter()
                entry.contender.build(batch, plan.longest(batch), call, self._quiet)
                interleave([entry.contender], batches[:1], call, plan.warmup, done)
                entry.warmup = time.perf_counter() - begin
            said.clear()
            rounds = interleave(everyone, batches, call, plan.repetitions, done)
        for entry, found in zip(entries, rounds):
            entry.rounds, entry.counters = found, said[id(entry.contender)]

    def _rows(
        self, entries: list[Entry], workload: Workload, batch: int, call: Call
    ) -> Iterator[dict[str, Any]]:
        prompt = sum(map(len, workload.rows)) / len(workload.rows)
        for entry in entries:
            if not entry.hidden:
                yield {
                    "device": self.device.name,
                    "contender": entry.contender.name,
                    "workload": workload.name,
                    "batch_size": batch,
                    "num_assistant_tokens": entry.contender.k,
                    **entry.settings,
                    "input_tokens": prompt,
                    "max_new_tokens": call.new_tokens,
                    "repetitions": len(entry.rounds),
                    **row(entry, call, self.card, prompt),
                }


def needs_draft(config: SpecConfig, pair: Pair) -> bool:
    """Returns whether these settings draft with the draft model."""
    if pair.draft is None or config.drafter == "ngram":
        return False
    return pick(config.drafter, True) is not None
