"""What `gaudi-spec plan` says: as values, as text, and as a block of a file for `--config`."""

from __future__ import annotations

from typing import Any

from . import memory, speed
from .hardware import Hardware
from .memory import Job


def values(job: Job, hardware: Hardware, ks: list[int]) -> dict[str, Any]:
    """Returns everything that is planned.

    Args:
        job: The pair.
        hardware: The machine.
        ks: Every K that is compared.
    """
    lines = [speed.line(job, hardware, k) for k in ks]
    evens = [line.break_even for line in lines if line.break_even is not None]
    plain = speed.plain(job, hardware)
    best = {a: speed.best(lines, a) for a in speed.ACCEPTANCES}
    return {
        "label": hardware.label,
        "target": job.target.name,
        "assistant_model": job.draft.name,
        "hardware": hardware.name,
        "hardware_model": {
            "source": hardware.source,
            "ms_per_layer": hardware.per_layer,
            "ms_per_gb": hardware.per_gb,
            "ms_per_tflop": hardware.per_tflop,
            "ms_per_all_reduce_and_card": hardware.reduce,
        },
        "cards": job.cards,
        "batch": job.batch,
        "context": job.context,
        "slots": job.slots,
        "dtype": "bfloat16" if job.width == 2 else "float32",
        "target_quant": job.target_quant,
        "draft_quant": job.draft_quant,
        "memory": _memory(job, hardware),
        "step_ms": {
            "label": hardware.label,
            "plain": plain,
            "draft": speed.draft_step(job, hardware),
        },
        "plain_tokens_per_second": {"label": hardware.label, "value": 1000 * job.batch / plain},
        "by_k": [
            {
                "label": hardware.label,
                "k": line.k,
                "verify_ms": line.verify,
                "cycle_ms": line.cycle,
                "speedup": {str(a): gain for a, gain in line.speedup.items()},
                "break_even_acceptance": line.break_even,
            }
            for line in lines
        ],
        "best_k": {str(a): line.k if line else 0 for a, line in best.items()},
        "break_even_acceptance": min(evens, default=None),
    }


def _memory(job: Job, hardware: Hardware) -> dict[str, Any]:
    parts, left = memory.memory(job), memory.left(job, hardware)
    result: dict[str, Any] = {
        "label": hardware.label,
        "unit": "GB (10^9 bytes) of each card",
        "k": job.k,
        **{name.replace(" ", "_"): size for name, size in parts.items()},
        "total": sum(parts.values()),
        "capacity": hardware.memory,
        "reserve": hardware.memory * memory.RESERVE,
        "left": left,
        "fits": left >= 0,
    }
    if left < 0:
        changes = memory.nearest(job, hardware)
        result["nearest"] = {flag: memory.left(other, hardware) for flag, other in changes}
    return result


def text(values: dict[str, Any]) -> str:
    """Returns the plan for a reader; every line or table with figures says what they are."""
    label, held = values["label"], values["memory"]
    cards = f"{values['cards']} x {values['hardware']}"
    lines = [
        f"{values['target']} with {values['assistant_model']} on {cards}, batch {values['batch']}, "
        f"context {values['context']}, {values['dtype']}, target_quant {values['target_quant']}, "
        f"draft_quant {values['draft_quant']}: all figures are {label}",
        f"hardware: {values['hardware_model']['source']}",
        "",
        f"Memory of each card in GB ({label})",
    ]
    names = ("target_weights", "draft_weights", "target_cache", "draft_cache", "state", "workspace")
    rows = [(name.replace("_", " "), held[name]) for name in names]
    rows += [("total", held["total"]), ("card", held["capacity"]), ("reserve", held["reserve"])]
    lines += [f"  {name:15} {size:9.3f}" for name, size in [*rows, ("left", held["left"])]]
    if held["fits"]:
        lines.append(f"It fits ({label}).")
    elif held["nearest"]:
        near = ", or ".join(f"{f} (leaves {left:.1f} GB)" for f, left in held["nearest"].items())
        lines.append(f"It does not fit ({label}); what would: {near}.")
    else:
        lines.append(f"It does not fit ({label}), nor does any change of one option make it fit.")
    return "\n".join([*lines, "", *_speeds(values)])


def _speeds(values: dict[str, Any]) -> list[str]:
    label, step = values["label"], values["step_ms"]
    rate = values["plain_tokens_per_second"]["value"]
    acceptances = list(values["best_k"])
    lines = [
        f"A step of the target takes {step['plain']:.2f} ms, one of the draft "
        f"{step['draft']:.2f} ms; plain decoding makes {rate:.1f} tokens/s ({label}).",
        f"Speed-up over plain decoding by K and acceptance ({label})",
        "   K  verify ms  cycle ms  " + "".join(f"{a:>7}" for a in acceptances) + "  break-even",
    ]
    for row in values["by_k"]:
        gains = "".join(f"{row['speedup'][a]:6.2f}x" for a in acceptances)
        even = row["break_even_acceptance"]
        lines.append(
            f"  {row['k']:2}  {row['verify_ms']:9.2f} {row['cycle_ms']:9.2f}  {gains}  "
            f"{'never' if even is None else f'{even:.2f}':>10}"
        )
    chosen = ", ".join(f"{k or 'none'} at {a}" for a, k in values["best_k"].items())
    even = values["break_even_acceptance"]
    lines.append(f"Best K ({label}): {chosen}.")
    lines.append(
        f"At no acceptance is it faster than plain decoding ({label})."
        if even is None
        else f"Below an acceptance of {even:.2f} plain decoding is faster ({label})."
    )
    return lines


def block(values: dict[str, Any], k: int, command: str) -> dict[str, Any]:
    """Returns the block `projected` of a file, rounded.

    Args:
        values: From `values`, `k` among its K.
        k: The file's K.
        command: What computes it.
    """
    held, row = values["memory"], next(row for row in values["by_k"] if row["k"] == k)
    even = row["break_even_acceptance"]
    return {
        "command": command,
        "memory_gb": round(held["total"], 2),
        "left_gb": round(held["left"], 2),
        "plain_step_ms": round(values["step_ms"]["plain"], 2),
        "draft_step_ms": round(values["step_ms"]["draft"], 2),
        "verify_ms": round(row["verify_ms"], 2),
        "plain_tokens_per_second": round(values["plain_tokens_per_second"]["value"], 1),
        "speedup_by_acceptance": {float(a): round(x, 2) for a, x in row["speedup"].items()},
        "break_even_acceptance": None if even is None else round(even, 2),
    }
