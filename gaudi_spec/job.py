"""One batch of `run_generation`, its engines, and the loop that times them side by side."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from tqdm import tqdm

from . import results
from .config import SpecConfig
from .device import Device
from .engine import SpeculativeEngine
from .errors import ConfigError
from .loading import Pair
from .options import Options, resolve_options
from .sampling.options import Sampling
from .stopping import Steps
from .streaming import TextDecoder

# Flags that go to the generation options as they are.
_FLAGS = """do_sample temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size num_return_sequences""".split()


class Job:
    """The batch, its engines, and the timed loop.

    Args:
        args: As parsed by `flags.parser`.
        pair: The loaded models.
        config: Settings.
        device: Where the models are.
        sentences: One prompt a row.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        pair: Pair,
        config: SpecConfig,
        device: Device,
        sentences: list[str],
    ) -> None:
        self.args, self.pair, self.device, self.sentences = args, pair, device, sentences
        self.prompts = self._encode()
        options = self._options()
        self.criteria = options.criteria
        self.prompts = [p for p in self.prompts for _ in range(options.num_return_sequences)]
        self.eos = () if args.ignore_eos else options.eos_token_ids
        self.sampling = options.sampling
        config = options.drafting.apply(config, pair.draft is not None)
        self.engine = SpeculativeEngine(pair.target, pair.draft, config, device)
        self.plain = None
        if args.compare_baseline:
            self.plain = SpeculativeEngine(
                pair.target, None, config.replace(drafter="auto"), device
            )
        self.plain_outputs: list[torch.Tensor] = []
        self.warmup_seconds = 0.0

    def run(self) -> tuple[results.Run, results.Run | None, list[torch.Tensor]]:
        """Warms up, then runs engine and baseline alternately; returns timings and token ids."""
        args = self.args
        requested = len(self.prompts) * args.max_new_tokens
        run = results.Run(requested)
        baseline = results.Run(requested) if self.plain else None
        begin = time.perf_counter()
        longest = max(map(len, self.prompts)) + args.max_new_tokens
        for engine in (self.engine, self.plain):
            if engine is not None and engine.config.captures(self.device.captures):
                engine.warm_up(len(self.prompts), longest, args.quiet, self.sampling)
        with self._bar("warm-up", args.warmup * (2 if self.plain else 1)) as bar:
            for _ in range(args.warmup):
                self._once(self.engine, bar)
                if self.plain:
                    self._once(self.plain, bar)
        self.warmup_seconds = time.perf_counter() - begin
        with self._bar("generate", args.n_iterations * (2 if baseline else 1)) as bar:
            for i in range(args.n_iterations):
                outputs = self._timed(self.engine, run, bar, show=args.stream and i == 0)
                if baseline is not None:
                    self.plain_outputs = self._timed(self.plain, baseline, bar)
        return run, baseline, outputs

    @property
    def reproducible(self) -> bool:
        """Whether plain decoding must give the same text."""
        return not self.sampling.do_sample or self.engine.config.verification == "coupled"

    @property
    def plainly_greedy(self) -> bool:
        """Whether the text is that of the largest logits, unprocessed."""
        return self.sampling == Sampling(seed=self.sampling.seed)

    def equal(self, outputs: list[torch.Tensor]) -> bool:
        """Returns whether every row is the baseline's, token for token."""
        return all(torch.equal(a, b) for a, b in zip(outputs, self.plain_outputs))

    def _timed(self, engine, run: results.Run, bar, show: bool = False) -> list[torch.Tensor]:
        begin = time.perf_counter()
        self._encode()
        outputs = self._once(engine, bar, show)
        self.pair.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        run.seconds.append(time.perf_counter() - begin)
        run.reports.append(engine.report)
        return outputs

    def _once(self, engine: SpeculativeEngine, bar, show: bool = False) -> list[torch.Tensor]:
        rows: list[list[int]] = [[] for _ in self.prompts]
        decoder = TextDecoder(self.pair.tokenizer, skip_special_tokens=True) if show else None
        for event in engine.stream(
            self.prompts,
            self.args.max_new_tokens,
            eos_token_ids=self.eos,
            sampling=self.sampling,
            step=self._step(),
        ):
            rows[event.row].append(event.token)
            bar.update()
            if decoder is not None:
                print(decoder.add(event.token), end="", flush=True)
        if decoder is not None:
            print(decoder.flush())
        return [torch.tensor(row) for row in rows]

    def _step(self) -> Steps | None:
        """Returns what looks for stop strings, if there are any."""
        if not self.criteria:
            return None
        width = max(map(len, self.prompts))
        pad = self.pair.tokenizer.pad_token_id or 0
        ids = torch.full((len(self.prompts), width), pad)
        for row, prompt in zip(ids, self.prompts):
            row[width - len(prompt) :] = prompt
        return Steps(ids, pad, self.criteria)

    def _bar(self, name: str, runs: int) -> tqdm:
        quiet = self.args.quiet or self.args.stream
        total = runs * len(self.prompts) * self.args.max_new_tokens
        return results.progress(quiet, desc=name, total=total, unit="tok")

    def _encode(self) -> list[torch.Tensor]:
        args, tokenizer = self.args, self.pair.tokenizer
        texts = self.sentences
        if args.use_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer of {args.model_name_or_path} has no chat template: leave out "
                "--use_chat_template."
            )
        if args.use_chat_template:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        cut = {"truncation": True, "max_length": args.max_input_tokens}
        rows = tokenizer(
            list(texts),
            add_special_tokens=not args.use_chat_template,  # a template brings its own
            **(cut if args.max_input_tokens > 0 else {}),
        )["input_ids"]
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def _options(self) -> Options:
        """Reads the checkpoint's own generation settings; flags win, and decide about drawing."""
        args = self.args
        wanted: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
        wanted["stop_strings"] = args.stop
        for name in _FLAGS:
            if getattr(args, name) is not None:
                wanted[name] = getattr(args, name)
        if args.bad_words:
            encode = self.pair.tokenizer.encode
            words = [encode(word, add_special_tokens=False) for word in args.bad_words]
            wanted["bad_words_ids"] = words
        return resolve_options(
            self.pair.target, self.pair.draft, 0, None, wanted, tokenizer=self.pair.tokenizer
        )
