"""`gaudi-spec bench` and `gaudi-spec plot`."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from .. import results
from ..config import SpecConfig
from ..device import get_device
from ..drafters.registry import pick
from ..errors import ConfigError, InputError
from ..helptext import HelpFormatter
from ..loading import Pair, Source, load_pair
from ..models.support import max_positions, vocabulary
from ..options import resolve_options
from . import flags, plots, report, steps, workloads
from .card import Card, describe
from .contenders import Call, LlamaCpp
from .session import Plan, Session, needs_draft
from .workloads import Workload

SCHEMA_VERSION = 1


def main(argv: list[str]) -> int:
    """Runs `gaudi-spec bench`; the last line of standard output is a JSON object."""
    args = flags.parser().parse_args(argv)
    flags.check(args)
    if args.output_dir:
        report.check_new(args.output_dir)
    device = get_device(args.device)
    torch.manual_seed(args.seed)  # of Transformers' draws; ours are seeded by the call
    disable_progress_bar()  # Transformers' own
    set_verbosity_error()
    pair = _load(args, device)
    plan = _plan(args, pair)
    card = Card.of(pair, device)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "what": args.what,
        "command": shlex.join(["gaudi-spec", "bench", *argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "models": {"target": args.model_name_or_path, "draft": args.assistant_model},
        "environment": results.environment(device),
        "card": {**card.to_dict(), **describe(pair)},
        "notes": _notes(plan),
        "rows": [],
        "memory_gb": {},
    }
    if not args.quiet:
        print(f"{report.heading(result)}\n{report.card(result)}", file=sys.stderr, flush=True)
    bar = functools.partial(results.progress, args.quiet)
    try:
        for row in Session(pair, device, plan, card, bar, args.quiet).run():
            result["rows"].append(steps.with_sums(row) if args.what == "steps" else row)
            if args.output_dir:
                results.write_json(report.partial(args.output_dir), result)
        result["memory_gb"] = device.memory()
        if args.what == "steps" and not args.no_start_times:
            result["start"] = steps.starts(_model_flags(args), next(filter(None, plan.sizes), 1))
    except BaseException:  # what took minutes to measure must not be lost for what came later
        _rescue(args, result)
        raise
    if args.output_dir:
        report.write(result, args.output_dir)
    _print(args, result)
    return 0


def _print(args: argparse.Namespace, result: dict[str, Any]) -> None:
    text = report.text(result, args.output)
    if text:
        print(text)
    print(json.dumps(result), flush=True)


def _rescue(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Hands over the rows of a run that does not come to its end, and says that it did not."""
    count = len(result["rows"])
    if not count:
        return
    result["notes"].append(f"Not complete: the run ended early, after {count} rows.")
    _print(args, result)
    where = f", and in {report.partial(args.output_dir)}" if args.output_dir else ""
    print(f"The run ended early: its {count} rows are above{where}.", file=sys.stderr)


def _model_flags(args: argparse.Namespace) -> list[str]:
    words = ["--model_name_or_path", args.model_name_or_path, "--device", args.device]
    words += ["--assistant_model", args.assistant_model] if args.assistant_model else []
    words += [f"--{name}" for name in ("bf16", "trust_remote_code") if getattr(args, name)]
    return words


def _load(args: argparse.Namespace, device: Any) -> Pair:
    remote = args.trust_remote_code
    target = Source(args.model_name_or_path, trust_remote_code=remote)
    draft = None
    if args.assistant_model:
        draft = Source(args.assistant_model, trust_remote_code=remote)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return load_pair(target, draft, dtype, device)


