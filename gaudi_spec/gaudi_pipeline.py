"""Optimum Habana's text-generation pipeline, with a draft model, and the program around it."""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, TextGenerationPipeline

from . import habana_flags, hf, prompts
from .config import SpecConfig
from .device import Device
from .flags import parser as base_parser
from .loading import Pair
from .metrics import total
from .models.gaudi import is_gaudi
from .options import unsupported
from .perf_config import parse
from .profiling import traced
from .run_generation import check, load, start

_WIDTH = 100  # tokens that prompts are padded to unless --max_input_tokens says otherwise
# Fields that `GaudiGenerationConfig` has besides: how its own models run, which does not matter
# here, and whether an end of text counts.
_THEIRS = """trim_logits static_shapes attn_softmax_bf16 limit_hpu_graphs clear_hpu_graphs_cache
    reuse_cache bucket_size bucket_internal reduce_recompile use_flash_attention
    flash_attention_recompute flash_attention_causal_mask flash_attention_fast_softmax
    use_flex_attention use_fused_rope valid_sequence_lengths attn_batch_split logits_bf16
    decode_attn_batch_split trust_remote_code ignore_eos""".split()


class GaudiTextGenerationPipeline(TextGenerationPipeline):
    """Takes one prompt, or a list of them, and returns each with its continuation.

    Every prompt is padded, or cut, to `max_input_tokens`, or 100 tokens.

    Args:
        args: As parsed by `run_generation`'s parser, or Optimum Habana's; of it count
            `max_input_tokens`, `ignore_eos`, `batch_size` and `warmup`, with `do_sample` also
            `temperature` and `top_p`, and `max_new_tokens` where `generation_config` has none.
        logger: Is told of the warm-up.
        model: The target, on its device.
        tokenizer: Its tokenizer, padding on the left.
        generation_config: How to generate, or None; it is not changed. Fields that only
            Optimum Habana's configs have count where the target is of its classes; `ignore_eos`
            is that of `args`.
        use_with_langchain: Return `{"generated_text": ...}` and stop at the end of a text.
        warmup_on_init: Run `args.warmup` batches at once.
        assistant_model: The draft, or None.
        spec_config: Settings of the engine, or None.
        device: A device or its name; None: the target's.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        logger: logging.Logger,
        model: Any,
        tokenizer: Any,
        generation_config: GenerationConfig | None,
        use_with_langchain: bool = False,
        warmup_on_init: bool = True,
        assistant_model: Any = None,
        spec_config: SpecConfig | None = None,
        device: str | Device | None = None,
    ) -> None:
        # Like the original, not the parent's: nothing of what it prepares is used.
        self.task, self.device = "text-generation", model.device
        self.model, self.tokenizer, self.assistant_model = model, tokenizer, assistant_model
        without = ("ignore_eos",) if is_gaudi(model) else _THEIRS
        self.generation_config = _own(generation_config or model.generation_config, without)
        if self.generation_config.max_new_tokens is None:
            self.generation_config.max_new_tokens = args.max_new_tokens
        if args.do_sample:
            for name in ("temperature", "top_p"):
                if getattr(args, name) is not None:
                    setattr(self.generation_config, name, getattr(args, name))
        self.max_padding_length = args.max_input_tokens if args.max_input_tokens > 0 else _WIDTH
        self.use_with_langchain = use_with_langchain
        self._ends = {} if use_with_langchain or not args.ignore_eos else {"eos_token_id": None}
        self._spec_config, self._engine_device = spec_config, device
        if warmup_on_init:
            logger.info("Graph compilation...")
            for _ in range(args.warmup):
                self(["Here is a prompt"] * (args.batch_size or 1))

    def __call__(self, prompt: str | list[str], **kwargs: Any) -> Any:  # type: ignore[override]
        """Returns the text of a prompt, or the list of those of a list.

        Raises:
            UnsupportedOptionError: Any argument besides; set them in `generation_config`.
        """
        for name, value in kwargs.items():
            raise unsupported(name, value, "set it in the generation config of the pipeline")
        inputs = self.tokenizer(
            prompt if isinstance(prompt, list) else [prompt],
            return_tensors="pt",
            padding="max_length",
            max_length=self.max_padding_length,
            truncation=True,
        )
        output = hf.generate(
            self.model,
            inputs["input_ids"].to(self.device),
            attention_mask=inputs["attention_mask"].to(self.device),
            assistant_model=self.assistant_model,
            generation_config=self.generation_config,
            spec_config=self._spec_config,
            device=self._engine_device,
            **self._ends,
        )
        texts = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        if self.use_with_langchain:
            return [{"generated_text": text} for text in texts]
        return texts if isinstance(prompt, list) else texts[0]


def _own(config: GenerationConfig, without: Sequence[str]) -> GenerationConfig:
    """Returns a copy without some fields that only Optimum Habana's configs have."""
    own = GenerationConfig()
    own.__dict__.update(
        {name: copy.copy(value) for name, value in vars(config).items() if name not in without}
    )
    return own


