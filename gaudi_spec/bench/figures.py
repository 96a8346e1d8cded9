"""The arithmetic of every figure: pure functions of what was timed and counted.

Emitted tokens are the returned ones. Decoding starts where the first tokens have arrived, so
decode-only figures leave out the prompt and the first step, for everybody alike.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..leviathan import break_even, leviathan
from ..metrics import Report

PERCENTILES = (50, 90, 99)


@dataclass
class Sample:
    """One timed call.

    Attributes:
        seconds: Wall time of the call.
        arrivals: For each row, the seconds since the start of the call at which each of its
            emitted tokens was there for the caller.
        tokens: Emitted ids of each row.
        steps: Forwards of the target after the first tokens, or None if nobody counted them.
        phases: Seconds of each phase after the first tokens.
        report: What the engine counted, or None where it was not ours.
    """

    seconds: float
    arrivals: list[list[float]]
    tokens: list[list[int]]
    steps: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    report: Report | None = None

    @property
    def emitted(self) -> int:
        """Tokens returned."""
        return sum(map(len, self.tokens))

    @property
    def first(self) -> float:
        """When the first token was there."""
        return min(row[0] for row in self.arrivals)

    @property
    def decode_seconds(self) -> float:
        """From the first tokens to the last one."""
        return max(row[-1] for row in self.arrivals) - self.first

    @property
    def decode_tokens(self) -> int:
        """Tokens that arrived after the first ones."""
        first = self.first
        return sum(time > first for row in self.arrivals for time in row)


Round = Sequence[Sample]  # one repetition: the calls that a workload takes


def decode_rate(samples: Round) -> float | None:
    """Returns decode-only tokens per second, or None if nothing came after the first tokens."""
    seconds = sum(sample.decode_seconds for sample in samples)
    return sum(sample.decode_tokens for sample in samples) / seconds if seconds else None


def end_to_end_rate(samples: Round) -> float:
    """Returns emitted tokens per second of wall time, prompts included."""
    return sum(s.emitted for s in samples) / sum(s.seconds for s in samples)


def spread(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """Returns the median of repetitions under `name`, with `name_min` and `name_max`."""
    found = [value for value in values if value is not None]
    if not found:
        return {name: None}
    low, high = min(found), max(found)
    return {name: statistics.median(found), f"{name}_min": low, f"{name}_max": high}


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Returns `name_ms_p50`, `_p90` and `_p99`, interpolated linearly."""
    marks = numpy.percentile(seconds, PERCENTILES).tolist() if seconds else [None] * 3
    return {
        f"{name}_ms_p{p}": None if value is None else 1000 * value
        for p, value in zip(PERCENTILES, marks)
    }


def latencies(samples: Round) -> dict[str, float | None]:
    """Returns percentiles over rows, and over all gaps between two tokens of a row.

    Time to the first token; time per token after it (TPOT); inter-token latency. Tokens of one
    block arrive together, so gaps of 0 are among the last.
    """
    rows = [row for sample in samples for row in sample.arrivals]
    rests = [(row[-1] - row[0]) / (len(row) - 1) for row in rows if len(row) > 1]
    gaps = [after - before for row in rows for before, after in itertools.pairwise(row)]
    return {
        **percentiles("ttft", [row[0] for row in rows]),
        **percentiles("tpot", rests),
        **percentiles("inter_token", gaps),
    }


def merged(reports: Iterable[Report]) -> Report:
    """Returns one report with the counts of all."""
    total = Report()
    for report in reports:
        for name in ("cycles", "host_reads", "drafts", "target_forwards", "draft_forwards"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        for name in ("proposed_at", "accepted_at"):
            pairs = itertools.zip_longest(getattr(total, name), getattr(report, name), fillvalue=0)
            setattr(total, name, [a + b for a, b in pairs])
        total.emitted += report.emitted
        total.k_trace += report.k_trace
        total.drafter, total.graphs = report.drafter, report.graphs
    return total


def phase_ms(samples: Round, *names: str) -> float | None:
    """Returns milliseconds that the named phases take in a cycle, or None if none was timed."""
    steps = sum(sample.steps or 0 for sample in samples)
    times = [s.phases[name] for s in samples for name in names if name in s.phases]
    return 1000 * sum(times) / steps if steps and times else None


def step_ms(samples: Round) -> float | None:
    """Returns milliseconds of decoding per forward of the target, host included."""
    steps = sum(sample.steps or 0 for sample in samples)
    return 1000 * sum(s.decode_seconds for s in samples) / steps if steps else None


def alpha(report: Report) -> float | None:
    """Returns Leviathan's acceptance: accepted tokens among those that were tested.

    A token is tested if all before it in its block were accepted. (The acceptance *rate* counts
    the untested ones as rejected, so it falls with K.) Exact where all rows propose K tokens; a
    row near its end proposes fewer, and is then counted as if it had been tested once more.
    """
    if not report.proposed:
        return None
    reached = [report.proposed_at[0], *report.accepted_at]
    return report.accepted / sum(min(r, p) for r, p in zip(reached, report.proposed_at))


def speculation(
    speedup: float | None,
    report: Report,
    k: int,
    plain_ms: float,
    draft_ms: float,
    verify_ms: float,
) -> dict[str, Any]:
    """Returns what the formula says for the measured acceptance and step times.

    Args:
        speedup: Measured, decode-only, over plain decoding.
        report: Counts.
        k: K, the same in every cycle.
        plain_ms: A plain step.
        draft_ms: Drafting K tokens.
        verify_ms: Verifying them and committing.
    """
    draft, verify, rate = draft_ms / k / plain_ms, verify_ms / plain_ms, alpha(report)
    expected = None if rate is None else leviathan(rate, k, draft, verify)
    return {
        "draft_cost": draft,
        "verify_cost": verify,
        "expected_speedup": expected,
        "speculation_efficiency": speedup / expected if speedup and expected else None,
        "break_even_acceptance": break_even(k, draft, verify),
    }


def mean_length(samples: Round) -> float:
    """Returns the mean number of emitted tokens of a row."""
    rows = [len(row) for sample in samples for row in sample.tokens]
    return sum(rows) / len(rows)
