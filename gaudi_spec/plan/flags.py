"""The flags of `gaudi-spec plan`."""

from __future__ import annotations

import argparse

from ..helptext import HelpFormatter

QUANTS = ("none", "int8", "fp8", "int4")


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
