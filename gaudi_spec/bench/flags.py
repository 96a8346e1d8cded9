"""The flags of `gaudi-spec bench`, and the plan that they make."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import yaml

from ..config import DEVICES, SpecConfig, refuse_quant
from ..errors import ConfigError
from ..helptext import HelpFormatter

BASELINES = ("transformers", "assisted", "llama.cpp")
KINDS = ("chat", "code", "summarise", "translate", "story")  # the default ones
STEPS_SIZES = "1,2,4,8"
MOST = 1000  # numbers of a list
AUTO = "auto"  # in a list of K: what the settings choose
OWN_FLAG = ("num_assistant_tokens", "batch_size", "max_length")  # or sized by the prompts
ABOUT = {
    "latency": "one batch, over and over",
    "throughput": "all prompts of a workload, a batch at a time",
    "sweep": "throughput for every combination of list-valued flags: 1,2,4 or 1-4 or 32-128*2",
    "steps": "what each step of a cycle costs, without graphs and with, and what building costs",
}


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec bench",
        formatter_class=HelpFormatter,
        description="Measure a target with its draft against plain decoding and against others, "
        "in turn. The last line of standard output is the whole result as one JSON object.",
    )
    commands = p.add_subparsers(dest="what", required=True, metavar="|".join(ABOUT))
    for name, about in ABOUT.items():
        text = about.capitalize() + "."
        sub = commands.add_parser(name, help=about, description=text, formatter_class=HelpFormatter)
        _models(sub.add_argument_group("models"))
        _work(sub.add_argument_group("work"), name)
        _axes(sub.add_argument_group("settings"), name)
        _run(sub.add_argument_group("run"), name)
    return p


def _models(group: Any) -> None:
    group.add_argument("--model_name_or_path", "--model", required=True, help="target")
    group.add_argument("--assistant_model", help="draft model")
    group.add_argument("--bf16", action="store_true", help="load both in bfloat16, not float32")
    group.add_argument("--trust_remote_code", action="store_true", help="run a checkpoint's code")
    group.add_argument("--device", default="auto", choices=("auto", *DEVICES))


def _work(group: Any, name: str) -> None:
    kinds = ",".join(KINDS)
    group.add_argument("--kinds", help=f"built-in prompts, such as the default: {kinds}")
    group.add_argument("--by_kind", action="store_true", help="measure each kind by itself")
    group.add_argument("--prompts", metavar="FILE", help='JSON lines: {"prompt": TEXT, "kind": K}')
    group.add_argument("--input_len", help="random tokens instead, this many in a prompt")
    group.add_argument(
        "--num_prompts", type=int, help="use so many prompts (default: all; random: one batch)"
    )
    group.add_argument("--max_new_tokens", default="64", help="new tokens of each prompt")
    group.add_argument("--batch_size", default="1", help="prompts at a time")
    group.add_argument(
        "--ignore_eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on after end of text, to the budget",
    )
    group.add_argument("--do_sample", action="store_true", help="draw tokens; default: greedy")
    group.add_argument("--temperature", type=float, help="of the draw")
    group.add_argument("--seed", type=int, default=0, help="of the draw and of random prompts")


def _axes(group: Any, name: str) -> None:
    sizes = STEPS_SIZES if name == "steps" else None
    own = "the draft's own"
    group.add_argument(
        "--num_assistant_tokens",
        default=sizes,
        help=f"K, or auto: as SpecConfig chooses (default: {sizes or own})",
    )
    group.add_argument("--drafter", help="auto, model, ngram, combined or a plug-in")
    group.add_argument("--verifier", help="of drawn tokens: rejection or coupled")
    group.add_argument(
        "--config",
        help="YAML file of perf_configs: its engine settings; its flags for generate are not read",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any field of SpecConfig; may be repeated",
    )
    if name != "steps":
        group.add_argument("--torch_compile", action="store_true", help="graphs on cpu too")
    else:
        group.add_argument("--modes", default="eager,graph", help="without graphs, with, or both")
        group.add_argument(
            "--no_start_times", action="store_true", help="skip the two starts of a new process"
        )


def _run(group: Any, name: str) -> None:
    group.add_argument("--repetitions", "-r", type=int, default=3, help="timed runs")
    group.add_argument("--warmup", type=int, default=1, help="untimed runs before")
    group.add_argument(
        "--baselines",
        default="transformers" if name == "steps" else ",".join(BASELINES),
        help=f"besides plain decoding: of {','.join(BASELINES)}, or none",
    )
    group.add_argument("--gguf", help="GGUF file of the target, for llama.cpp")
    group.add_argument("--output", "-o", default="md", choices=("md", "csv", "json", "jsonl"))
    group.add_argument("--output_dir", help="new directory for results, report and plots")
    group.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")


def numbers(flag: str, text: str, least: int = 1) -> list[int]:
    """Reads `1,2,4`, `1-4`, `1-9+2` and `32-128*2`, or several of them.

    Raises:
        ConfigError: It is something else, or a number is too small.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part.strip())
        if not match:
            raise ConfigError(f"--{flag} takes numbers such as 1,2,4 or 1-8*2, not {text!r}.")
        first, last, operation, by = match.groups()
        values = _range(int(first), int(last or first), operation or "+", int(by or 1))
        found += itertools.islice(values, MOST + 1)
    if len(found) > MOST:
        raise ConfigError(f"--{flag} takes {MOST} numbers at most: {text!r} are more.")
    if not found or min(found) < least:
        raise ConfigError(f"--{flag} must be at least {least}, not {text!r}.")
    return list(dict.fromkeys(found))


