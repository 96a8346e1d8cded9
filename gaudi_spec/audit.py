"""Does the pair keep the static-shape contract? Runs mixed prompts and counts.

The contract: after the warm-up nothing is compiled, the host reads once a cycle, no operation
leaves the device's compiler, and no buffer moves. Transformers' own assisted generation is run on
the same prompts for comparison: each distinct shape it makes would be a recipe of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Collection
from typing import Any

import torch

from .config import SCHEDULES, SpecConfig
from .device import Device, get_device
from .engine import SpeculativeEngine
from .errors import ConfigError
from .flags import add_quantization, quant_configs, quantization
from .helptext import HelpFormatter
from .loading import Pair, Source, load_pair
from .results import progress
from .schedule import Costs, Schedule, schedule_of


@dataclasses.dataclass
class Audit:
    """What was counted; `broken` says which rule does not hold.

    Attributes:
        recipes_warmup: Graphs built before the first prompt.
        recipes_after_warmup: Graphs built later; must be 0.
        host_reads_per_cycle: Must be at most `reads_allowed`.
        reads_allowed: 1, or 2 with the schedule "confidence", whose verification waits for a count.
        fallback_ops: Operations that left the device's compiler; must be 0.
        reallocations: Buffers that moved; must be 0.
        baseline_distinct_shapes: Shapes that Transformers' assisted generation made of the same
            prompts, target and draft together; None if it was not run.
        recipes: Graphs built for each "batch, K".
    """

    recipes_warmup: int = 0
    recipes_after_warmup: int = 0
    host_reads_per_cycle: float = 0.0
    reads_allowed: int = 1
    fallback_ops: int = 0
    reallocations: int = 0
    baseline_distinct_shapes: int | None = None
    recipes: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """Names of the counts that break the contract."""
        zero = ("recipes_after_warmup", "fallback_ops", "reallocations")
        names = [name for name in zero if getattr(self, name)]
        return names + ["host_reads_per_cycle"] * (self.host_reads_per_cycle > self.reads_allowed)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts with a budget and end-of-text ids of their own."""

    prompts: list[torch.Tensor]
    budgets: list[int]
    ends: list[tuple[int, ...]]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.budgets))


class _Every(Schedule):
    """Every K of a schedule in turn, so that none is left out."""

    def __init__(self, sizes: Collection[int]) -> None:
        self.sizes = sizes

    def choose(self, cycle: int, costs: Costs) -> int:
        """Returns the K whose turn it is."""
        return sorted(self.sizes)[cycle % len(self.sizes)]


