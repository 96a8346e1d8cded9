"""What a pair takes on each card, and the nearest thing that fits where it does not."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..buckets import round_up
from ..config import SpecConfig
from .hardware import Hardware
from .sizes import Sizes

# Bytes of a packed weight; int4 with a scale and a zero point of 2 bytes for each 128 weights.
_PACKED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
RESERVE = 0.05  # of a card, for graphs and what is lost between buffers


@dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        target: The target's sizes.
        draft: The draft's sizes.
        batch: B.
        context: Tokens of the longest row, prompt and new ones.
        k: Largest K.
        width: Bytes of a number that is not packed: 2 (bfloat16) or 4.
        target_quant: One of `flags.QUANTS`.
        draft_quant: One of `flags.QUANTS`.
        cards: Over how many cards the target is split; each of them holds the whole draft.
        config: Has the chunks of prompts and the rounding of a row's size; not its `max_length`.
    """

    target: Sizes
    draft: Sizes
    batch: int
    context: int
    k: int
    width: int = 2
    target_quant: str = "none"
    draft_quant: str = "none"
    cards: int = 1
    config: SpecConfig = dataclasses.field(default_factory=SpecConfig)

    @property
    def slots(self) -> int:
        """S, as the engine sizes it."""
        slots = round_up(self.context, self.config.length_multiple)
        return min(slots, self.target.positions or slots)


def weight_bytes(linear: int, quant: str, width: int, count: int) -> float:
    """Returns the bytes of `count` weights; quantization packs the `linear` ones among them."""
    if quant == "none":
        return count * width
    return linear * _PACKED[quant] + (count - linear) * width


def cache_bytes(sizes: Sizes, batch: int, slots: int, width: int, cards: int = 1) -> float:
    """Returns the bytes of a cache on each card: whole heads go to a card."""
    slots = min(slots, sizes.positions or slots)
    share = math.ceil(sizes.kv_heads / cards) / sizes.kv_heads
    return batch * (slots * sizes.kv + sizes.cross) * width * share


def memory(job: Job) -> dict[str, float]:
    """Returns GB by what takes them, on each card."""
    target, draft, width = job.target, job.draft, job.width
    whole = (target.table + target.encoder) * width
    split = weight_bytes(target.linear, job.target_quant, width, target.read)
    # A draft of Whisper's with the target's own encoder does not hold it twice.
    shared = draft.encoder if draft.encoder == target.encoder else 0
    held = draft.parameters - shared
    state = 8 * (job.batch * (job.slots + job.k + 1) + 2 * job.slots) + 4 * target.vocab
    parts = {
        "target weights": whole + split / job.cards + target.buffers,
        "draft weights": weight_bytes(draft.linear, job.draft_quant, width, held) + draft.buffers,
        "target cache": cache_bytes(target, job.batch, job.slots, width, job.cards),
        "draft cache": cache_bytes(draft, job.batch, job.slots, width),
        "state": float(state),
        "workspace": float(max(verify_bytes(job), _prefill_bytes(job))),
    }
    return {name: size / 1e9 for name, size in parts.items()}


def verify_bytes(job: Job) -> int:
    """Returns the bytes of `(K+1) x V` logits of every row, and of a copy of them in float32."""
    return job.batch * (job.k + 1) * job.target.vocab * (job.width + 4)


def _prefill_bytes(job: Job) -> int:
    """Returns the bytes of a layer's activations in the widest chunk, attention scores included."""
    sizes, rows = job.target, job.batch * min(job.config.prefill_chunks[-1], job.slots)
    split = sizes.heads * job.slots + 2 * sizes.intermediate
    return rows * (math.ceil(split / job.cards) + 4 * sizes.hidden) * job.width


def left(job: Job, hardware: Hardware) -> float:
    """Returns the GB of each card that stay free, less than none if it does not fit."""
    return hardware.memory * (1 - RESERVE) - sum(memory(job).values())


def nearest(job: Job, hardware: Hardware) -> Iterator[tuple[str, Job]]:
    """Yields changes of one thing after which the job fits, the smallest of each kind."""

    def largest(name: str, values: range) -> list[tuple[object, dict[str, Any]]]:
        def too_large(n: int) -> bool:
            return left(replace(job, **{name: n}), hardware) < 0

        fitting = bisect.bisect_left(values, True, key=too_large)
        return [(n, {name: n}) for n in values[:fitting][-1:]]

    tries: dict[str, list[tuple[object, dict[str, Any]]]] = {
        "--batch": largest("batch", range(1, job.batch)),
        "--context": largest("context", range(64, round_up(job.context, 64), 64)),
        "--target_quant": [(q, {"target_quant": q}) for q in ("fp8", "int8", "int4")],
        "--cards": [(n, {"cards": n}) for n in (2, 4, 8) if job.cards < n <= hardware.cards],
    }
    for flag, options in tries.items():
        for value, change in options:
            changed = replace(job, **change)
            if changed != job and left(changed, hardware) >= 0:
                yield f"{flag} {value}", changed
                break
