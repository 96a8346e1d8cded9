"""`gaudi-spec plan`: memory and expected speed of a pair, before any weights are loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from ..config import MAX_ASSISTANT_TOKENS, SpecConfig
from ..device import get_device
from ..errors import ConfigError, UnsupportedOptionError
from ..helptext import HelpFormatter
from ..perf_config import PerfConfig
from ..results import write_text
from . import report
from .hardware import Hardware, gaudi
from .measure import this_machine
from .memory import QUANTS, Job
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


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec plan",
        formatter_class=HelpFormatter,
        description="Memory and expected speed-up of a pair of models, from their configs alone. "
        "Figures for Gaudi are projected from public speeds of other models, never measured.",
    )
    p.add_argument("--model", "--model_name_or_path", help="target: directory or hub name")
    p.add_argument("--assistant_model", help="draft: directory or hub name")
    p.add_argument("--hardware", choices=("gaudi2", "gaudi3", "this"), help="this: measured first")
    p.add_argument("--batch", "--batch_size", type=int, default=1, help="rows (default: 1)")
    p.add_argument("--context", type=int, default=2048, help="prompt and new tokens of a row")
    p.add_argument("--target_quant", choices=QUANTS, default="none", help="of the target's weights")
    p.add_argument("--draft_quant", choices=QUANTS, default="none", help="of the draft's weights")
    p.add_argument("--cards", type=int, default=1, help="split the target over so many")
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
    hardware = _hardware(args)
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


def _hardware(args: argparse.Namespace) -> Hardware:
    if args.hardware != "this":
        return gaudi(args.hardware)
    if args.cards > 1:
        raise UnsupportedOptionError("--cards is for Gaudi; this machine is measured as one.")
    if (args.target_quant, args.draft_quant) != ("none", "none"):
        raise UnsupportedOptionError(
            "--target_quant and --draft_quant are for Gaudi: what is measured of this machine are "
            "steps without quantization."
        )
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return this_machine(get_device(args.device), dtype)
