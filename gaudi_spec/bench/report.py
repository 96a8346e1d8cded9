"""Results as Markdown for people, CSV and JSON for programs, and a directory with all of it."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import plots
from .rows import varied

Row = dict[str, Any]

# Column titles, and the key of each; a spread is shown where `KEY_min` and `KEY_max` are.
SPEED = {
    "decode tok/s": "decode_tokens_per_second",
    "end-to-end tok/s": "end_to_end_tokens_per_second",
    "speed-up": "speedup",
    "end-to-end speed-up": "end_to_end_speedup",
    "acceptance": "acceptance_rate",
    "mean length": "mean_acceptance_length",
    "same text": "same_text",
}
LATENCY = {
    f"{title} {p} ms": f"{key}_ms_{p}"
    for title, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("inter-token", "inter_token"))
    for p in ("p50", "p90", "p99")
}
CYCLE = {
    "draft ms": "draft_ms",
    "verify ms": "verify_ms",
    "of it accept ms": "accept_ms",
    "host ms": "host_ms",
    "cycle ms": "cycle_ms",
    "bandwidth used": "bandwidth_utilisation",
    "card used": "card_utilisation",
    "card W": "card_power_watts",
    "expected speed-up": "expected_speedup",
    "efficiency": "speculation_efficiency",
    "break-even acceptance": "break_even_acceptance",
    "by position": "acceptance_by_position",
}
COUNTS = {
    "emitted": "emitted_tokens",
    "proposed": "proposed",
    "accepted": "accepted",
    "cycles": "cycles",
    "host reads": "host_reads",
    "recipes": "recipes",
    "build s": "build_seconds",
    "warm-up s": "warmup_seconds",
    "target MB": "target_weight_mb",
    "its cache MB": "target_kv_mb",
}
STEPS = {
    "plain step ms": "plain_step_ms",
    "verify ms": "verify_ms",
    "verify / plain": "verify_cost",
    "draft ms per token": "draft_token_ms",
    "sum of parts ms": "parts_ms",
    "cycle ms": "cycle_ms",
    "host ms": "host_ms",
    "host share": "host_share",
    "TPOT ms": "tpot_ms_p50",
    "speed-up": "speedup",
}
NOTES = (
    "Medians of the repetitions, with their smallest and largest value; contenders ran in turn. "
    "Tokens are the emitted ones. Decode-only figures begin when the first tokens have arrived; "
    "speed-ups are over our own plain static decoding in the same run. Tokens of one block arrive "
    "together, so inter-token gaps of 0 are among the percentiles. Building and warm-up are in no "
    "rate. Expected speed-up: Leviathan's formula with the measured acceptance and step times; "
    "efficiency: measured / expected."
)


def markdown(result: dict[str, Any], short: bool = False) -> str:
    """Returns the tables of a run under a line that names machine, date and command.

    Args:
        result: The run.
        short: Only how fast it was.
    """
    if result["what"] == "steps":
        groups = [("Steps", STEPS), ("Counts", COUNTS)]
    else:
        groups = [("Speed", SPEED), ("Latency", LATENCY), ("Cycle", CYCLE), ("Counts", COUNTS)]
    groups = groups[:1] if short else groups
    lines = [heading(result), "", card(result), ""]
    for title, columns in groups:
        lines += [f"**{title}**", "", *table(result["rows"], columns), ""]
    for name, values in result.get("start", {}).items():
        lines.append(
            f"Start of a new process, {name}: {number(values['build_seconds'])} s building graphs, "
            f"{number(values['process_seconds'])} s in all."
        )
    lines += reasons(result["rows"])
    if "max_allocated" in result["memory_gb"]:
        peak = number(result["memory_gb"]["max_allocated"])
        lines.append(f"Peak memory of the whole run, every contender loaded: {peak} GB.")
    lines += [*result["notes"], NOTES]
    return "\n".join(lines)


def reasons(rows: Sequence[Row]) -> list[str]:
    """Returns what each row whose K was chosen says about it."""
    return [
        f"{row['contender']}, {row['workload']}: {cycles_by_k(row)}; {row['schedule_reason']}."
        for row in rows
        if row.get("schedule_reason")
    ]


def cycles_by_k(row: Row) -> str:
    """Returns how many cycles had which K."""
    return ", ".join(f"K = {k} in {n}" for k, n in row["cycles_by_k"].items())


def heading(result: dict[str, Any]) -> str:
    """Returns machine, date and command."""
    place = result["environment"]
    return f"{place['hardware']} ({place['device']}), {result['date']}: `{result['command']}`"


def card(result: dict[str, Any]) -> str:
    """Returns one line with everything static."""
    values, place = result["card"], result["environment"]
    models = [
        f"{role} {result['models'][role]} ({values[f'{role}_parameters'] / 1e6:.1f} M parameters, "
        f"{values[f'{role}_dtype']}, {values[f'{role}_bytes'] / 1e6:.1f} MB read a forward, "
        f"{values[f'{role}_kv_bytes_per_token'] / 1e3:.1f} kB of cache a token)"
        for role in ("target", "draft")
        if f"{role}_bytes" in values
    ]
    return (
        f"{', '.join(models)}; memory {values['memory_bandwidth'] / 1e9:.1f} GB/s measured, which "
        f"allows {values['plain_ceiling_tokens_per_second']:.0f} plain tokens/s for one row; "
        f"{place['threads']} threads, gaudi-spec {place['gaudi_spec']}, torch {place['torch']}, "
        f"Transformers {place['transformers']}, Python {place['python']}"
    )


def table(rows: Sequence[Row], columns: dict[str, str]) -> list[str]:
    """Returns a Markdown table of the columns that some row has a value for."""
    used = {
        title: key for title, key in columns.items() if any(r.get(key) is not None for r in rows)
    }
    names = identity(rows)
    lines = ["| " + " | ".join([*names, *used]) + " |", "|" + "---|" * (len(names) + len(used))]
    for row in rows:
        if any(row.get(key) is not None for key in used.values()):
            cells = [number(row.get(key)) for key in names.values()]
            cells += [cell(row, key) for key in used.values()]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def identity(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the columns that tell rows apart: contender and K, and whatever differs."""
    titles = {"contender": "contender", "K": "num_assistant_tokens"}
    more = {"workload": "workload", "B": "batch_size", "new tokens": "max_new_tokens"}
    more |= {key: key for row in rows for key in varied(row)}
    for title, key in more.items():
        if len({str(row[key]) for row in rows if key in row}) > 1:
            titles[title] = key
    return titles


