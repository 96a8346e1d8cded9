"""Plots of benchmark results, as PNG files, without a display and in colours everybody can tell."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from ..errors import GaudiSpecError
from ..leviathan import leviathan
from .rows import varied

Row = dict[str, Any]
# Okabe and Ito's palette without its yellow.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
MARKERS = "osD^vPX"
PARTS = {"draft": "draft_ms", "verify": "forward_ms", "accept": "accept_ms", "host": "host_ms"}


def draw(found: Sequence[dict[str, Any]], directory: Path, optional: bool = False) -> list[str]:
    """Draws every plot that the results have figures for.

    Args:
        found: Results of `gaudi-spec bench`.
        directory: Where `NAME.png` goes.
        optional: Draw nothing, instead of failing, where matplotlib is missing.

    Returns:
        The names.

    Raises:
        GaudiSpecError: matplotlib is missing.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        if optional:
            return []
        raise GaudiSpecError(
            'Plots need matplotlib: run pip install "gaudi-spec[bench]".'
        ) from error
    rows = [row for result in found for row in result["rows"]]
    place = "\n".join(dict.fromkeys(_place(result) for result in found))
    jobs: dict[str, tuple[Callable[..., bool], tuple[float, float]]] = {
        "throughput_by_batch": (throughput, (9, 4.5)),
        "acceptance_by_position": (acceptance, (9, 4.5)),
        "cycle_time": (cycle_time, (10, 4.5)),
        "speedup": (speedup, (7.5, 5)),
    }
    names = []
    for name, (work, size) in jobs.items():
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")  # no pyplot: Agg
        axes = figure.add_subplot()
        if work(figure, axes, rows):
            figure.supxlabel(place, fontsize=7, color="#555555")
            figure.savefig(directory / f"{name}.png", dpi=150)
            names.append(name)
    return names


def _place(result: dict[str, Any]) -> str:
    models, place = result["models"], result["environment"]
    pair = " + ".join(name.rstrip("/").rsplit("/", 1)[-1] for name in models.values() if name)
    return f"{pair}, {result['card']['target_dtype']}; {place['hardware']}; {result['date']}"


def throughput(figure: Any, axes: Any, rows: Sequence[Row]) -> bool:
    """Draws decode-only tokens per second by batch size, a line for each K."""
    key = "decode_tokens_per_second"
    ours = [r for r in rows if r["contender"] in ("plain", "speculative") and r.get(key)]
    for i, (k, variant) in enumerate(sorted({_line(r, ours) for r in ours})):
        some = [r for r in ours if _line(r, ours) == (k, variant)]
        batches = sorted({r["batch_size"] for r in some})
        groups = [[r for r in some if r["batch_size"] == b] for b in batches]
        middle, low, high = (
            [statistics.harmonic_mean([r[f"{key}{end}"] for r in group]) for group in groups]
            for end in ("", "_min", "_max")
        )
        error = [[m - x for m, x in zip(middle, low)], [x - m for m, x in zip(middle, high)]]
        label = (f"K = {k}" if k else "plain (K = 0)") + variant
        axes.errorbar(batches, middle, error, label=label, capsize=3, **_style(i))
    if not ours:
        return False
    batches = sorted({r["batch_size"] for r in ours})
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size (rows)")
    several = len({r["workload"] for r in ours}) > 1
    mean = "\nmean of the workloads" if several else ""
    axes.set_ylabel(f"decode throughput (emitted tokens/s){mean}")
    axes.set_title("Throughput by batch size: median, smallest and largest")
    _legend(axes)
    return True


def _line(row: Row, rows: Sequence[Row]) -> tuple[int, str]:
    """Returns K, and the settings that not all rows share, as text."""
    mine = varied(row)
    different = [
        value if isinstance(value, str) else f"{key} = {value}"
        for key, value in mine.items()
        if len({str(other.get(key)) for other in rows}) > 1
    ]
    return row["num_assistant_tokens"], "".join(f", {value}" for value in different)


def _positions(row: Row) -> int:
    return len(row["acceptance_by_position"])


