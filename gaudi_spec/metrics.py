"""Counted facts of a generation.

Emitted tokens are the returned ones: never padding, never rejected, never past the end of text.
Acceptance rate is accepted / proposed; mean acceptance length is 1 + accepted / drafts, so it
includes the target's own token (the definitions and words of vLLM's metrics).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from .cycle import RowOutcome
from .graphs import GraphFacts


@dataclass
class Report:
    """What one call did.

    Attributes:
        drafter: Name of the drafter, or None where decoding was plain by request.
        schedule: Name of what chose K, or None where nothing could be drafted.
        schedule_reason: Why it chose the last K, where it says so.
        k_trace: `[K, cycles]` for each run of cycles that verified K drafts; 0 is plain decoding.
        step_seconds: Wall time of a cycle by K, drafting and host read included: the running
            lower quartiles of what was measured.
        cycles: Verifications, each one forward of the target over the whole batch.
        host_reads: Times the host read what cycles did.
        drafts: Rows x cycles in which at least one proposal counted.
        proposed_at: Proposals at each block position.
        accepted_at: Accepted proposals at each block position.
        emitted: Tokens returned, by row.
        finish_reasons: Why each row ended: "stop" (end of text), "length" (budget), "stop_string",
            "max_time" or "criteria" (a stopping criterion of the caller's).
        reused_tokens: Prompt tokens that were still in the caches from the call before.
        target_forwards: Target calls while decoding.
        target_prefill_forwards: Target calls while reading prompts.
        draft_forwards: Draft calls, prompts included.
        seconds: Wall time of each phase: prefill, draft, verify (with commit and host read), or
            cycle where drafting and verification are one graph. Where processors run on the host
            score, host and commit stand for verify.
        first_token_seconds: From the start of the call to the end of its first cycle.
        target_shapes: Distinct (method, B, T) the target has been called with since it was built.
        draft_shapes: The same for the draft.
        graphs: Graphs built and replayed since the buffers were allocated.
    """

    drafter: str | None = None
    schedule: str | None = None
    schedule_reason: str = ""
    k_trace: list[list[int]] = field(default_factory=list)
    step_seconds: dict[int, float] = field(default_factory=dict)
    cycles: int = 0
    host_reads: int = 0
    drafts: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    reused_tokens: int = 0
    target_forwards: int = 0
    target_prefill_forwards: int = 0
    draft_forwards: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
    )
    first_token_seconds: float | None = None
    target_shapes: int = 0
    draft_shapes: int = 0
    graphs: GraphFacts = field(default_factory=GraphFacts)

    def add_cycle(self, k: int) -> None:
        """Counts one verification of k drafts."""
        if not self.k_trace or self.k_trace[-1][0] != k:
            self.k_trace.append([k, 0])
        self.k_trace[-1][1] += 1
        self.cycles += 1
        self.target_forwards += 1

    @property
    def cycles_by_k(self) -> dict[int, int]:
        """Cycles of each K, smallest first."""
        counts: Counter[int] = Counter()
        for k, cycles in self.k_trace:
            counts[k] += cycles
        return dict(sorted(counts.items()))

    def add_row(self, index: int, row: RowOutcome) -> None:
        """Counts what a cycle did to one row."""
        for counts in (self.proposed_at, self.accepted_at):
            counts.extend([0] * (row.n_proposed - len(counts)))
        self.drafts += row.n_proposed > 0
        for i in range(row.n_proposed):
            self.proposed_at[i] += 1
            self.accepted_at[i] += i < row.n_accepted
        self.emitted[index] += row.n_emitted

    @property
    def proposed(self) -> int:
        """Drafted tokens that counted."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were returned."""
        return sum(self.accepted_at)

    @property
    def emitted_tokens(self) -> int:
        """Tokens returned."""
        return sum(self.emitted)

    @property
    def target_tokens(self) -> int:
        """Returned tokens that the target added itself: emitted - accepted."""
        return self.emitted_tokens - self.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed, or None if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, or None if nothing was proposed."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / proposed at each block position."""
        return [a / p for a, p in zip(self.accepted_at, self.proposed_at)]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "drafter": self.drafter,
            "batch_size": len(self.emitted),
            "schedule": self.schedule,
            "schedule_reason": self.schedule_reason,
            "k_trace": [list(run) for run in self.k_trace],
            "step_seconds": {str(k): s for k, s in sorted(self.step_seconds.items())},
            "cycles": self.cycles,
            "host_reads": self.host_reads,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "emitted_tokens": self.emitted_tokens,
            "target_tokens": self.target_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "finish_reasons": list(self.finish_reasons),
            "reused_tokens": self.reused_tokens,
            "target_forwards": self.target_forwards,
            "target_prefill_forwards": self.target_prefill_forwards,
            "draft_forwards": self.draft_forwards,
            "seconds": dict(self.seconds),
            "first_token_seconds": self.first_token_seconds,
            "target_shapes": self.target_shapes,
            "draft_shapes": self.draft_shapes,
            "graphs": dataclasses.asdict(self.graphs),
        }


def total(reports: Sequence[Report]) -> Report:
    """Returns the facts of several calls of one engine as those of one, rows in their order."""
    whole = copy.deepcopy(reports[0])
    for report in reports[1:]:
        for counted in dataclasses.fields(Report):
            old, new = getattr(whole, counted.name), getattr(report, counted.name)
            if counted.name in ("proposed_at", "accepted_at"):
                new = [a + b for a, b in zip_longest(old, new, fillvalue=0)]
            elif isinstance(new, dict):
                new = {key: old.get(key, 0) + value for key, value in new.items()}
            elif counted.name in ("drafter", "target_shapes", "draft_shapes", "graphs"):
                pass  # what the last call says includes the calls before
            elif counted.name == "first_token_seconds":
                new = old
            else:
                new = old + new
            setattr(whole, counted.name, new)
    return whole
