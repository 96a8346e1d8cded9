"""The flags of `run_generation`, with Optimum Habana's names, defaults and meanings."""

from __future__ import annotations

import argparse
import os
from typing import Any

from . import habana_flags
from .config import DEVICES, KV_DTYPES, QUANT_SCHEMES, SCHEDULES, UNQUANTIZED
from .errors import ConfigError
from .helptext import HelpFormatter

# Optimum Habana's default sentences would be its own text; these are ours, to the same purpose.
DEFAULT_PROMPTS = (
    "The sea was calm on the morning we left, and",
    "To bake a loaf of bread you need flour, water, yeast and",
    "Speculative decoding makes a language model faster because",
    "Dear neighbour, I am writing to you about",
    "The three most important rules of chess are",
    "In the year 2050 the railways of Europe",
    "def fibonacci(n):",
    "Once upon a time there was a clockmaker who",
)


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser, so that other programs and the docs can read it."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec generate",
        description="Generate text with a target model and a draft model, on static shapes. Greedy "
        "text is the target's own, token for token; sampled text follows its distribution.",
        formatter_class=HelpFormatter,
    )
    model = p.add_argument_group("models")
    model.add_argument("--model_name_or_path", required=True, help="target: directory or hub name")
    model.add_argument(
        "--assistant_model", help="draft model; without it, and look-up, decoding is plain"
    )
    model.add_argument("--bf16", action="store_true", help="load both in bfloat16, not float32")
    model.add_argument("--model_revision", default="main", help="branch, tag or commit of the hub")
    model.add_argument("--token", help="access token for the hub")
    model.add_argument(
        "--trust_remote_code", action="store_true", help="run code that comes with a checkpoint"
    )
    model.add_argument(
        "--attn_implementation", choices=("sdpa", "eager"), help="default: the model's own choice"
    )
    model.add_argument(
        "--optimum_habana",
        action="store_true",
        help="load both as Optimum Habana's classes, with its kernels (needs optimum-habana and "
        "the device hpu or hpu-emulated); --attn_implementation is eager then",
    )
    model.add_argument(
        "--allow_tokenizer_mismatch",
        action="store_true",
        help="use a draft with another tokenizer (the text stays the target's own)",
    )
    model.add_argument(
        "--allow_untested_models",
        action="store_true",
        help="accept model families outside the tested list, after a self-check",
    )
    add_quantization(p.add_argument_group("quantization, for each model apart"))
    text = p.add_argument_group("generation")
    text.add_argument("--prompt", nargs="*", help="one or more prompts; default: built-in ones")
    text.add_argument(
        "--batch_size",
        type=int,
        help="rows; prompts are repeated or cut to it (default: 1, or the number of prompts given)",
    )
    text.add_argument("--max_new_tokens", type=int, default=100, help="new tokens for each prompt")
    text.add_argument(
        "--max_input_tokens",
        type=int,
        default=0,
        help="cut prompts to this many tokens (0 or less: use them whole)",
    )
    text.add_argument(
        "--num_assistant_tokens",
        type=int,
        help="K, draft tokens a cycle; with a schedule, the largest K (default: K is chosen from "
        "measured times and acceptance, up to 5)",
    )
    text.add_argument(
        "--num_assistant_tokens_schedule",
        choices=SCHEDULES,
        help="how K is chosen: auto, the fastest by measured times and acceptance, 0 being plain "
        "decoding (default); constant (default if --num_assistant_tokens is given); heuristic and "
        "heuristic_transient, Transformers' +2 or -1; confidence, by the draft's own probabilities",
    )
    text.add_argument(
        "--assistant_confidence_threshold",
        type=float,
        help="with the schedule confidence: the first token that the draft gives less probability "
        "is the last proposed (default: 0.4)",
    )
    text.add_argument(
        "--prompt_lookup_num_tokens",
        type=int,
        help="draft by looking up what followed the last tokens before, this many a cycle; with "
        "--assistant_model, which then drafts where nothing matches",
    )
    text.add_argument(
        "--max_matching_ngram_size", type=int, help="longest n-gram looked up (default: 2)"
    )
    text.add_argument(
        "--ignore_eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on after end of text, to the budget (Optimum Habana's default)",
    )
    text.add_argument(
        "--stop", nargs="*", metavar="TEXT", help="end a text as soon as it holds one of these"
    )
    text.add_argument(
        "--num_return_sequences", type=int, default=1, help="texts for each prompt, if sampled"
    )
    text.add_argument("--use_chat_template", action="store_true", help="as a chat message")
    text.add_argument(
        "--use_kv_cache", action="store_true", help="accepted; the cache is always on"
    )
    text.add_argument("--seed", type=int, default=27, help="seed of sampling")
    _add_sampling(p.add_argument_group("choice of tokens (else the checkpoint's values count)"))
    run = p.add_argument_group("run")
    run.add_argument(
        "--device", "-d", default="auto", choices=("auto", *DEVICES), help="where to run"
    )
    run.add_argument(
        "--torch_compile",
        action="store_true",
        help="capture graphs on cpu too, with torch.compile (hpu and cuda do by default)",
    )
    run.add_argument(
        "--compile_cache",
        metavar="DIR",
        help="keep compiled graphs there for the next start (default: $GAUDI_SPEC_CACHE/compiled "
        "on cpu and cuda, on hpu as PT_HPU_RECIPE_CACHE_CONFIG says)",
    )
    run.add_argument(
        "--use_hpu_graphs", action="store_true", help="accepted; graphs are the default on hpu"
    )
    run.add_argument(
        "--bucket_size",
        type=int,
        default=-1,
        help="smallest attention window in cache slots; it is doubled as the text grows "
        "(default: 256)",
    )
    run.add_argument("--warmup", type=int, default=3, help="untimed iterations before")
    run.add_argument("--n_iterations", type=int, default=5, help="timed iterations")
    run.add_argument("--output_dir", help="write results.json there")
    run.add_argument("--config", help="YAML file with settings and flags; flags given win")
    run.add_argument(
        "--compare_baseline",
        action="store_true",
        help="also time plain decoding, interleaved, and compare the text with it",
    )
    run.add_argument(
        "--stream", action="store_true", help="print the text as it comes (for one row)"
    )
    run.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    run.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    habana_flags.add(p)
    return p