def cell(row: Row, key: str) -> str:
    """Returns a value as text, with its spread where there is one."""
    text = number(row.get(key))
    if f"{key}_min" in row and row["repetitions"] > 1:
        text += f" ({number(row[f'{key}_min'])}-{number(row[f'{key}_max'])})"
    return text


def number(value: Any) -> str:
    """Returns a value with three significant digits, whole numbers as they are."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
    return str(value)


def to_csv(rows: Sequence[Row]) -> str:
    """Returns CSV with one line a row; lists are JSON."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        lists = {k: json.dumps(v) for k, v in row.items() if isinstance(v, (list, dict, tuple))}
        writer.writerow({**row, **lists})
    return out.getvalue().rstrip("\n")


def text(result: dict[str, Any], form: str) -> str:
    """Returns what is printed before the last line, which is the whole result as JSON."""
    if form == "md":
        return markdown(result)
    if form == "csv":
        return to_csv(result["rows"])
    return "\n".join(json.dumps(row) for row in result["rows"]) if form == "jsonl" else ""


def check_new(directory: str) -> None:
    """Makes sure, before any work, that results can be put there and nothing is overwritten.

    Raises:
        ConfigError: It holds something, or cannot be made.
    """
    path = Path(directory)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{directory} exists and is not empty: give --output_dir a new directory."
        )
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=path.absolute().parent).cleanup()
    except OSError as error:
        raise ConfigError(f"Cannot write beside {directory}: {error.strerror}.") from error


def partial(directory: str) -> Path:
    """Returns the file beside `directory` that holds the rows there are while a run goes on."""
    path = Path(directory).absolute()
    return path.with_name(f"{path.name}.partial.json")


def write(result: dict[str, Any], directory: str) -> None:
    """Writes all files into a directory beside `directory` and renames it: all or nothing."""
    path = Path(directory).absolute()
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as work:
        made = Path(work, "made")
        made.mkdir()
        for name, values in (("results", result), ("environment", result["environment"])):
            made.joinpath(f"{name}.json").write_text(dumps(values), encoding="utf-8")
        drawn = [f"![{name}]({name}.png)" for name in _draw(result, made)]
        report = "\n\n".join([markdown(result), *drawn]) + "\n"
        made.joinpath("report.md").write_text(report, encoding="utf-8")
        os.replace(made, path)
    partial(directory).unlink(missing_ok=True)


def _draw(result: dict[str, Any], directory: Path) -> list[str]:
    try:
        return plots.draw([result], directory, optional=True)
    except Exception as error:  # what took minutes to measure must not be lost for a drawing
        print(f"No plots: {error!r}. The results are written.", file=sys.stderr)
        return []


def dumps(values: Any) -> str:
    """Returns indented JSON that ends its line."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
