"""`run_lm_eval`: Optimum Habana's evaluation program, whose texts are generated with a draft."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import habana_flags, results
from .errors import ConfigError
from .flags import parser as base_parser
from .metrics import total
from .perf_config import parse
from .run_generation import check, load, start


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser: that of `run_generation`, and the flags of the evaluation."""
    p = base_parser()
    p.prog, p.description = "run_lm_eval.py", "Evaluate a target, with a draft, on lm-eval tasks."
    group = p.add_argument_group("evaluation")
    group.add_argument("--output_file", "-o", required=True, help="results, as JSON")
    group.add_argument(
        "--tasks",
        nargs="+",
        default=["hellaswag", "lambada_openai", "piqa", "winogrande"],
        help="names of tasks",
    )
    group.add_argument("--include_path", help="directory with YAML tasks of your own")
    group.add_argument(
        "--buckets",
        type=int,
        nargs="+",
        default=[16, 32, 64, 128, 189, 284, 384],
        help="widths at which texts are scored; longer texts lose their beginning",
    )
    group.add_argument("--limit", "-L", type=float, help="examples of a task; below 1: their share")
    group.add_argument("--samples", "-E", help="JSON, or a file of it: {task: [numbers]}")
    group.add_argument("--num_fewshot", "-f", type=int, help="examples in the prompt")
    group.add_argument(
        "--fewshot_as_multiturn", action="store_true", help="examples as turns of a chat"
    )
    group.add_argument(
        "--apply_chat_template", nargs="?", const=True, default=False, help="a name, or the default"
    )
    group.add_argument("--system_instruction", help="system message")
    group.add_argument("--gen_kwargs", help="of tasks that generate: JSON, or name=value,...")
    group.add_argument("--metadata", type=json.loads, help="JSON; max_length is a bucket too")
    group.add_argument("--log_samples", action="store_true", help="keep every answer")
    group.add_argument("--show_config", action="store_true", help="print the results as JSON")
    group.add_argument("--max_graphs", type=int, help="no effect: the set of graphs is closed")
    group.add_argument(
        "--confirm_run_unsafe_code", action="store_true", help="allow tasks that run code"
    )
    return p


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code."""
    p = parser()
    args = parse(p, argv)
    added = {action.dest for action in p._actions} - {a.dest for a in base_parser()._actions}
    habana_flags.only(args, p, added | {"ignore_eos"})
    config = check(args)
    samples = _check(args)
    results.check_output_dir(str(Path(args.output_file).parent))
    device = start(args)
    from .lm_eval import GaudiSpecLM  # before the models are loaded: it may be missing

    pair = load(args, device, config)
    lm = GaudiSpecLM(
        pair.target,
        pair.tokenizer,
        pair.draft,
        batch_size=args.batch_size or 1,
        buckets=args.buckets,
        config=config,
        device=device,
    )
    if args.warmup and config.captures(device.captures):
        lm.scorer.warm_up(args.quiet)
    values = _evaluate(lm, args, samples)
    results.write_json(Path(args.output_file), values)
    if args.show_config:
        print(json.dumps(values, indent=2, ensure_ascii=False))
    return 0


def _check(args: argparse.Namespace) -> dict[str, list[int]] | None:
    """Checks the evaluation's own flags; returns the chosen samples."""
    if args.fewshot_as_multiturn and not args.apply_chat_template:
        raise ConfigError("--fewshot_as_multiturn makes a chat: add --apply_chat_template.")
    if args.max_graphs is not None:
        print("Without effect: --max_graphs (the set of graphs is closed).", file=sys.stderr)
    if args.samples is not None and args.limit is not None:
        raise ConfigError("--samples and --limit contradict each other: give one of them.")
    if args.metadata and "max_length" in args.metadata:
        args.buckets = [*args.buckets, args.metadata["max_length"]]
    if args.samples is None:
        return None
    try:
        path = Path(args.samples)
        return json.loads(args.samples if "{" in args.samples else path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read --samples: {error}.") from error


def _evaluate(lm: Any, args: argparse.Namespace, samples: Any) -> dict[str, Any]:
    """Runs the tasks, prints their table, and returns what is written."""
    from lm_eval import evaluator, tasks, utils

    gen_kwargs = args.gen_kwargs
    if gen_kwargs and gen_kwargs.lstrip().startswith("{"):
        gen_kwargs = json.loads(gen_kwargs)
    found = evaluator.simple_evaluate(
        lm,
        tasks=args.tasks,
        task_manager=tasks.TaskManager(include_path=args.include_path, metadata=args.metadata),
        limit=args.limit,
        samples=samples,
        log_samples=args.log_samples,
        num_fewshot=args.num_fewshot,
        fewshot_as_multiturn=args.fewshot_as_multiturn,
        gen_kwargs=gen_kwargs,
        system_instruction=args.system_instruction,
        apply_chat_template=args.apply_chat_template,
        metadata=args.metadata,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    print(utils.make_table(found))
    found["args"] = vars(args)
    found["environment"] = results.environment(lm.engine_device)
    if lm.reports:
        found["generation"] = total(lm.reports).to_dict()
    return json.loads(json.dumps(found, default=utils.handle_non_serializable))
