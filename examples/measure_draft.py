"""How much faster is a target with a draft, by kind of prompt? Against plain static decoding.

The prompts are those that `gaudi-spec distill` never trains on. Each is decoded alone, plainly and
with the draft in turn, so that both see the same noise of the machine.

    python examples/measure_draft.py --assistant_model smollm2-135m-draft --bf16 --torch_compile
    python examples/measure_draft.py --drafter ngram --num_assistant_tokens 5 --kinds summarise edit
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from tqdm import tqdm

from gaudi_spec import SpecConfig, SpeculativeEngine
from gaudi_spec.cli import run_command
from gaudi_spec.device import get_device
from gaudi_spec.distill import prompts
from gaudi_spec.loading import Source, load_pair


def main(argv: list[str]) -> int:
    """Runs the program; the last line of standard output is a JSON object."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model_name_or_path", default="smollm2-135m-instruct")
    p.add_argument("--assistant_model", help="draft model")
    p.add_argument("--drafter", default="auto", help="auto, ngram, combined, ...")
    p.add_argument("--num_assistant_tokens", type=int, help="K (default: the draft's own)")
    p.add_argument("--max_new_tokens", type=int, default=96)
    p.add_argument("--kinds", nargs="+", choices=list(prompts.held_out()))
    p.add_argument("--bf16", action="store_true", help="bfloat16, not float32")
    p.add_argument("--torch_compile", action="store_true", help="capture graphs on cpu too")
    p.add_argument("--device", default="auto")
    args = p.parse_args(argv)
    device = get_device(args.device)
    draft = Source(args.assistant_model) if args.assistant_model else None
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    pair = load_pair(Source(args.model_name_or_path), draft, dtype, device)
    own = getattr(getattr(pair.draft, "generation_config", None), "num_assistant_tokens", None)
    config = SpecConfig(
        num_assistant_tokens=args.num_assistant_tokens or own or 5,
        compile="graph" if args.torch_compile else "auto",
        max_length=256 + args.max_new_tokens,
    )
    plain = SpeculativeEngine(pair.target, None, config, device)
    engine = SpeculativeEngine(
        pair.target, pair.draft, config.replace(drafter=args.drafter), device
    )
    texts = {k: v for k, v in prompts.held_out().items() if k in (args.kinds or (k,))}
    rows = {k: [prompts.as_chat(pair.tokenizer, t) for t in v] for k, v in texts.items()}
    kinds = {}
    with tqdm(total=sum(map(len, rows.values())), unit="prompt") as bar:
        for kind, some in rows.items():
            for both in (plain, engine):
                both.generate(some[:1], 8)  # graphs are built before anything is timed
            kinds[kind] = _measure(plain, engine, some, args.max_new_tokens, bar)
    print(f"K = {config.num_assistant_tokens}, {dtype}, {device.describe()}")
    for kind, values in kinds.items():
        print(f"{kind:10} {values['speedup']:.2f}x  acceptance {values['acceptance_rate']:.3f}")
    total = _total(list(kinds.values()))
    print(f"{'all':10} {total['speedup']:.2f}x  acceptance {total['acceptance_rate']:.3f}")
    print(json.dumps({"num_assistant_tokens": config.num_assistant_tokens, **kinds, "all": total}))
    return 0


def _measure(plain, engine, rows, tokens: int, bar) -> dict[str, float]:
    seconds, counts, same = [0.0, 0.0], [0, 0, 0, 0], 0
    for row in rows:
        outputs = []
        for i, either in enumerate((plain, engine)):
            begin = time.perf_counter()
            outputs += either.generate([row], tokens)
            seconds[i] += time.perf_counter() - begin
        report = engine.report
        facts = (report.proposed, report.accepted, report.cycles, report.emitted_tokens)
        counts = [a + b for a, b in zip(counts, facts)]
        same += torch.equal(*outputs)
        bar.update()
    names = ("proposed", "accepted", "cycles", "emitted_tokens")
    values = dict(zip(names, counts)) | {"prompts": len(rows), "same_text": same}
    values |= {"plain_seconds": seconds[0], "seconds": seconds[1]}
    return values | {
        "speedup": seconds[0] / seconds[1],
        "acceptance_rate": counts[1] / max(counts[0], 1),
    }


def _total(kinds) -> dict[str, float]:
    total = {name: sum(values[name] for values in kinds) for name in next(iter(kinds))}
    total["speedup"] = total["plain_seconds"] / total["seconds"]
    total["acceptance_rate"] = total["accepted"] / max(total["proposed"], 1)
    return total


if __name__ == "__main__":
    sys.exit(run_command(main))
