"""`run_generation`: Optimum Habana's text-generation program with a draft model that works.

Standard output carries results only, its last line one JSON object; progress goes to standard
error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from . import checker, results
from .config import SpecConfig
from .device import get_device, keep_compiled
from .drafters.registry import pick
from .drafting import Drafting
from .errors import ConfigError, InputError
from .flags import DEFAULT_PROMPTS, parser
from .job import Job
from .loading import Pair, Source, load_pair
from .models.support import check_supported
from .perf_config import PerfConfig
from .sampling.options import Sampling


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code. Errors are raised for `cli.main` to print."""
    args, config = _parse(argv)
    config = _check(args, config)
    torch.manual_seed(args.seed)
    if args.compile_cache:
        keep_compiled(args.compile_cache)
    device = get_device(args.device)
    sentences = _sentences(args)
    if args.stream and len(sentences) * args.num_return_sequences > 1:
        raise ConfigError(
            "--stream shows one text: give one prompt, and --num_return_sequences 1, or leave it "
            "out."
        )
    pair = _load(args, device)
    job = Job(args, pair, config, device, sentences)
    run, baseline, outputs = job.run()
    flat = pair.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    each = args.num_return_sequences
    texts = [flat[i : i + each] for i in range(0, len(flat), each)]
    values = results.results(run, baseline, sentences, texts, device)
    values["warmup_iterations"] = args.warmup
    comparable = baseline is not None and job.reproducible
    values["texts_equal_baseline"] = job.equal(outputs) if comparable else None
    if args.output_dir:  # before anything is printed: a closed pipe must not lose it
        results.write_json(Path(args.output_dir) / "results.json", values)
    _print(args, job, run, baseline, outputs, texts, sentences)
    print(json.dumps(values, ensure_ascii=False))
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, SpecConfig]:
    """Returns the arguments, those of a `--config` file before the given ones, and its settings."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    path = first.parse_known_args(argv)[0].config
    if path is None:
        return parser().parse_args(argv), SpecConfig()
    file = PerfConfig.read(path)
    defaults = vars(parser().parse_args(["--model_name_or_path="]))
    args = parser().parse_args([*file.arguments(defaults), *argv])
    file.check_runnable(args.device)
    return args, file.settings


def _check(args: argparse.Namespace, config: SpecConfig) -> SpecConfig:
    """Checks everything that can be checked before a model is loaded; returns the settings."""
    if not -(1 << 63) <= args.seed < 1 << 63:
        raise ConfigError(f"--seed must be a whole number of 64 bits, not {args.seed}.")
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
    drafting = Drafting(
        args.num_assistant_tokens,
        args.num_assistant_tokens_schedule,
        args.assistant_confidence_threshold,
        args.prompt_lookup_num_tokens,
        args.max_matching_ngram_size,
    )
    config = drafting.apply(config, bool(args.assistant_model))
    drafter = pick(config.drafter, bool(args.assistant_model))
    if args.max_matching_ngram_size is not None and config.drafter in ("auto", "model"):
        raise ConfigError(
            "--max_matching_ngram_size is for prompt lookup: add --prompt_lookup_num_tokens."
        )
    _check_choice(args)
    _tell_idle(args, drafter is not None)
    if args.verifier is not None:
        config = config.replace(verifier=args.verifier)
    if args.torch_compile:
        config = config.replace(compile="graph")
    if args.bucket_size > 0:
        config = config.replace(bucket_size=args.bucket_size)
    if args.allow_untested_models:
        config = config.replace(allow_untested_models=True)
    return config


def _check_choice(args: argparse.Namespace) -> None:
    """Checks the flags that say how tokens are chosen, and where a text ends."""
    names = "temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size".split()
    Sampling(**{name: getattr(args, name) for name in names})
    for name in ("stop", "bad_words"):
        texts = getattr(args, name)
        if texts is not None and not (texts and all(texts)):
            raise InputError(f"--{name} needs texts that are not empty.")
    if args.num_return_sequences > 1 and not args.do_sample:
        raise ConfigError(
            f"--num_return_sequences {args.num_return_sequences} needs --do_sample: greedy "
            "decoding has one text."
        )


def _tell_idle(args: argparse.Namespace, drafts: bool) -> None:
    """Names the flags that have no effect as things are, as Transformers does."""
    needs = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "verifier"), "--do_sample")
    needs = {} if args.do_sample else needs
    if not drafts:
        names = ["num_assistant_tokens", "num_assistant_tokens_schedule"]
        names += ["assistant_confidence_threshold"]
        needs |= dict.fromkeys(names, "--assistant_model")
    for name, other in needs.items():
        if getattr(args, name) is not None:
            print(f"--{name} has no effect without {other}.", file=sys.stderr)


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
    report, settings = run.reports[-1], job.engine.config
    drafter = f"drafter {report.drafter or 'none'}"
    if report.schedule is not None:
        varied = report.schedule != "constant"
        drafter += f", K up to {settings.most_drafts} ({report.schedule})" if varied else ""
        drafter += "" if varied else f", K={settings.most_drafts}"
    print(f"{sizes}, {drafter}, {device.describe()}")
    print("\nInput/outputs:")
    for i, (sentence, text) in enumerate(zip(sentences, texts), 1):
        print(f"input {i}: {(sentence,)}")
        for j, part in enumerate(text, 1):
            print(f"output {i}.{j}: {(part,)}")
        print()
    if not args.warmup:
        print("There was no warm-up (--warmup 0): the first iteration is slower and is counted.")
    print(results.stats_block(run, device, job.warmup_seconds))
    print(results.speculation_block(run, baseline))
    if baseline is not None:
        for i, (prompt, ours, other) in enumerate(zip(job.prompts, outputs, job.plain_outputs), 1):
            print(f"{f'Text {i} against plain decoding':35} = {_verdict(job, prompt, ours, other)}")
    print()


def _verdict(job: Job, prompt: torch.Tensor, ours: torch.Tensor, other: torch.Tensor) -> str:
    if not job.reproducible:
        return "another draw (--verifier coupled would give the same text)"
    if job.plainly_greedy:
        return checker.explain(job.pair.target, prompt, ours, other)
    return "identical" if torch.equal(ours, other) else "different"


def _millions(model: Any) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