def workload(count: int, vocab_size: int, room: int, seed: int = 0) -> Workload:
    """Returns random prompts of mixed lengths, budgets and end patterns.

    Args:
        count: Prompts.
        vocab_size: Ids to draw from.
        room: Tokens that prompt and budget may take together.
        seed: Of the draw.
    """
    draw = random.Random(seed)
    prompts, budgets, ends = [], [], []
    for _ in range(count):
        length = draw.choice((1, 2, draw.randint(3, 16), draw.randint(17, max(18, room // 2))))
        budget = draw.randint(1, max(1, min(32, room - length)))
        prompts.append(torch.tensor([draw.randrange(3, vocab_size) for _ in range(length)]))
        budgets.append(budget)
        # A tenth of all ids ends the text, so that ends fall anywhere in a block.
        ends.append(tuple(draw.sample(range(vocab_size), vocab_size // 10)) * draw.choice((0, 1)))
    return Workload(prompts, budgets, ends)


def audit(
    pair: Pair,
    device: Device,
    config: SpecConfig,
    batch_sizes: list[int],
    sizes: list[int],
    work: Workload,
    quiet: bool = False,
) -> Audit:
    """Runs `work` in batches of each size with each largest K and counts.

    Args:
        pair: Target and draft.
        device: Where they run.
        config: Other settings.
        batch_sizes: B to try.
        sizes: Largest K to try; `config.schedule` says which others there are.
        work: What to generate.
        quiet: No progress bar.
    """
    found, cycles, reads = Audit(reads_allowed=2 if config.policy == "confidence" else 1), 0, 0
    combinations = [(batch, k) for batch in batch_sizes for k in sizes]
    for batch, k in progress(quiet, iterable=combinations, desc="audit", unit="size"):
        settings = config.replace(num_assistant_tokens=k, batch_size=batch)
        engine = SpeculativeEngine(pair.target, pair.draft, settings, device)
        left, before = device.fallbacks() or 0, device.recipes() or 0
        engine.warm_up(batch, work.longest, quiet=True)
        every = None if config.policy == "confidence" else _Every(schedule_of(settings).sizes)
        built, addresses = _built(engine) - before, _addresses(engine)
        for at in range(0, len(work.prompts), batch):
            rows = slice(at, at + batch)
            given = (work.prompts[rows], work.budgets[rows])
            engine.generate(*given, eos_token_ids=work.ends[at], schedule=every)
            cycles += engine.report.cycles
            reads += engine.report.host_reads
        found.recipes[f"{batch}, {k}"] = built
        found.recipes_warmup += built
        found.recipes_after_warmup += _built(engine) - before - built
        found.fallback_ops += (device.fallbacks() or 0) - left
        found.reallocations += sum(a != b for a, b in zip(addresses, _addresses(engine)))
    found.host_reads_per_cycle = reads / max(1, cycles)
    return found


def baseline_shapes(pair: Pair, work: Workload, k: int) -> int:
    """Counts the shapes that Transformers' assisted generation makes, one prompt at a time.

    A shape is what an HPU graph is keyed by: which model, query width, and cache length.
    """
    shapes: set[tuple[str, int, int]] = set()

    def watch(role: str) -> Any:
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            cache = kwargs.get("past_key_values", kwargs.get("cache"))
            past = 0 if cache is None else int(cache.get_seq_length())
            shapes.add((role, kwargs["input_ids"].shape[1], past))

        return hook

    models = {"target": pair.target, "draft": pair.draft}
    hooks = [
        model.register_forward_pre_hook(watch(role), with_kwargs=True)
        for role, model in models.items()
    ]
    try:
        for prompt, budget in zip(work.prompts, work.budgets):
            pair.target.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                assistant_model=pair.draft,
                max_new_tokens=budget,
                do_sample=False,
                num_assistant_tokens=k,
                pad_token_id=0,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return len(shapes)


def main(argv: list[str]) -> int:
    """Runs `gaudi-spec audit`; returns 1 if the contract is broken."""
    args = parser().parse_args(argv)
    for name, least in (("prompts", 1), ("room", 32)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(args, name)}.")
    device = get_device(args.device)
    pair = load_pair(
        Source(args.model_name_or_path),
        Source(args.assistant_model),
        torch.bfloat16 if args.bf16 else torch.float32,
        device,
        quant_configs=quant_configs(args),
    )
    room = min(args.room, pair.target.config.max_position_embeddings)
    work = workload(args.prompts, len(pair.tokenizer), room)
    config = SpecConfig(
        schedule=args.num_assistant_tokens_schedule,
        sync_every=args.sync_every,
        compile="graph",
        prefill_chunks=(64,),
        **quantization(args),
    )
    found = audit(
        pair, device, config, args.batch_sizes, args.num_assistant_tokens, work, args.quiet
    )
    if not args.no_baseline:
        k = max(args.num_assistant_tokens)
        found.baseline_distinct_shapes = baseline_shapes(pair, work, k)
    if not args.json:
        print(f"{device.describe()}: {args.prompts} prompts, batches {args.batch_sizes}")
        for name, value in dataclasses.asdict(found).items():
            print(f"{name:28} = {value}")
        print("contract broken: " + ", ".join(found.broken) if found.broken else "contract kept")
    print(json.dumps({**dataclasses.asdict(found), "device": device.describe()}))
    return 1 if found.broken else 0


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec audit",
        description=__doc__.splitlines()[0],
        formatter_class=HelpFormatter,
    )
    p.add_argument("--model_name_or_path", "--model", required=True, help="target")
    p.add_argument("--assistant_model", required=True, help="draft")
    p.add_argument("--batch_sizes", type=_numbers, default=[1, 4], help="such as 1,4")
    p.add_argument(
        "--num_assistant_tokens", type=_numbers, default=[2, 4], help="largest K, such as 2,4"
    )
    p.add_argument(
        "--num_assistant_tokens_schedule",
        choices=SCHEDULES,
        default="auto",
        help="which K there are (default: auto); each is used in turn",
    )
    p.add_argument("--prompts", type=int, default=30, help="how many")
    p.add_argument("--room", type=int, default=96, help="tokens of the longest row")
    p.add_argument("--sync_every", type=int, default=1, help="cycles between host reads")
    p.add_argument("--device", default="hpu-emulated", help="hpu-emulated, hpu, cuda or cpu")
    p.add_argument("--bf16", action="store_true", help="load both in bfloat16, not float32")
    add_quantization(p)
    p.add_argument("--no_baseline", action="store_true", help="skip Transformers' generation")
    p.add_argument("--json", action="store_true", help="print the JSON line only")
    p.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return p


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"Expected whole numbers such as 1,4, not {text!r}.") from None


def _built(engine: SpeculativeEngine) -> int:
    """Returns the recipes of the device's own count, or the graphs of this engine."""
    recipes = engine.device.recipes()
    facts = engine.runtime.graphs.facts
    return facts.warmup + facts.after_warmup if recipes is None else recipes


def _addresses(engine: SpeculativeEngine) -> list[int]:
    runtime = engine.runtime
    caches = [model.cache for model in runtime.models.values()]
    buffers = [b for cache in caches for b in cache.buffers] + [runtime.state.tokens]
    return [buffer.data_ptr() for buffer in buffers]
