"""`gaudi-spec plan`: memory and expected speed of a pair, before any weights are loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from ..config import MAX_ASSISTANT_TOKENS, SpecConfig
from ..device import get_device
from ..errors import ConfigError, UnsupportedOptionError
from ..perf_config import PerfConfig
from ..results import write_text
from . import report
from .flags import parser
from .hardware import Hardware, gaudi
from .measure import this_machine
from .memory import Job
from .sizes import sizes

_KS = range(1, 9)
_MOST = 1_000_000  # rows, or cards
# What a file says in the names of `run_generation`.
_FLAGS = {
    "model": "model_name_or_path",
    "assistant_model": "assistant_model",
    "batch": "batch_size",
}
# What the engine's settings call a scheme, in the names of the planner.
_SCHEMES = {"auto": "none", "int8wo": "int8", "int4wo": "int4"}


def main(argv: list[str]) -> int:
    """Runs the command."""
    args, file = parse(argv)
    if args.update and file is None:
        raise ConfigError("--update writes into a file: add --config FILE.")
    values = plan(args, file)
    if args.update and file is not None:
        write_text(file.path, file.with_block("projected", block(values, file)))
    print(json.dumps(values) if args.json else report.text(values))
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, PerfConfig | None]:
    """Returns the arguments, those of a `--config` file before the given ones, and the file."""
    args = parser().parse_args(argv)
    if args.config is None:
        return args, None
    file = PerfConfig.read(args.config)
    given = {name: file.flags.get(flag) for name, flag in _FLAGS.items()}
    for name in ("target_quant", "draft_quant"):
        scheme = getattr(file.settings, name)
        given[name] = _SCHEMES.get(scheme, scheme)
    given |= {"context": file.settings.max_length, **file.plan}
    first = [f"--{name}={value}" for name, value in given.items() if value is not None]
    first += ["--bf16"] * bool(file.flags.get("bf16"))
    return parser().parse_args([*first, *argv]), file


def block(values: dict[str, Any], file: PerfConfig) -> dict[str, Any]:
    """Returns what `file` should say is projected."""
    command = f"gaudi-spec plan --config perf_configs/{file.path.name} --update"
    return report.block(values, file.settings.most_drafts, command)


def plan(args: argparse.Namespace, file: PerfConfig | None = None) -> dict[str, Any]:
    """Returns the plan for parsed arguments, with the settings of a file.

    Raises:
        ConfigError: An argument is missing or out of range.
    """
    for name in ("model", "assistant_model", "hardware"):
        if not getattr(args, name):
            raise ConfigError(f"--{name} is missing: give it, or a --config that does.")
    for name in ("batch", "cards"):
        if not 1 <= getattr(args, name) <= _MOST:
            raise ConfigError(f"--{name} must be from 1 to {_MOST}, not {getattr(args, name)}.")
    settings = file.settings if file else SpecConfig()
    for name in ("target_kv_dtype", "draft_kv_dtype"):
        if getattr(settings, name) != "auto":
            raise UnsupportedOptionError(
                f"{name} cannot be planned yet: leave it out of the file to plan caches in the "
                "model's dtype."
            )
    asked = args.num_assistant_tokens or [settings.most_drafts]
    if not all(1 <= k <= MAX_ASSISTANT_TOKENS for k in asked):
        raise ConfigError(f"--num_assistant_tokens must be from 1 to {MAX_ASSISTANT_TOKENS}.")
    ks = asked if args.num_assistant_tokens else sorted({*_KS, *asked})
    target, draft = sizes(args.model, "target"), sizes(args.assistant_model, "draft")
    most = target.positions or args.context
    if not 2 <= args.context <= most:
        raise ConfigError(
            f"--context must be from 2 to the {most} positions of {target.name}, not "
            f"{args.context}."
        )
    hardware = _hardware(args, settings)
    if args.cards > hardware.cards:
        raise ConfigError(f"--cards must be at most the {hardware.cards} of {hardware.name}.")
    job = Job(
        target,
        draft,
        args.batch,
        args.context,
        max(asked),
        2 if args.bf16 or args.hardware != "this" else 4,
        args.target_quant,
        args.draft_quant,
        args.cards,
        settings,
    )
    return report.values(job, hardware, ks)


def _hardware(args: argparse.Namespace, settings: SpecConfig) -> Hardware:
    if args.hardware != "this":
        return gaudi(args.hardware)
    if args.cards > 1:
        raise UnsupportedOptionError("--cards is for Gaudi; this machine is measured as one.")
    device, schemes = get_device(args.device), {args.target_quant, args.draft_quant}
    in_file = {settings.target_quant, settings.draft_quant} & {"int8wo", "int4wo"}
    refused = sorted(in_file | schemes - {"none", "int8"})
    if refused:
        raise UnsupportedOptionError(
            f"{refused[0]} is for Gaudi: of this machine, steps without quantization and with int8 "
            "are measured."
        )
    if "int8" in schemes - set(device.quant_schemes):
        raise UnsupportedOptionError(f"int8 has no kernel on {device.name}, so it is not measured.")
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return this_machine(device, dtype, "int8" in schemes)
