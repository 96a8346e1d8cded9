"""Step times and the speed-up over plain decoding that they let expect."""

from __future__ import annotations

from dataclasses import dataclass

from ..leviathan import break_even, leviathan
from .hardware import Hardware
from .memory import Job, cache_bytes, weight_bytes
from .sizes import Sizes

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Line:
    """What is expected of one K.

    Attributes:
        k: K.
        verify: ms of the target's forward over K + 1 tokens.
        cycle: ms of a cycle.
        speedup: Over plain decoding, for each acceptance.
        break_even: Acceptance from which on it is faster than plain decoding; None: never.
    """

    k: int
    verify: float
    cycle: float
    speedup: dict[float, float]
    break_even: float | None


def forward(
    job: Job, sizes: Sizes, quant: str, hardware: Hardware, width: int, cards: int
) -> float:
    """Returns the ms of one forward over full rows.

    Args:
        job: Batch, slots, numbers.
        sizes: Of the model that runs.
        quant: Of its weights.
        hardware: Where.
        width: T, tokens of each row.
        cards: Over how many it is split.
    """
    gigabytes = weight_bytes(sizes.linear, quant, job.width, sizes.read) / cards
    if quant == "int8" and hardware.int8 is not None:
        hardware = hardware.int8
    elif quant in ("int8", "int4"):  # unpacked to bfloat16 first: written, and read again
        gigabytes += 2 * sizes.linear * job.width / cards
    gigabytes += cache_bytes(sizes, job.batch, job.slots, job.width, cards)
    tflop = 2 * sizes.read * job.batch * width / cards / 1e12
    return hardware.step(sizes.layers, gigabytes / 1e9, tflop, cards, quant == "fp8")


def plain(job: Job, hardware: Hardware) -> float:
    """Returns the ms of a step of the target alone."""
    return forward(job, job.target, job.target_quant, hardware, 1, job.cards)


def draft_step(job: Job, hardware: Hardware) -> float:
    """Returns the ms of drafting one token; every card runs the whole draft."""
    return forward(job, job.draft, job.draft_quant, hardware, 1, 1)


def line(job: Job, hardware: Hardware, k: int) -> Line:
    """Returns what is expected of K = `k`."""
    verify = forward(job, job.target, job.target_quant, hardware, k + 1, job.cards)
    draft, one = draft_step(job, hardware), plain(job, hardware)
    speedup = {a: leviathan(a, k, draft / one, verify / one) for a in ACCEPTANCES}
    even = break_even(k, draft / one, verify / one)
    return Line(k, verify, verify + k * draft, speedup, even)


def best(lines: list[Line], acceptance: float) -> Line | None:
    """Returns the line with the largest speed-up, or None where plain decoding is faster."""
    line = max(lines, key=lambda line: line.speedup[acceptance])
    return line if line.speedup[acceptance] > 1 else None
