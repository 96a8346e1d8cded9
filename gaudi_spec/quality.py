"""`gaudi-spec quality`: what quantization costs, on a given text, before you choose it.

The text is read token by token, teacher-forced, through the same caches that generation uses, so
the cost of a quantized cache is in the figures too.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from .adapt import adapt
from .config import SpecConfig, refuse_quant
from .device import DEVICES, Device, get_device
from .errors import ConfigError, InputError
from .flags import add_quantization, quant_configs, quantization
from .helptext import HelpFormatter
from .loading import Source, load_pair
from .models.support import check_supported, max_positions
from .quant import apply
from .quant.facts import facts, lines
from .results import progress

NEAR_TIE = 0.1  # between the log-probabilities of the two most likely tokens


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code."""
    args = parser().parse_args(argv)
    config = SpecConfig(**quantization(args))
    if not args.assistant_model:
        refuse_quant(config.quant("draft"), "draft")
    if args.window < 2 or args.max_tokens < 2:
        raise ConfigError("--window and --max_tokens must be at least 2.")
    text = _read(args.text)
    device = get_device(args.device)
    disable_progress_bar()
    target, draft = Source(args.model), args.assistant_model and Source(args.assistant_model)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    configs = quant_configs(args)
    pair = load_pair(target, draft or None, dtype, device, quant_configs=configs)
    reference = pair.target
    if "target" in configs:  # the library has changed that one
        reference = load_pair(target, None, dtype, device).target
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        apply.check(config.quant(role), model, role, device)
        if model is not None:
            check_supported(model, role)
    ids = torch.tensor(pair.tokenizer(text)["input_ids"][: args.max_tokens])
    if len(ids) < 2:
        raise InputError("The text has fewer than two tokens: give a longer one.")
    models = (reference, pair.target, pair.draft)
    limits = [max_positions(model.config) for model in models if model is not None]
    most = min((limit for limit in limits if limit is not None), default=args.window)
    if min(args.window, len(ids)) > most:
        raise ConfigError(f"--window must be at most {most}, the models' positions.")
    values = measure(models, config, device, ids, args.window, args.quiet)
    _print(values)
    print(json.dumps(values))
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        formatter_class=HelpFormatter,
        prog="gaudi-spec quality",
        description="Perplexity and next-token agreement of a quantized target against itself "
        "unquantized, and the acceptance of a draft against both, on a text.",
    )
    p.add_argument("--model", "--model_name_or_path", required=True, help="target")
    p.add_argument("--assistant_model", help="draft")
    add_quantization(p)
    p.add_argument("--text", help="text file (default: a short built-in one, for a first look)")
    p.add_argument("--max_tokens", type=int, default=4096, help="of the text")
    p.add_argument("--window", type=int, default=256, help="tokens read at once")
    p.add_argument("--bf16", action="store_true", help="load in bfloat16, not float32")
    p.add_argument("--device", default="auto", choices=("auto", *DEVICES))
    p.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return p


@torch.no_grad()
def measure(
    loaded: tuple[Any, Any, Any],
    config: SpecConfig,
    device: Device,
    ids: torch.Tensor,
    window: int,
    quiet: bool = True,
) -> dict[str, Any]:
    """Compares on `ids` `[N]`, in windows that know nothing of each other.

    Args:
        loaded: The unquantized target, the target (the same, if `config` is to quantize it), and
            the draft or None.
        config: Its quantization is what is judged.
        device: Where the models are.
        ids: A text.
        window: Tokens of a window.
        quiet: No progress bar.

    Returns:
        Plain values for JSON: `perplexity` of both targets; `agreement`, the share of positions
        where both find the same token most likely; `near_ties`, the share of the others where the
        unquantized target gives its two best tokens almost the same probability; `acceptance`, the
        share where the draft's most likely token is the target's, for both targets; and what the
        models are.
    """
    slots = min(window, len(ids))
    reference, target, draft = loaded
    plain = config.replace(target_quant="auto", target_kv_dtype="auto")
    models = {
        "unquantized": adapt(reference, "target", device, plain, 1, slots),
        "quantized": adapt(target, "target", device, config, 1, slots),
    }
    if draft is not None:
        models["draft"] = adapt(draft, "draft", device, config, 1, slots)
    loss = {"unquantized": 0.0, "quantized": 0.0}
    hits = {"agreement": 0, "unquantized": 0, "quantized": 0, "near ties": 0}
    count = 0
    with progress(quiet, desc="read", total=len(ids), unit="tok") as bar:
        for piece in _windows(ids.to(device.torch_device), slots):
            positions = torch.arange(len(piece), device=piece.device)[None]
            best, gap = {}, {}
            for name, model in models.items():
                logits = model.forward(piece[None], positions)[0, :-1].float()
                if name in loss:
                    each = torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum")
                    loss[name] += float(each)
                top = logits.topk(2).values
                best[name], gap[name] = logits.argmax(-1), top[:, 0] - top[:, 1]
            count += len(piece) - 1
            same = best["unquantized"] == best["quantized"]
            hits["agreement"] += int(same.sum())
            hits["near ties"] += int((~same & (gap["unquantized"] < NEAR_TIE)).sum())
            for name in ("unquantized", "quantized") if draft is not None else ():
                hits[name] += int((best["draft"] == best[name]).sum())
            bar.update(len(piece))
    held = {"target": models["quantized"], "draft": models.get("draft")}
    return {
        "tokens": count,
        "perplexity": {name: math.exp(total / count) for name, total in loss.items()},
        "agreement": hits["agreement"] / count,
        "near_ties": hits["near ties"] / max(count - hits["agreement"], 1),
        "acceptance": None
        if draft is None
        else {name: hits[name] / count for name in ("unquantized", "quantized")},
        "models": {role: facts(m.model, m.cache) for role, m in held.items() if m is not None},
        "device": device.describe(),
    }


def _windows(ids: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yields windows of `size` tokens; the last one is shorter, a single token left out."""
    return (piece for piece in ids.split(size) if len(piece) > 1)


def _read(path: str | None) -> str:
    if path is None:
        return importlib.resources.files(f"{__package__}.quant").joinpath("sample.txt").read_text()
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {getattr(error, 'strerror', error)}") from error


def _print(values: dict[str, Any]) -> None:
    shown = {f"Perplexity, {name}": f"{x:.3f}" for name, x in values["perplexity"].items()}
    shown["Agreement with the unquantized"] = f"{values['agreement']:.2%}"
    shown["Of the disagreements, near-ties"] = f"{values['near_ties']:.2%}"
    for name, share in (values["acceptance"] or {}).items():
        shown[f"Draft's acceptance, {name}"] = f"{share:.2%}"
    print(f"{values['tokens']} tokens, {values['device']}")
    print(*(f"{name:35} = {value}" for name, value in shown.items()), sep="\n")
    for role, held in values["models"].items():
        print(*lines(role, held), sep="\n")