# Flags that set the field of their name in the generation config.
_FIELDS = """max_new_tokens do_sample top_k min_p repetition_penalty no_repeat_ngram_size""".split()
_OTHERS = """prompt max_input_tokens n_iterations ignore_eos temperature top_p bad_words
    profiling_steps profiling_warmup_steps profiling_record_shapes
    profile_whole_sequences""".split()


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser, that of `run_generation` under another name."""
    p = base_parser()
    p.prog = "text_generation_pipeline.py"
    p.description = "Generate text through the pipeline; flags it has no use for are refused."
    return p


def main(argv: list[str]) -> int:
    """Runs the program, the drop-in for `run_pipeline.py`; returns the exit code."""
    p = parser()
    args = parse(p, argv)
    habana_flags.only(args, p, [*_FIELDS, *_OTHERS])
    config = check(args)
    sentences = prompts.work(args).timed[0].sentences
    args.batch_size = len(sentences)
    logging.basicConfig(level=logging.WARNING if args.quiet else logging.INFO)
    logger = logging.getLogger(__name__)
    device = start(args)
    pair = load(args, device, config)
    logger.info("Initializing text-generation pipeline...")
    wanted = _wanted(args, pair)
    pipe = GaudiTextGenerationPipeline(
        args,
        logger,
        pair.target,
        pair.tokenizer,
        wanted,
        assistant_model=pair.draft,
        spec_config=config,
        device=device,
    )
    seconds, reports = 0.0, []
    with traced(args) as step:
        for i in range(1, args.n_iterations + 1):
            logger.info("Running inference iteration %d...", i)
            begin = time.perf_counter()
            texts = pipe(sentences)
            seconds += time.perf_counter() - begin
            reports.append(hf.last_report())
            step()
            for row, (sentence, text) in enumerate(zip(sentences, texts), 1):
                print(f"Prompt[{i}][{row}]: {sentence}")
                print(f"Generated Text[{i}][{row}]: {text!r}\n")
    facts = total(reports)
    print(f"Inference Duration (for {args.n_iterations} iterations): {seconds} seconds")
    print(f"Throughput: {facts.emitted_tokens / seconds} tokens/second")
    print(f"Accepted: {facts.accepted} of {facts.proposed} drafted tokens")
    return 0


def _wanted(args: argparse.Namespace, pair: Pair) -> GenerationConfig:
    """Returns the checkpoint's generation config with the flags that were given."""
    wanted = copy.deepcopy(pair.target.generation_config)
    for name in _FIELDS:
        if getattr(args, name) is not None:
            setattr(wanted, name, getattr(args, name))
    if args.bad_words:
        encode = pair.tokenizer.encode
        wanted.bad_words_ids = [encode(word, add_special_tokens=False) for word in args.bad_words]
    return wanted