def add_quantization(group: Any) -> None:
    """Adds the flags that `quantization` reads to a parser or a group of one."""
    for role in ("target", "draft"):
        group.add_argument(
            f"--{role}_quant",
            choices=QUANT_SCHEMES,
            help=f"weights of the {role} (default: auto, as the checkpoint has them)",
        )
        group.add_argument(
            f"--{role}_quant_exclude",
            nargs="+",
            metavar="PATTERN",
            help=f"layers of the {role} that keep theirs (default: {' '.join(UNQUANTIZED)})",
        )
        group.add_argument(
            f"--{role}_kv_dtype",
            choices=KV_DTYPES,
            help=f"what the {role}'s cache holds (default: auto, the model's dtype)",
        )
        variable = ", or the variable QUANT_CONFIG" if role == "target" else ""
        group.add_argument(
            f"--{role}_quant_config",
            metavar="JSON",
            default=os.environ.get("QUANT_CONFIG") if role == "target" else None,
            help=f"Neural Compressor's file that converts the {role}, from `gaudi-spec quantize`"
            + variable,
        )


def quant_configs(args: argparse.Namespace) -> dict[str, str]:
    """Returns Neural Compressor's files by role.

    Raises:
        ConfigError: One measures, stands beside another scheme, has no model, or is on a device
            that Neural Compressor does not run on.
    """
    from .quant import inc  # not for --help: it imports torch

    found = {}
    for role in ("target", "draft"):
        path, flag = getattr(args, f"{role}_quant_config"), f"--{role}_quant_config"
        if not path:
            continue
        if role == "draft" and not args.assistant_model:
            raise ConfigError(f"{flag} needs a draft model: add --assistant_model.")
        if getattr(args, f"{role}_quant") not in (None, "auto"):
            raise ConfigError(f"{flag} and --{role}_quant exclude each other: leave one out.")
        if args.device not in ("auto", "hpu", "cpu"):
            raise ConfigError(f"{flag} works on hpu and cpu, not on {args.device}.")
        if inc.mode_of(path, flag) == "MEASURE":
            raise ConfigError(f"{flag} {path} measures: use it with `gaudi-spec quantize measure`.")
        found[role] = path
    return found


def quantization(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `SpecConfig` that these flags set."""
    names = [
        f"{r}_{n}" for r in ("target", "draft") for n in ("quant", "quant_exclude", "kv_dtype")
    ]
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _add_sampling(group: Any) -> None:
    group.add_argument("--do_sample", action="store_true", help="draw tokens; default: greedy")
    group.add_argument("--temperature", type=float, help="of the draw (default: 1.0)")
    group.add_argument("--top_k", type=int, help="draw among the k best; 0: all (default: 50)")
    group.add_argument(
        "--top_p", type=float, help="draw among the best that hold this mass (default: 1.0, all)"
    )
    group.add_argument(
        "--min_p", type=float, help="draw among what has this share of the best (default: 0.0, all)"
    )
    group.add_argument(
        "--repetition_penalty", type=float, help="above 1: fewer repetitions (default: 1.0)"
    )
    group.add_argument("--no_repeat_ngram_size", type=int, help="no n-gram twice (default: 0, off)")
    group.add_argument(
        "--bad_words",
        nargs="+",
        help="texts that may not be generated; ' word' with its space is another than 'word'",
    )
    group.add_argument(
        "--verifier",
        choices=("rejection", "coupled"),
        help="how drawn tokens are verified: coupled gives the text of plain sampling with the "
        "same seed (default where K varies by itself); rejection accepts more drafts, but its text "
        "depends on K too (default with a fixed K)",
    )


if __name__ == "__main__":  # writes the tables of docs/run_generation.md
    print(habana_flags.page(parser()), end="")
