"""What a run prints and writes: Optimum Habana's block and keys first, then ours."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from .device import Device
from .errors import ConfigError
from .metrics import Report, total
from .version import __version__

SCHEMA_VERSION = 1


@dataclass
class Run:
    """Timings of one engine over several iterations.

    Attributes:
        requested: Tokens asked for in one iteration, over all rows.
        whole: Whether iterations are parts of one run, over a data set, and not repetitions.
        seconds: End-to-end wall time of each iteration, tokenization included.
        reports: Counted facts of each iteration.
    """

    requested: int
    whole: bool = False
    seconds: list[float] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        """Tokens returned, over all iterations."""
        return sum(report.emitted_tokens for report in self.reports)

    @property
    def report(self) -> Report:
        """Counted facts of all iterations if they are parts of one run, else of the last one."""
        return total(self.reports) if self.whole else self.reports[-1]

    @property
    def throughput(self) -> float:
        """Emitted tokens per second of wall time, end to end, tokenization included."""
        return self.emitted / sum(self.seconds)

    @property
    def requested_throughput(self) -> float:
        """Optimum Habana's formula: requested tokens, emitted or not, per second."""
        return self.requested * len(self.seconds) / sum(self.seconds)

    @property
    def first_token(self) -> float:
        """Mean seconds to the end of the first cycle (TTFT)."""
        return statistics.mean(report.first_token_seconds or 0.0 for report in self.reports)

    @property
    def rest_token(self) -> float:
        """Mean seconds per token of a row after its first cycle (TPOT)."""
        per_token = []
        for seconds, report in zip(self.seconds, self.reports):
            longest = max(report.emitted)
            if longest > 1:
                per_token.append((seconds - (report.first_token_seconds or 0.0)) / (longest - 1))
        return statistics.mean(per_token) if per_token else 0.0

    @property
    def end_to_end(self) -> float:
        """Mean seconds of one iteration."""
        return statistics.mean(self.seconds)


def stats_block(
    run: Run, device: Device, compilation_seconds: float, graphs: int | None = None
) -> str:
    """Returns Optimum Habana's statistics, label for label; tokens are the emitted ones."""
    lines = [
        "Input tokens",
        f"Throughput (including tokenization) = {run.throughput} tokens/second",
        f"Average first token latency         = {run.first_token * 1000} ms",
        f"Average rest token latency          = {run.rest_token * 1000} ms",
        f"Average end to end latency          = {run.end_to_end * 1000} ms",
    ]
    if graphs is not None:
        lines.append(f"Number of HPU graphs                = {graphs}")
    if run.whole:
        lines.append(f"Total runtime for dataset: {sum(run.seconds)}")
    stats = "\n".join(lines)
    labels = {
        "allocated": "Memory allocated",
        "max_allocated": "Max memory allocated",
        "total": "Total memory available",
    }
    memory = [f"{labels[key]:35} = {value:.2f} GB" for key, value in device.memory().items()]
    separator = "-" * max(len(line) for line in stats.splitlines())
    compiled = f"Graph compilation duration          = {compilation_seconds} seconds"
    return "\n".join(["Stats:", separator, stats, *memory, compiled, separator])


def speculation_block(run: Run, baseline: Run | None) -> str:
    """Returns our own statistics, and the speed-up where it was measured."""
    report = run.report
    share = "n/a (no draft)" if report.drafter is None else "n/a (nothing was proposed)"
    if report.acceptance_rate is not None:
        share = f"{report.acceptance_rate:.3f} ({report.accepted} of {report.proposed})"
    positions = " ".join(f"{rate:.2f}" for rate in report.acceptance_by_position) or "n/a"
    length = report.mean_acceptance_length
    phases = ", ".join(
        f"{name} {seconds * 1000:.0f} ms" for name, seconds in report.seconds.items()
    )
    lines = [
        "Speculation:",
        f"Emitted tokens                      = {report.emitted_tokens}",
        f"Cycles (target forwards)            = {report.cycles}",
        f"Acceptance rate                     = {share}",
        f"Acceptance rate by position         = {positions}",
        "Mean acceptance length              = " + (f"{length:.2f}" if length else "n/a"),
        *_schedule(report),
        f"Time                                = {phases}",
        f"Distinct shapes (target, draft)     = {report.target_shapes}, {report.draft_shapes}",
    ]
    if report.emitted_tokens != run.requested and not run.whole:
        lines.append(
            f"Throughput of requested tokens      = {run.requested_throughput} tokens/second "
            "(Optimum Habana's formula; some rows ended early)"
        )
    if baseline is not None:
        lines.append(f"Speed-up over plain decoding        = {speedup(run, baseline):.2f}x")
    return "\n".join(lines)


def _schedule(report: Report) -> list[str]:
    """Returns how many cycles had which K, and why, if anything was to be chosen."""
    if report.schedule in (None, "constant"):
        return []
    chosen = ", ".join(f"K = {k} in {n}" for k, n in report.cycles_by_k.items())
    lines = [f"{'Cycles by K (' + report.schedule + ')':35} = {chosen}"]
    return lines + [f"{'Schedule':35} = {report.schedule_reason}"] * bool(report.schedule_reason)


def speedup(run: Run, baseline: Run) -> float:
    """Returns median end-to-end time of the baseline over ours; both ran interleaved."""
    return statistics.median(baseline.seconds) / statistics.median(run.seconds)


def results(
    run: Run, baseline: Run | None, inputs: list[str], outputs: list[list[str]], device: Device
) -> dict[str, Any]:
    """Returns the content of `results.json`: Optimum Habana's keys (seconds), then ours."""
    report = run.report
    values: dict[str, Any] = {
        "throughput": run.throughput,
        "avg_first_token_latency": run.first_token,
        "avg_rest_token_latency": run.rest_token,
        "avg_e2e_latency": run.end_to_end,
        "input": inputs,
        "output": outputs,
        "schema_version": SCHEMA_VERSION,
        **report.to_dict(),
    }
    if baseline is not None:
        values["speedup"] = speedup(run, baseline)
        values["baseline_throughput"] = baseline.throughput
    values["environment"] = environment(device)
    return values


def environment(device: Device) -> dict[str, Any]:
    """Returns what a reader needs to judge the figures."""
    return {
        "gaudi_spec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": device.name,
        "hardware": device.describe(),
        "threads": torch.get_num_threads(),
    }


def check_output_dir(directory: str) -> None:
    """Makes sure, before any work, that results can be written there.

    Raises:
        ConfigError: The directory cannot be made or written.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"Cannot write to the output directory {directory}: {error.strerror}."
        ) from error


def progress(quiet: bool, **arguments: Any) -> tqdm:
    """Returns a progress bar on standard error; `TQDM_DISABLE` turns it off like `quiet`."""
    return tqdm(file=sys.stderr, **({"disable": True} if quiet else {}), **arguments)


def write_json(path: Path, values: Any) -> None:
    """Writes `values` as JSON: never half a file."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to a temporary file beside `path` and renames it: never half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
