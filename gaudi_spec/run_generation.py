"""`run_generation`: Optimum Habana's text-generation program with a draft model that works.

Flags keep the names, defaults and meanings they have there. Standard output carries results only,
its last line one JSON object; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from . import checker, results, zoo
from .config import SpecConfig
from .device import DEVICES, get_device
from .drafters.registry import pick
from .errors import ConfigError, InputError
from .job import Job
from .loading import Pair, Source, load_pair
from .models.support import check_supported
from .options import with_drafts

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
        description="Generate text with a target model and a draft model, on static shapes. The "
        "text is the target's own, token for token.",
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
        "--allow_tokenizer_mismatch",
        action="store_true",
        help="use a draft with another tokenizer (the text stays the target's own)",
    )
    model.add_argument(
        "--allow_untested_models",
        action="store_true",
        help="accept model families outside the tested list, after a self-check",
    )
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
        "--num_assistant_tokens", type=int, help="K, draft tokens a cycle (default: 5)"
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
    text.add_argument("--seed", type=int, default=27, help="seed of PyTorch; greedy needs none")
    run = p.add_argument_group("run")
    run.add_argument("--device", default="auto", choices=("auto", *DEVICES))
    run.add_argument(
        "--torch_compile",
        action="store_true",
        help="capture graphs on cpu too, with torch.compile (hpu and cuda do by default)",
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
    run.add_argument("--config", help="YAML file with SpecConfig settings; flags win")
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
    return p


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code. Errors are raised for `cli.main` to print."""
    args = parser().parse_args(argv)
    config = _check(args)
    torch.manual_seed(args.seed)
    device = get_device(args.device)
    sentences = _sentences(args)
    if args.stream and len(sentences) * args.num_return_sequences > 1:
        raise ConfigError("--stream shows one text: give one prompt, or leave it out.")
    pair = _load(args, device)
    job = Job(args, pair, config, device, sentences)
    run, baseline, outputs = job.run()
    flat = pair.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    each = args.num_return_sequences
    texts = [flat[i : i + each] for i in range(0, len(flat), each)]
    values = results.results(run, baseline, sentences, texts, device)
    values["texts_equal_baseline"] = None if baseline is None else job.equal(outputs)
    if args.output_dir:  # before anything is printed: a closed pipe must not lose it
        results.write_json(Path(args.output_dir) / "results.json", values)
    _print(args, job, run, baseline, outputs, texts, sentences)
    print(json.dumps(values, ensure_ascii=False))
    return 0


def _check(args: argparse.Namespace) -> SpecConfig:
    """Checks everything that can be checked before a model is loaded."""
    for name, least in (
        ("max_new_tokens", 1),
        ("n_iterations", 1),
        ("num_return_sequences", 1),
        ("warmup", 0),
    ):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(args, name)}.")
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch_size must be at least 1, not {args.batch_size}.")
    for prompt in args.prompt or ():
        if not prompt:
            raise InputError("A prompt is empty: give at least one character.")
    if args.prompt is not None and not args.prompt:
        raise InputError("--prompt was given without any text.")
    if args.output_dir:
        results.check_output_dir(args.output_dir)
    config = SpecConfig.from_yaml(args.config) if args.config else SpecConfig()
    config = with_drafts(
        config,
        bool(args.assistant_model),
        args.num_assistant_tokens,
        args.prompt_lookup_num_tokens,
        args.max_matching_ngram_size,
    )
    pick(config.drafter, bool(args.assistant_model))
    if args.max_matching_ngram_size is not None and config.drafter in ("auto", "model"):
        raise ConfigError(
            "--max_matching_ngram_size is for prompt lookup: add --prompt_lookup_num_tokens."
        )
    if args.torch_compile:
        config = config.replace(compile="graph")
    if args.bucket_size > 0:
        config = config.replace(bucket_size=args.bucket_size)
    if args.allow_untested_models:
        config = config.replace(allow_untested_models=True)
    return config


def _sentences(args: argparse.Namespace) -> list[str]:
    """Returns the prompts, repeated or cut to the batch size as in Optimum Habana."""
    prompts = list(args.prompt or DEFAULT_PROMPTS)
    size = args.batch_size or (len(prompts) if args.prompt else 1)
    if args.prompt and size < len(prompts):
        print(
            f"Only the first {size} of {len(prompts)} prompts are used: --batch_size {size}.",
            file=sys.stderr,
        )
    return [prompts[i % len(prompts)] for i in range(size)]


def _load(args: argparse.Namespace, device) -> Pair:
    common = {
        "revision": args.model_revision,
        "token": args.token,
        "trust_remote_code": args.trust_remote_code,
    }
    target = Source(args.model_name_or_path, **common)
    draft = Source(args.assistant_model, **common) if args.assistant_model else None
    steps = 3 if draft else 2
    disable_progress_bar()  # Transformers' own, which would run through ours
    with results.progress(args.quiet, desc="load", total=steps) as bar:

        def step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        pair = load_pair(
            target,
            draft,
            torch.bfloat16 if args.bf16 else torch.float32,
            device,
            attn_implementation=args.attn_implementation,
            allow_tokenizer_mismatch=args.allow_tokenizer_mismatch,
            progress=step,
        )
    check_supported(pair.target, "target", args.allow_untested_models)
    return pair


def _print(args, job: Job, run, baseline, outputs, texts, sentences) -> None:
    device = job.device
    sizes = f"target {args.model_name_or_path} ({_millions(job.pair.target)})"
    if job.pair.draft is not None:
        sizes += f", draft {args.assistant_model} ({_millions(job.pair.draft)})"
    drafter = f"drafter {run.reports[-1].drafter or 'none'}"
    print(f"{sizes}, {drafter}, K={job.engine.config.num_assistant_tokens}, {device.describe()}")
    if zoo.note(args.assistant_model):
        print(zoo.note(args.assistant_model))
    print("\nInput/outputs:")
    for i, (sentence, text) in enumerate(zip(sentences, texts), 1):
        print(f"input {i}: {(sentence,)}")
        for j, part in enumerate(text, 1):
            print(f"output {i}.{j}: {(part,)}")
        print()
    print(results.stats_block(run, device, job.warmup_seconds))
    print(results.speculation_block(run, baseline))
    if baseline is not None:
        for i, (prompt, ours, other) in enumerate(zip(job.prompts, outputs, job.plain_outputs), 1):
            verdict = checker.explain(job.pair.target, prompt, ours, other)
            print(f"{f'Text {i} against plain decoding':35} = {verdict}")
    print()


def _millions(model: Any) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
