"""One row of figures: what one contender did in one case, against plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..quant.linear import KINDS
from . import figures
from .card import Card
from .contenders import Call, Contender, Ours
from .figures import Round
from .parts import accept_ms

# The settings that were varied stand between these two keys of a row.
LAST_FIXED, FIRST_SIZE = "num_assistant_tokens", "input_tokens"


@dataclass
class Entry:
    """One contender in one case.

    Attributes:
        contender: Who.
        settings: What was varied.
        plain: The entry that it is compared with: plain decoding with the same settings.
        parts: The entry whose phases are draft and verification.
        hidden: It has no row of its own.
        rounds: Samples of each repetition.
        counters: What the card said after each call.
        warmup: Seconds of building and of untimed runs.
        accept_ms: Of acceptance alone, once it is known: it is the same for every text.
    """

    contender: Contender
    settings: dict[str, Any] = field(default_factory=dict)
    plain: Entry | None = None
    parts: Entry | None = None
    hidden: bool = False
    rounds: Sequence[Round] = ()
    counters: Sequence[dict[str, float]] = ()
    warmup: float = 0.0
    accept_ms: float | None = None


def row(entry: Entry, call: Call, card: Card, prompt: float) -> dict[str, Any]:
    """Returns the figures of one contender in one case.

    Args:
        entry: Its samples, and those of plain decoding.
        call: What was asked for.
        card: Ceilings.
        prompt: Mean tokens of a prompt.
    """
    every = [sample for samples in entry.rounds for sample in samples]
    values: dict[str, Any] = {
        "emitted_tokens": sum(sample.emitted for sample in entry.rounds[-1]),
        **figures.spread("decode_tokens_per_second", map(figures.decode_rate, entry.rounds)),
        **figures.spread(
            "end_to_end_tokens_per_second", map(figures.end_to_end_rate, entry.rounds)
        ),
        **figures.latencies(every),
    }
    if entry.plain is not None:
        values |= against(entry, entry.plain, call)
    step = middle(figures.step_ms, entry.rounds)
    if step is not None:
        values["cycle_ms"] = step
    if step is not None and entry.contender.k is not None and not _quantized(entry.contender):
        rows = max(len(sample.tokens) for sample in every)
        context = prompt + figures.mean_length(every) / 2
        used = card.utilisation(rows, context, entry.contender.k, step / 1000)
        values["bandwidth_utilisation"] = used
    values |= said(entry.counters)
    values["warmup_seconds"] = entry.warmup
    if isinstance(entry.contender, Ours):
        values |= counted(entry, entry.contender)
        values |= _times(entry, entry.contender, call, step, values.get("speedup"))
    return values


def _quantized(contender: Contender) -> bool:
    """Returns whether a model is not as it was loaded, which the card tells the bytes of."""
    if not isinstance(contender, Ours):
        return False
    settings = [contender.engine.config.quant(role) for role in ("target", "draft")]
    return any(s.scheme in KINDS or s.kv_dtype != "auto" for s in settings)


def varied(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that a row names: what stands between its K and its sizes."""
    keys = list(row)
    return {k: row[k] for k in keys[keys.index(LAST_FIXED) + 1 : keys.index(FIRST_SIZE)]}


def against(entry: Entry, plain: Entry, call: Call) -> dict[str, Any]:
    """Returns speed-ups over plain decoding, repetition by repetition, and whether texts agree."""
    values: dict[str, Any] = {}
    for name, rate in (
        ("speedup", figures.decode_rate),
        ("end_to_end_speedup", figures.end_to_end_rate),
    ):
        rates = [(rate(ours), rate(theirs)) for ours, theirs in zip(entry.rounds, plain.rounds)]
        values |= figures.spread(name, (a / b if a and b else None for a, b in rates))
    if not call.sampling.do_sample:
        texts = [
            [tokens for sample in side.rounds[-1] for tokens in sample.tokens]
            for side in (entry, plain)
        ]
        values["same_text"] = sum(a == b for a, b in zip(*texts)) / len(texts[0])
    return values


def said(counters: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each counter of the card over those calls for which it was there."""
    names = dict.fromkeys(name for values in counters for name in values)
    return {n: statistics.median(values[n] for values in counters if n in values) for n in names}


def counted(entry: Entry, contender: Ours) -> dict[str, Any]:
    """Returns what the engine counted in the last repetition."""
    report = figures.merged(sample.report for sample in entry.rounds[-1] if sample.report)
    facts, recipes = report.graphs, contender.engine.device.recipes()
    chosen: dict[str, Any] = {}
    if contender.k is None:
        last = entry.rounds[-1][-1].report
        assert last is not None
        chosen = {"schedule_reason": last.schedule_reason, "cycles_by_k": report.cycles_by_k}
    target = contender.engine.facts()["target"]
    return chosen | {
        "proposed": report.proposed,
        "accepted": report.accepted,
        "acceptance_rate": report.acceptance_rate,
        "alpha": figures.alpha(report),
        "mean_acceptance_length": report.mean_acceptance_length,
        "acceptance_by_position": report.acceptance_by_position,
        "cycles": report.cycles,
        "host_reads": report.host_reads,
        "recipes": facts.warmup + facts.after_warmup if recipes is None else recipes,
        "build_seconds": facts.seconds,
        "target_weight_mb": sum(part["bytes"] for part in target["weights"]) / 1e6,
        "target_kv_mb": target["kv_cache"]["bytes"] / 1e6,
    }


def _times(
    entry: Entry, contender: Ours, call: Call, step: float | None, speedup: float | None
) -> dict[str, Any]:
    """Returns where a cycle's time goes, and what that lets one expect."""
    busy = _phases(entry, "cycle", "draft", "verify")
    if busy is None or step is None:
        return {}
    values: dict[str, Any] = {"host_ms": step - busy, "host_share": (step - busy) / step}
    if entry.plain is None or entry.parts is None or contender.k is None:
        return values
    plain = _phases(entry.plain, "cycle", "draft", "verify")
    draft, verify = _phases(entry.parts, "draft"), _phases(entry.parts, "verify")
    if plain is None or draft is None or verify is None:
        return values
    if entry.accept_ms is None:
        entry.accept_ms = accept_ms(contender.engine, contender.k, call)
    report = figures.merged(sample.report for sample in entry.rounds[-1] if sample.report)
    return values | {
        "draft_ms": draft,
        "verify_ms": verify,
        "accept_ms": entry.accept_ms,
        "plain_step_ms": plain,
        **figures.speculation(speedup, report, contender.k, plain, draft, verify),
    }


def _phases(entry: Entry, *names: str) -> float | None:
    return middle(lambda samples: figures.phase_ms(samples, *names), entry.rounds)


def middle(what: Callable[[Round], float | None], rounds: Sequence[Round]) -> float | None:
    """Returns the median of a figure over repetitions, or None where it has no value."""
    found = [value for value in map(what, rounds) if value is not None]
    return statistics.median(found) if found else None