def _range(first: int, last: int, operation: str, by: int) -> Iterator[int]:
    while first <= last:
        yield first
        following = first * by if operation == "*" else first + by
        if following <= first:
            raise ConfigError(f"A range cannot step by {operation}{by}: it would never end.")
        first = following


def sizes(text: str) -> list[int | None]:
    """Reads K: numbers, ranges, and `auto`, which is None."""
    found: list[int | None] = []
    for part in text.split(","):
        found += [None] if part == AUTO else numbers("num_assistant_tokens", part, 0)
    return list(dict.fromkeys(found))


def settings(args: argparse.Namespace) -> list[tuple[dict[str, Any], SpecConfig]]:
    """Returns every combination of settings, each with the values of what was named.

    Raises:
        ConfigError: A field is unknown, or a value out of its range.
    """
    from ..perf_config import PerfConfig  # not for --help: it imports torch

    base = PerfConfig.read(args.config).settings if args.config else SpecConfig()
    axes: dict[str, list[Any]] = {}
    for name in ("drafter", "verifier"):
        if getattr(args, name) is not None:
            axes[name] = getattr(args, name).split(",")
    for text in args.set:
        name, equals, values = text.partition("=")
        if name.strip() in OWN_FLAG:
            raise ConfigError(f"{name.strip()} is not for --set: it has a flag, or follows others.")
        try:
            axes[name.strip()] = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError:
            equals = ""
        if not equals or not axes[name.strip()]:
            raise ConfigError(f"--set takes NAME=VALUE, such as sync_every=2, not {text!r}.")
    if args.what == "steps":
        axes["compile"] = args.modes.split(",")
    elif args.torch_compile:
        axes["compile"] = ["graph"]
    found = []
    for values in itertools.product(*axes.values()):
        named = dict(zip(axes, values))
        found.append((named, SpecConfig.from_dict({**dataclasses.asdict(base), **named})))
    return found


def baselines(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns what is run besides plain decoding.

    Raises:
        ConfigError: A name is unknown.
    """
    names = tuple(name for name in args.baselines.split(",") if name and name != "none")
    for name in names:
        if name not in BASELINES:
            raise ConfigError(f"--baselines takes {', '.join(BASELINES)} or none, not {name!r}.")
    return names


def check(args: argparse.Namespace) -> None:
    """Checks what can be checked before a model is loaded.

    Raises:
        ConfigError: Names the flag that is wrong.
    """
    for name, least in (("repetitions", 1), ("warmup", 0), ("num_prompts", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, not {value}.")
    if not -(1 << 63) <= args.seed < 1 << 63:
        raise ConfigError(f"--seed must be a whole number of 64 bits, not {args.seed}.")
    given = [name for name in ("kinds", "prompts", "input_len") if getattr(args, name)]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other: give one of them.")
    lists = {"batch_size": 1, "max_new_tokens": 1, "num_assistant_tokens": 0, "input_len": 1}
    for name, least in lists.items():
        text = getattr(args, name)
        if text is None:
            continue
        many = args.what == "sweep" or (args.what, name) == ("steps", "num_assistant_tokens")
        found = sizes(text) if name == "num_assistant_tokens" else numbers(name, text, least)
        if len(found) > 1 and not many:
            raise ConfigError(
                f"{args.what} takes one --{name}, not {text}: lists are for gaudi-spec bench sweep."
            )
    for _, config in settings(args) if not args.assistant_model else ():
        refuse_quant(config.quant("draft"), "draft")
    if len(settings(args)) > 1 and args.what not in ("sweep", "steps"):
        raise ConfigError(
            f"{args.what} takes one value of each setting: lists are for gaudi-spec bench sweep."
        )
    baselines(args)