def acceptance(figure: Any, axes: Any, rows: Sequence[Row]) -> bool:
    """Draws acceptance by block position, for each workload where most positions are known."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.get("acceptance_by_position"):
            name = row["workload"] + _line(row, rows)[1]
            best[name] = max(best.get(name, row), row, key=_positions)
    for i, (name, row) in enumerate(best.items()):
        rates = row["acceptance_by_position"]
        label = f"{name} (K = {row['num_assistant_tokens'] or 'auto'})"
        axes.plot(range(1, len(rates) + 1), rates, label=label, **_style(i))
    if not best:
        return False
    longest = max(map(_positions, best.values()))
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.5, longest + 0.5)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the block of drafted tokens")
    axes.set_ylabel("accepted / proposed")
    axes.set_title("Acceptance by position: a token counts if all before it were accepted")
    _legend(axes)
    return True


def cycle_time(figure: Any, axes: Any, rows: Sequence[Row]) -> bool:
    """Draws what a cycle's time consists of, a bar for each batch size, K and way of running."""
    known = [(row, times) for row in rows if (times := _times(row))]
    ours = [row for row, _ in known]
    groups: dict[tuple[int, str, int], list[dict[str, float]]] = {}
    for row, times in known:
        k, variant = _line(row, ours)
        groups.setdefault((row["batch_size"], variant, k), []).append(times)
    labels = [
        (f"K = {k}" if k else "plain step") + f", B = {batch}{variant}"
        for batch, variant, k in sorted(groups)
    ]
    left = numpy.zeros(len(groups))
    for i, part in enumerate(PARTS):
        sizes = [statistics.mean(t.get(part, 0.0) for t in groups[key]) for key in sorted(groups)]
        name = {"verify": "verify: the target's forward", "accept": "accept and commit"}
        axes.barh(labels, sizes, left=left, label=name.get(part, part), color=COLOURS[i])
        left += sizes
    axes.invert_yaxis()
    axes.set_xlabel("time of a cycle (ms)")
    axes.set_title("Where a cycle's time goes")
    _legend(axes)
    return bool(groups)


def _times(row: Row) -> dict[str, float]:
    """Returns milliseconds of each part of a cycle; a plain step is all forward and host."""
    host = max(row.get("host_ms") or 0.0, 0.0)
    if row["contender"] == "plain" and row.get("cycle_ms"):
        return {"verify": row["cycle_ms"] - host, "host": host}
    if row.get("verify_ms") is None:
        return {}
    accept = row["accept_ms"]
    return {
        "draft": row["draft_ms"],
        "verify": row["verify_ms"] - accept,
        "accept": accept,
        "host": host,
    }


def speedup(figure: Any, axes: Any, rows: Sequence[Row]) -> bool:
    """Draws the speed-up that step times allow over K and acceptance, and what was measured.

    The time of a verification is taken as 1 + s K plain steps, with s fitted to the measured ones.
    """
    known = [r for r in rows if r.get("verify_cost") and r.get("alpha") is not None]
    if not known:
        return False
    batch, variant = min((r["batch_size"], _line(r, known)[1]) for r in known)
    known = [r for r in known if (r["batch_size"], _line(r, known)[1]) == (batch, variant)]
    ks = [r["num_assistant_tokens"] for r in known]
    draft = statistics.mean(r["draft_cost"] for r in known)
    slope = sum(k * (r["verify_cost"] - 1) for k, r in zip(ks, known)) / sum(k * k for k in ks)
    sizes, rates = range(1, max(8, *ks) + 2), numpy.linspace(0, 1, 101)
    grid = [[leviathan(a, k, draft, max(1 + slope * k, 0.1)) for k in sizes] for a in rates]
    span = 1 / 2.5, 2.5
    shades = axes.pcolormesh(
        sizes, rates, numpy.log(grid), cmap="PuOr_r", shading="nearest", **_limits(span)
    )
    lines = axes.contour(sizes, rates, grid, [1.0], colors="black", linewidths=1.5)
    axes.clabel(lines, fmt={1.0: "break-even"})
    values = numpy.log([r["speedup"] for r in known])
    points = [r["alpha"] for r in known]
    axes.scatter(
        ks, points, c=values, cmap="PuOr_r", edgecolors="black", s=90, zorder=3, **_limits(span)
    )
    for k, rate, row in zip(ks, points, known):
        axes.annotate(
            f"{row['speedup']:.2f}x",
            (k, rate),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1},
        )
    ticks = [0.4, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5]
    bar = figure.colorbar(shades, ax=axes, ticks=numpy.log(ticks), extend="both")
    bar.ax.set_yticklabels([f"{tick:g}x" for tick in ticks])
    bar.set_label("speed-up over plain decoding", labelpad=8)
    axes.set_xticks(sizes)
    axes.set_xlabel("K (drafted tokens a cycle)")
    axes.set_ylabel("acceptance of a tested token")
    axes.set_title(
        f"Speed-up: field computed from step times,\npoints measured (B = {batch}{variant})"
    )
    return True


def _limits(span: tuple[float, float]) -> dict[str, float]:
    return {"vmin": float(numpy.log(span[0])), "vmax": float(numpy.log(span[1]))}


def _style(i: int) -> dict[str, str]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
