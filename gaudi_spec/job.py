"""The batches of `run_generation`, its engines, and the loop that times them side by side."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
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
from .profiling import traced
from .prompts import Batch, Work
from .sampling.options import Sampling
from .stopping import Steps
from .streaming import TextDecoder

# Flags that go to the generation options as they are.
_FLAGS = """do_sample temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size num_return_sequences""".split()


class Job:
    """The batches, their engines, and the timed loop.

    Args:
        args: As parsed by `flags.parser`.
        pair: The loaded models.
        config: Settings.
        device: Where the models are.
        work: What to run.

    Attributes:
        batch: What ran last.
        prompts: Its prompts, `[length]` int64 each.
        agreed: Whether every text so far was the baseline's, token for token.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        pair: Pair,
        config: SpecConfig,
        device: Device,
        work: Work,
    ) -> None:
        self.args, self.pair, self.device, self.work = args, pair, device, work
        options = self._options()
        self.criteria, self.several = options.criteria, options.num_return_sequences
        self.use(work.timed[0])
        self.eos = () if args.ignore_eos else options.eos_token_ids
        self.sampling = options.sampling
        config = options.drafting.apply(config, pair.draft is not None)
        self.engine = SpeculativeEngine(pair.target, pair.draft, config, device)
        self.plain = None
        if args.compare_baseline:
            self.plain = SpeculativeEngine(pair.target, None, config.without_draft(), device)
        self.plain_outputs: list[torch.Tensor] = []
        self.agreed = True
        self.warmup_seconds = 0.0

    def use(self, batch: Batch) -> None:
        """Makes `batch` the one that runs next."""
        self.batch = batch
        self.prompts = [prompt for prompt in self._encode() for _ in range(self.several)]

    def run(
        self, done: Callable[[list[torch.Tensor]], None] | None = None
    ) -> tuple[results.Run, results.Run | None, list[torch.Tensor]]:
        """Warms up, then runs engine and baseline alternately; returns timings and token ids.

        Args:
            done: Called with the token ids of each timed batch.
        """
        args, (warm_up, timed) = self.args, self.work
        rows = max(len(batch.sentences) for batch in timed) * self.several
        whole = bool(args.dataset_name)
        run = results.Run(rows * args.max_new_tokens, whole)
        baseline = results.Run(run.requested, whole) if self.plain else None
        self._warm_up(rows, warm_up)
        with self._bar("generate", timed, self.plain is not None) as bar, traced(args) as step:
            for i, batch in enumerate(timed):
                trace = None if args.profile_whole_sequences else step
                outputs = self._timed(self.engine, batch, run, bar, args.stream and i == 0, trace)
                if baseline is not None:
                    self.plain_outputs = self._timed(self.plain, batch, baseline, bar)
                    self.agreed = self.agreed and self._equal(outputs)
                if args.profile_whole_sequences:
                    step()
                if done is not None:
                    done(outputs)
        return run, baseline, outputs

    def _warm_up(self, rows: int, batches: list[Batch]) -> None:
        """Builds all graphs for `rows` rows, then runs `batches` untimed."""
        begin = time.perf_counter()
        engines = [engine for engine in (self.engine, self.plain) if engine is not None]
        capturing = [e for e in engines if e.config.captures(self.device.captures)]
        longest = 0
        distinct = {(id(batch.sentences), batch.length): batch for batch in self.work.timed}
        for batch in distinct.values() if capturing else ():
            self.use(batch)
            longest = max(longest, *map(len, self.prompts))
        for engine in capturing:
            room = longest + self.args.max_new_tokens
            engine.warm_up(rows, room, self.args.quiet, self.sampling)
        with self._bar("warm-up", batches, self.plain is not None) as bar:
            for batch in batches:
                self.use(batch)
                for engine in engines:
                    self._once(engine, bar)
        self.warmup_seconds = time.perf_counter() - begin

    @property
    def reproducible(self) -> bool:
        """Whether plain decoding must give the same text."""
        return not self.sampling.do_sample or self.engine.config.verification == "coupled"

    @property
    def plainly_greedy(self) -> bool:
        """Whether the text is that of the largest logits, unprocessed."""
        return self.sampling == Sampling(seed=self.sampling.seed)

    @property
    def graphs(self) -> int:
        """Graphs that were built, by the device's own count where it has one."""
        recipes, facts = self.device.recipes(), self.engine.report.graphs
        if recipes is not None:
            return recipes
        captured = self.engine.config.captures(self.device.captures)
        return facts.warmup + facts.after_warmup if captured else 0

    def _equal(self, outputs: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(outputs, self.plain_outputs))

    def _timed(
        self, engine, batch: Batch, run: results.Run, bar, show: bool = False, trace=None
    ) -> list[torch.Tensor]:
        begin = time.perf_counter()
        self.use(batch)
        outputs = self._once(engine, bar, show, trace)
        self.pair.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        run.seconds.append(time.perf_counter() - begin)
        run.reports.append(engine.report)
        return outputs

    def _once(
        self, engine: SpeculativeEngine, bar, show: bool = False, trace=None
    ) -> list[torch.Tensor]:
        rows: list[list[int]] = [[] for _ in self.prompts]
        cycles = 0
        decoder = TextDecoder(self.pair.tokenizer, skip_special_tokens=True) if show else None
        seed = self.args.seed + self.batch.number
        for event in engine.stream(
            self.prompts,
            self.args.max_new_tokens,
            eos_token_ids=self.eos,
            sampling=dataclasses.replace(self.sampling, seed=seed),
            step=self._step(),
        ):
            rows[event.row].append(event.token)
            bar.update()
            if trace is not None and cycles != engine.report.cycles:
                cycles = engine.report.cycles
                trace()
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

    def _bar(self, name: str, batches: list[Batch], twice: bool) -> tqdm:
        quiet = self.args.quiet or self.args.stream or not batches
        rows = sum(len(batch.sentences) for batch in batches) * self.several
        total = rows * self.args.max_new_tokens * (1 + twice)
        return results.progress(quiet, desc=name, total=total, unit="tok")

    def _encode(self) -> list[torch.Tensor]:
        args, tokenizer = self.args, self.pair.tokenizer
        texts = self.batch.sentences
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
        if self.batch.length is not None:
            rows = [_stretch(row, self.batch.length) for row in rows]
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


def _stretch(row: list[int], length: int) -> list[int]:
    """Cuts `row` to `length` tokens, or repeats its last one."""
    return (row + row[-1:] * (length - len(row)))[:length]
