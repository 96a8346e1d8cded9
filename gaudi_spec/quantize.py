"""`gaudi-spec quantize`: the two steps of FP8 on Gaudi, for one model.

gaudi-spec quantize measure --model M --prompts FILE -o DIR
gaudi-spec quantize convert --model M -o DIR
gaudi-spec generate --model_name_or_path M --target_quant_config DIR/quantize.json ...
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from . import results
from .config import SpecConfig
from .device import Device, get_device
from .distill import prompts
from .engine import SpeculativeEngine
from .errors import ConfigError
from .helptext import HelpFormatter
from .loading import Source, load_pair
from .quant import inc
from .quant.facts import lines

UNTOUCHED = ["lm_head", "embed_out", r"\.gate$", r"\.router$"]  # heads and routers


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code."""
    args = parser().parse_args(argv)
    device = get_device(args.device)
    if device.name not in ("hpu", "cpu"):
        raise ConfigError(
            f"Neural Compressor does not run on {device.name}: use --device hpu, or cpu for a "
            "first look; on hpu-emulated --target_quant fp8 has the card's number format."
        )
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens must be at least 1, not {args.max_new_tokens}.")
    for pattern in args.exclude:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"--exclude takes regular expressions; {pattern!r} is none: {error}."
            ) from error
    texts = prompts.read(args.prompts) if args.prompts else _built_in()
    results.check_output_dir(args.output_dir)
    directory = Path(args.output_dir).resolve()
    (directory / "measurements").mkdir(exist_ok=True)
    disable_progress_bar()
    if args.step == "measure":
        values = _measure(args, device, directory, texts)
    else:
        values = _convert(args, device, directory)
    print(json.dumps(values))
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        formatter_class=HelpFormatter,
        prog="gaudi-spec quantize",
        description="FP8 with Intel Neural Compressor: `measure` runs prompts and notes the range "
        "of every layer; `convert` makes the configuration that quantizes, and tries it. Each "
        "model, target or draft, has a directory of its own.",
    )
    p.add_argument("step", choices=("measure", "convert"))
    p.add_argument("--model", "--model_name_or_path", required=True, help="directory or hub name")
    p.add_argument("-o", "--output_dir", required=True, help="where JSON files and ranges go")
    p.add_argument("--prompts", help="file: prompts, one a line (default: built-in ones)")
    p.add_argument("--max_new_tokens", type=int, default=32, help="written after each prompt")
    p.add_argument(
        "--scale_method", help="Neural Compressor's name (default: the one of the device)"
    )
    p.add_argument(
        "--exclude",
        nargs="+",
        default=UNTOUCHED,
        help="regular expressions of names of layers that are left as they are",
    )
    p.add_argument("--device", default="auto", choices=("auto", "hpu", "cpu"))
    p.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return p


def _measure(
    args: argparse.Namespace, device: Device, directory: Path, texts: list[str]
) -> dict[str, Any]:
    path = _write(args, device, directory, "measure")
    pair = load_pair(Source(args.model), None, torch.bfloat16, device, measuring=path)
    rows = [torch.tensor(pair.tokenizer(text)["input_ids"]) for text in texts]
    engine = SpeculativeEngine(pair.target, None, SpecConfig(compile="eager"), device)
    with results.progress(args.quiet, desc="measure", total=len(rows), unit="prompt") as bar:
        for row in rows:
            engine.generate([row], args.max_new_tokens)
            bar.update()
    inc.finish(pair.target)
    print(f"{len(rows)} prompts measured; next: gaudi-spec quantize convert -o {directory}")
    return {"step": "measure", "config": path, "prompts": len(rows)}


def _convert(args: argparse.Namespace, device: Device, directory: Path) -> dict[str, Any]:
    if not list((directory / "measurements").glob("inc_hooks_*")):
        raise ConfigError(
            f"{directory} has no measurements: run `gaudi-spec quantize measure` with the same -o "
            "first."
        )
    path = _write(args, device, directory, "quantize")
    configs = {"target": path}
    pair = load_pair(Source(args.model), None, torch.bfloat16, device, quant_configs=configs)
    engine = SpeculativeEngine(pair.target, None, SpecConfig(compile="eager"), device)
    engine.generate([torch.tensor(pair.tokenizer("A")["input_ids"])], 1)
    held = engine.facts()["target"]
    print(*lines("model", held), sep="\n")
    print(f"pass --target_quant_config {path} or --draft_quant_config {path}")
    return {"step": "convert", "config": path, "model": held}


def _write(args: argparse.Namespace, device: Device, directory: Path, step: str) -> str:
    generation = "gaudi2" if device.fp8_limit < 448 else "gaudi3"
    default = inc.SCALE_METHODS[generation] if device.name == "hpu" else inc.CPU_SCALE_METHOD
    method, path = args.scale_method or default, directory / f"{step}.json"
    qdq = device.name != "hpu"
    results.write_json(path, inc.settings(step.upper(), directory, method, args.exclude, qdq))
    return str(path)


def _built_in() -> list[str]:
    return [prompt for some in prompts.held_out().values() for prompt in some]
