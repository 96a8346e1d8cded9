"""`gaudi-spec plan`: memory and expected speed of a pair, before any weights are loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ..config import MAX_ASSISTANT_TOKENS, SpecConfig
from ..device import get_device
from ..errors import ConfigError, UnsupportedOptionError
from ..perf_config import PerfConfig
from ..results import write_text
from . import report
from .hardware import Hardware, gaudi
from .measure import this_machine
from .memory import QUANTS, Job
from .sizes import sizes

_KS = list(range(1, 9))


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec plan",
        description="Memory and expected speed-up of a pair of models, from their configs alone. "
        "Figures for Gaudi are projected from public speeds of other models, never measured.",
    )
    p.add_argument("--model", "--model_name_or_path", help="target: directory or hub name")
    p.add_argument("--assistant_model", help="draft: directory or hub name")
    p.add_argument("--hardware", choices=("gaudi2", "gaudi3", "this"), help="this: measured first")
    p.add_argument("--batch", "--batch_size", type=int, help="rows (default: 1)")
    p.add_argument("--context", type=int, help="prompt and new tokens of a row (default: 2048)")
    p.add_argument("--target_quant", choices=QUANTS, help="of the target's weights (default: none)")
    p.add_argument("--draft_quant", choices=QUANTS, help="of the draft's weights (default: none)")
    p.add_argument("--cards", type=int, help="split the target over so many (default: 1)")
    p.add_argument(
        "--num_assistant_tokens", type=int, nargs="+", help="every K to compare (default: 1 to 8)"
    )
    p.add_argument("--bf16", action="store_true", help="bfloat16 on this machine, too")
    p.add_argument(
        "--device", default="auto", choices=("auto", "hpu", "cuda", "cpu"), help="measured"
    )
    p.add_argument("--config", help="take all that from such a file; flags win")
    p.add_argument("--update", action="store_true", help="write the file's block `projected`")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return p


def main(argv: list[str]) -> int:
    """Runs the command."""
    args = parser().parse_args(argv)
    file = PerfConfig.read(args.config) if args.config else None
    if args.update and file is None:
        raise ConfigError("--update writes into a file: add --config FILE.")
    values = plan(args, file)
    if args.update and file is not None:
        write_text(file.path, file.with_projected(block(values, file)))
    print(json.dumps(values) if args.json else report.text(values))
    return 0


def block(values: dict[str, Any], file: PerfConfig) -> dict[str, Any]:
    """Returns what `file` should say is projected."""
    command = f"gaudi-spec plan --config {Path('perf_configs', file.path.name)} --update"
    return report.block(values, file.settings.num_assistant_tokens, command)


def plan(args: argparse.Namespace, file: PerfConfig | None) -> dict[str, Any]:
    """Returns the plan for parsed arguments, completed by a file's.

    Raises:
        ConfigError: An argument is missing or out of range.
    """
    given = _merge(args, file)
    for name in ("model", "assistant_model", "hardware"):
        if not given[name]:
            raise ConfigError(f"--{name} is missing: name it, or a --config that does.")
    for name in ("batch", "cards"):
        if given[name] < 1:
            raise ConfigError(f"--{name} must be at least 1, not {given[name]}.")
    settings = file.settings if file else SpecConfig()
    ks = args.num_assistant_tokens or sorted({*_KS, settings.num_assistant_tokens})
    if not all(1 <= k <= MAX_ASSISTANT_TOKENS for k in ks):
        raise ConfigError(f"--num_assistant_tokens must be from 1 to {MAX_ASSISTANT_TOKENS}.")
    target = sizes(given["model"], "target")
    draft = sizes(given["assistant_model"], "draft")
    most = target.positions or given["context"]
    if not 2 <= given["context"] <= most:
        raise ConfigError(
            f"--context must be from 2 to the {most} positions of {target.name}, not "
            f"{given['context']}."
        )
    hardware = _hardware(given, args.device)
    job = Job(
        target,
        draft,
        given["batch"],
        given["context"],
        max(args.num_assistant_tokens or [settings.num_assistant_tokens]),
        2 if given["bf16"] or hardware.name != "this" else 4,
        given["target_quant"],
        given["draft_quant"],
        given["cards"],
        settings,
    )
    return report.values(job, hardware, ks)


def _merge(args: argparse.Namespace, file: PerfConfig | None) -> dict[str, Any]:
    """Returns each argument from the command line, else from the file, else its default."""
    given: dict[str, Any] = {
        "batch": 1,
        "context": 2048,
        "cards": 1,
        "target_quant": "none",
        "draft_quant": "none",
    }
    if file is not None:
        flags = {"model": "model_name_or_path", "batch": "batch_size"}
        for name in ("model", "assistant_model", "batch", "bf16"):
            given[name] = file.flags.get(flags.get(name, name), given.get(name))
        given |= file.plan
        given["context"] = file.settings.max_length or given["context"]
    names = ("model", "assistant_model", "hardware", "bf16", *given)
    return {name: getattr(args, name, None) or given.get(name) for name in names}


def _hardware(given: dict[str, Any], device: str) -> Hardware:
    if given["hardware"] != "this":
        return gaudi(given["hardware"])
    if given["cards"] > 1:
        raise UnsupportedOptionError("--cards is for Gaudi; this machine is measured as one.")
    if (given["target_quant"], given["draft_quant"]) != ("none", "none"):
        raise UnsupportedOptionError(
            "--target_quant and --draft_quant are for Gaudi: what is measured of this machine are "
            "steps without quantization."
        )
    dtype = torch.bfloat16 if given["bf16"] else torch.float32
    return this_machine(get_device(device), dtype)
