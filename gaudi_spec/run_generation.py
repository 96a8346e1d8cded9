"""`run_generation`: Optimum Habana's text-generation program with a draft model that works.

Standard output carries results only, its last line one JSON object; progress goes to standard
error.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from . import checker, habana_flags, prompts, results
from .config import SpecConfig, refuse_quant
from .device import Device, get_device, keep_compiled
from .drafters.registry import pick
from .drafting import Drafting
from .errors import ConfigError, InputError
from .flags import parser, quant_configs, quantization
from .habana import adapt_transformers
from .job import Job
from .loading import Pair, Source, load_pair
from .models.gaudi import is_gaudi
from .models.support import check_supported
from .perf_config import PerfConfig, parse
from .quant import apply, facts
from .sampling.options import Sampling


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code. Errors are raised for `cli.main` to print."""
    args = parse(parser(), argv)
    config = check(args)
    device = start(args)
    work = prompts.work(args)
    one = len(work.timed[0].sentences) * args.num_return_sequences == 1 and not args.dataset_name
    if args.stream and not one:
        raise ConfigError(
            "--stream shows one text: give one prompt, and --num_return_sequences 1, or leave it "
            "out."
        )
    pair = load(args, device, config)
    job = Job(args, pair, config, device, work)
    inputs: list[str] = []
    texts: list[list[str]] = []

    def show(outputs: list[torch.Tensor]) -> None:
        inputs.extend(job.batch.sentences)
        texts.extend(_texts(job, outputs))
        _print_batch(job, len(inputs), texts)

    run, baseline, outputs = job.run(show if args.dataset_name else None)
    if not args.dataset_name:
        inputs, texts = job.batch.sentences, _texts(job, outputs)
    values = results.results(run, baseline, inputs, texts, device)
    values["warmup_iterations"] = args.warmup
    comparable = baseline is not None and job.reproducible
    values["models"] = job.engine.facts()
    values["texts_equal_baseline"] = job.agreed if comparable else None
    if args.output_dir:  # before anything is printed: a closed pipe must not lose it
        results.write_json(Path(args.output_dir) / "results.json", values)
    _print(args, job, run, baseline, outputs, texts)
    print(json.dumps(values, ensure_ascii=False))
    return 0


def check(args: argparse.Namespace) -> SpecConfig:
    """Checks everything that can be checked before a model is loaded; returns the settings."""
    if not -(1 << 63) <= args.seed < 1 << 63:
        raise ConfigError(f"--seed must be a whole number of 64 bits, not {args.seed}.")
    for name, least in (
        ("max_new_tokens", 1),
        ("n_iterations", 1),
        ("num_return_sequences", 1),
        ("warmup", 0),
        ("profiling_steps", 0),
        ("profiling_warmup_steps", 0),
    ):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(args, name)}.")
    habana_flags.check(args)
    prompts.check(args)
    if args.output_dir:
        results.check_output_dir(args.output_dir)
    config = PerfConfig.read(args.config).settings if args.config else SpecConfig()
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
    if args.optimum_habana:
        options = dict.fromkeys((*config.forward_options, *habana_flags.switches(args)))
        config = config.replace(forward_options=tuple(options))
    quant_configs(args)
    config = config.replace(**quantization(args))
    if not args.assistant_model:
        refuse_quant(config.quant("draft"), "draft")
    return config


def _check_choice(args: argparse.Namespace) -> None:
    """Checks the flags that say how tokens are chosen, and where a text ends."""
    names = "temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size".split()
    values = {name: getattr(args, name) for name in names}
    if values["temperature"] == 0 and not args.do_sample:  # as in Optimum Habana's own commands
        values["temperature"] = None
    Sampling(**values)
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


def start(args: argparse.Namespace) -> Device:
    """Applies the flags that concern the whole process; returns the device."""
    torch.manual_seed(args.seed)
    if args.sdp_on_bf16:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    if args.compile_cache:
        keep_compiled(args.compile_cache)
    device = get_device(args.device)
    if args.optimum_habana:
        adapt_transformers()
    return device


def load(args: argparse.Namespace, device: Device, config: SpecConfig) -> Pair:
    """Loads the models that the flags name, quantized as `config` says."""
    common = {
        "revision": args.model_revision,
        "token": args.token,
        "trust_remote_code": args.trust_remote_code,
        "trust_remote_code_tokenizer": args.trust_remote_code_tokenizer,
    }
    target = Source(args.model_name_or_path, **common)
    draft = Source(args.assistant_model, **common) if args.assistant_model else None
    steps = 3 if draft else 2
    own = "eager" if args.optimum_habana else None
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
            attn_implementation=args.attn_implementation or own,
            allow_tokenizer_mismatch=args.allow_tokenizer_mismatch,
            quant_configs=quant_configs(args),
            progress=step,
        )
    check_supported(pair.target, "target", args.allow_untested_models)
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None and not is_gaudi(model):
            apply.replace(model, config.quant(role), role, device)
    known = inspect.signature(pair.target.forward).parameters
    for name in habana_flags.switches(args) if args.optimum_habana else ():
        if name not in known:
            print(f"--{name} has no effect on {type(pair.target).__name__}.", file=sys.stderr)
    return pair


def _texts(job: Job, outputs: list[torch.Tensor]) -> list[list[str]]:
    """Returns the texts of each prompt."""
    flat = job.pair.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return [flat[i : i + job.several] for i in range(0, len(flat), job.several)]


def _print_batch(job: Job, seen: int, texts: list[list[str]]) -> None:
    """Prints what `job` just did to a batch of a data set, of which `seen` prompts are done."""
    rows = len(job.batch.sentences)
    print("-" * 50)
    print(f"Batch n°{-(-seen // len(job.work.timed[0].sentences))}")
    print(f"Input: {job.batch.sentences}")
    print(f"Output: {[text for row in texts[-rows:] for text in row]}")
    print("-" * 50, flush=True)


def _print(args, job: Job, run, baseline, outputs, texts) -> None:
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
    if not run.whole:
        _print_texts(job.batch.sentences, texts)
    if not args.warmup:
        print("There was no warm-up (--warmup 0): the first iteration is slower and is counted.")
    graphs = job.graphs if args.show_graphs_count else None
    print(results.stats_block(run, device, job.warmup_seconds, graphs))
    print(results.speculation_block(run, baseline))
    for role, held in job.engine.facts().items():
        print(*facts.lines(role, held), sep="\n")
    if baseline is not None and not run.whole:
        for i, (prompt, ours, other) in enumerate(zip(job.prompts, outputs, job.plain_outputs), 1):
            print(f"{f'Text {i} against plain decoding':35} = {_verdict(job, prompt, ours, other)}")
    print()


def _print_texts(sentences: list[str], texts: list[list[str]]) -> None:
    print("\nInput/outputs:")
    for i, (sentence, text) in enumerate(zip(sentences, texts), 1):
        print(f"input {i}: {(sentence,)}")
        for j, part in enumerate(text, 1):
            print(f"output {i}.{j}: {(part,)}")
        print()


def _verdict(job: Job, prompt: torch.Tensor, ours: torch.Tensor, other: torch.Tensor) -> str:
    if not job.reproducible:
        return "another draw (--verifier coupled would give the same text)"
    if job.plainly_greedy:
        target = job.engine.runtime.target
        return checker.explain(target.model, prompt, ours, other, target.cache.form.coarse)
    return "identical" if torch.equal(ours, other) else "different"


def _millions(model: Any) -> str:
    weights = sum(part.weights for part in facts.parts(model) if part.scheme != "int32")
    return f"{weights / 1e6:.1f} M parameters"