def _plan(args: argparse.Namespace, pair: Pair) -> Plan:
    asked: dict[str, Any] = {"do_sample": args.do_sample}
    if args.temperature is not None:
        asked["temperature"] = args.temperature
    wanted = {**asked, "max_new_tokens": 1, "seed": args.seed}
    options = resolve_options(pair.target, pair.draft, 0, None, wanted)
    settings = flags.settings(args)
    drafting = [_drafts(config, pair) for _, config in settings]
    given, sizes = args.num_assistant_tokens, []
    if all(drafting):
        said = options.drafting
        own = said.num_assistant_tokens or said.suggested or settings[0][1].most_drafts
        sizes = flags.sizes(given or str(own))
    elif any(drafting) or (given and args.what != "steps"):
        raise ConfigError(
            "These settings need something that drafts: give --assistant_model, or only "
            "--drafter ngram."
        )
    batches = flags.numbers("batch_size", args.batch_size)
    found = _workloads(args, pair, max(batches))
    budgets = flags.numbers("max_new_tokens", args.max_new_tokens)
    plan = Plan(
        workloads=found,
        batches=batches,
        budgets=budgets,
        sizes=[k for k in sizes if k != 0],
        settings=settings,
        whole=args.what in ("throughput", "sweep"),
        call=Call(0, () if args.ignore_eos else options.eos_token_ids, options.sampling, asked),
        baselines=flags.baselines(args),
        gguf=args.gguf,
        repetitions=args.repetitions,
        warmup=args.warmup,
    )
    limit = max_positions(pair.target.config)
    longest = plan.longest(max(batches))
    if limit and longest > limit:
        raise InputError(
            f"The longest prompt and its new tokens make {longest} tokens, but the target takes "
            f"{limit}: lower --max_new_tokens or --input_len."
        )
    return plan


def _drafts(config: SpecConfig, pair: Pair) -> bool:
    """Returns whether anything drafts; a drafter that cannot be had is an error."""
    return pick(config.drafter, needs_draft(config, pair)) is not None


def _workloads(args: argparse.Namespace, pair: Pair, batch: int) -> list[Workload]:
    if args.input_len:
        count, size = args.num_prompts or batch, vocabulary(pair.target)[0]
        lengths = flags.numbers("input_len", args.input_len)
        return [workloads.random_tokens(n, count, size, args.seed) for n in lengths]
    if args.prompts:
        found = workloads.from_file(args.prompts, pair.tokenizer)
    else:
        kinds = args.kinds.split(",") if args.kinds else flags.KINDS
        found = workloads.by_kind(pair.tokenizer, kinds)
    if not args.by_kind:
        found = [workloads.mixed(found)]
    return [w.take(args.num_prompts) for w in found] if args.num_prompts else found


def _notes(plan: Plan) -> list[str]:
    """Returns what a reader must know besides the figures."""
    notes = []
    if not plan.warmup:
        notes.append("No warm-up: the first repetition holds what a first use costs.")
    missing = LlamaCpp.missing(plan.gguf)
    if "llama.cpp" in plan.baselines and missing:
        notes.append(missing)
    if "assisted" in plan.baselines and plan.sizes and max(plan.batches) > 1:
        notes.append(
            "Transformers' assisted generation takes one row, so its rows ran one after another."
        )
    return notes


def plot(argv: list[str]) -> int:
    """Runs `gaudi-spec plot`; the last line of standard output is a JSON object."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec plot",
        formatter_class=HelpFormatter,
        description="Draw the results of gaudi-spec bench: throughput by batch, acceptance by "
        "position, where a cycle's time goes, and speed-up over K and acceptance.",
    )
    p.add_argument("files", nargs="+", metavar="FILE", help="results.json of gaudi-spec bench")
    p.add_argument("--output_dir", "-o", default=".", help="where the PNG files go")
    p.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    args = p.parse_args(argv)
    found = [_read(path) for path in args.files]
    results.check_output_dir(args.output_dir)
    names = plots.draw(found, Path(args.output_dir))
    print(json.dumps({"plots": [str(Path(args.output_dir, f"{name}.png")) for name in names]}))
    return 0


def _read(path: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise ConfigError(f"Cannot read {path}: {reason}.") from error
    kinds = {"rows": list, "card": dict, "models": dict, "environment": dict}
    fits = isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in kinds.items())
    if not fits or not all(isinstance(row, dict) and "contender" in row for row in value["rows"]):
        raise ConfigError(f"{path} is not a result of gaudi-spec bench: give its results.json.")
    return value
