"""What is timed side by side: our engine, Transformers' `generate`, llama.cpp."""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine import SpeculativeEngine
from ..loading import Pair
from ..request import Request
from ..sampling.options import Sampling
from ..schedule import Constant
from .figures import Sample

Prompts = list[list[int]]


@dataclass(frozen=True)
class Call:
    """What every contender is asked for.

    Attributes:
        new_tokens: Budget of each row.
        ends: Ids that end a text; none: it goes on to its budget.
        sampling: How tokens are chosen: what Transformers makes of the models' own settings and
            of what it is told, which is `asked`.
        asked: Options of `generate`.
    """

    new_tokens: int
    ends: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    asked: dict[str, Any] = field(default_factory=dict)


class Contender:
    """One way to decode.

    Attributes:
        name: In the results.
        k: Draft tokens of a cycle; 0 decodes plainly, None: it varies.
    """

    name: str
    k: int | None = 0

    def build(self, batch: int, length: int, call: Call, quiet: bool) -> None:
        """Makes everything ready for rows of up to `length` tokens; most need nothing."""

    def run(self, prompts: Prompts, call: Call) -> list[Sample]:
        """Decodes a batch; one sample, or one for each row where rows run one after another."""
        raise NotImplementedError


class Ours(Contender):
    """The engine with one K. Several K share an engine, and K = 0 is plain static decoding.

    Args:
        engine: Its `num_assistant_tokens` is the largest K that it is used with.
        k: K; None leaves it to the engine's settings.
        name: In the results.
        fused: False runs drafting and verification apart, to time them.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        k: int | None,
        name: str,
        fused: bool = True,
    ) -> None:
        self.engine, self.k, self.name = engine, k, name
        self._schedule = None if k is None else Constant(k)
        self._fused = fused

    def build(self, batch: int, length: int, call: Call, quiet: bool) -> None:
        """Builds every graph that `run` needs for rows of up to `length` tokens."""
        engine = self.engine
        if not engine.config.captures(engine.device.captures):
            return
        if engine.runtime is None:
            engine.warm_up(batch, length, quiet, call.sampling)
        assert engine.runtime is not None
        with self._mode():
            like = Request([], [], 0, list(call.ends), call.sampling)
            engine.runtime.warm_up(set() if self.k is None else {self.k}, quiet, like)

    def run(self, prompts: Prompts, call: Call) -> list[Sample]:
        """Decodes; all tokens of a cycle arrive together."""
        with self._mode():
            return [self._run(prompts, call)]

    @contextmanager
    def _mode(self) -> Iterator[None]:
        runtime = self.engine.runtime
        if runtime is None or self._fused:
            yield
            return
        fused, runtime.parts.fused = runtime.parts.fused, False
        try:
            yield
        finally:
            runtime.parts.fused = fused

    def _run(self, prompts: Prompts, call: Call) -> Sample:
        engine = self.engine
        tokens: Prompts = [[] for _ in prompts]
        arrivals: list[list[float]] = [[] for _ in prompts]
        cycles, now, before, phases = 0, 0.0, 0, {}
        begin = time.perf_counter()
        for event in engine.stream(
            prompts,
            call.new_tokens,
            eos_token_ids=call.ends,
            sampling=call.sampling,
            schedule=self._schedule,
        ):
            if engine.report.cycles != cycles:
                now, cycles = time.perf_counter() - begin, engine.report.cycles
                if not before:
                    before, phases = cycles, dict(engine.report.seconds)
            tokens[event.row].append(event.token)
            arrivals[event.row].append(now)
        seconds = time.perf_counter() - begin
        report = engine.report
        spent = {name: value - phases[name] for name, value in report.seconds.items()}
        return Sample(seconds, arrivals, tokens, report.cycles - before, spent, report)


class Transformers(Contender):
    """Transformers' own `generate`, as it comes, on the same models.

    Args:
        pair: Target and draft.
        k: Draft tokens of assisted generation, which takes one row: rows run one after another.
            0 is plain `generate`.
        lookup: Assist by prompt lookup, without the draft.
    """

    def __init__(self, pair: Pair, k: int = 0, lookup: bool = False) -> None:
        self.pair, self.k, self._lookup = pair, k, lookup
        self.name = "transformers assisted" if k else "transformers"

    def run(self, prompts: Prompts, call: Call) -> list[Sample]:
        """Decodes; tokens arrive when a streamer is given them."""
        if not self.k:
            return [self._run(prompts, call, {})]
        if self._lookup:
            how: dict[str, Any] = {"prompt_lookup_num_tokens": self.k}
            if not call.ends:
                how["eos_token_id"] = [-1]  # without an end Transformers 4.55 fails
            return [self._run([p], call, how) for p in prompts]
        with _draft_length(self.pair.draft, self.k):
            return [self._run([p], call, {"assistant_model": self.pair.draft}) for p in prompts]

    def _run(self, prompts: Prompts, call: Call, how: dict[str, Any]) -> Sample:
        width, device = max(map(len, prompts)), self.pair.target.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        stamps = _Stamps()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begin = stamps.begin = time.perf_counter()
            self.pair.target.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=call.new_tokens,
                pad_token_id=0,
                streamer=stamps,
                **{
                    "do_sample": False,
                    "eos_token_id": list(call.ends) or None,
                    **call.asked,
                    **how,
                },
            )
            seconds = time.perf_counter() - begin
        return stamps.sample(len(prompts), seconds, call.ends, counted=not self.k)


class _Stamps:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.begin = 0.0
        self._puts: list[tuple[float, torch.Tensor]] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then each step's tokens: `[B]`, or `[1, N]` from assisted."""
        if not self._prompt:
            self._puts.append((time.perf_counter() - self.begin, value))
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""

    def sample(self, rows: int, seconds: float, ends: tuple[int, ...], counted: bool) -> Sample:
        """Returns what arrived, each row up to its end of text."""
        arrivals: list[list[float]] = [[] for _ in range(rows)]
        tokens: Prompts = [[] for _ in range(rows)]
        for now, value in self._puts:
            for row, some in enumerate(value.reshape(rows, -1).tolist()):
                for token in some:
                    if not tokens[row] or tokens[row][-1] not in ends:
                        tokens[row].append(token)
                        arrivals[row].append(now)
        return Sample(seconds, arrivals, tokens, len(self._puts) - 1 if counted else None)


@contextmanager
def _draft_length(draft: Any, k: int) -> Iterator[None]:
    """Sets K for assisted generation, which reads it from the draft."""
    own = draft.generation_config
    before = own.num_assistant_tokens, own.num_assistant_tokens_schedule
    own.num_assistant_tokens, own.num_assistant_tokens_schedule = k, "constant"
    try:
        yield
    finally:
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = before


class LlamaCpp(Contender):
    """llama.cpp through llama-cpp-python on a GGUF file of the target, one row after another.

    Args:
        path: The GGUF file.
        slots: Context to allocate.
    """

    name = "llama.cpp"

    def __init__(self, path: str, slots: int) -> None:
        llama = importlib.import_module("llama_cpp")
        self._model = llama.Llama(
            model_path=path, n_ctx=slots, n_threads=torch.get_num_threads(), verbose=False
        )

    @staticmethod
    def missing(path: str | None) -> str | None:
        """Returns why it cannot run, or None."""
        if importlib.util.find_spec("llama_cpp") is None:
            return "llama.cpp is left out: the package llama-cpp-python is not installed."
        if path is None:
            return "llama.cpp is left out: --gguf names no GGUF file of the target."
        return None

    def run(self, prompts: Prompts, call: Call) -> list[Sample]:
        """Decodes; tokens arrive one by one."""
        return [self._run(prompt, call) for prompt in prompts]

    def _run(self, prompt: list[int], call: Call) -> Sample:
        chosen = call.sampling
        how = {"temp": chosen.temperature if chosen.do_sample else 0.0, "top_k": chosen.top_k}
        how |= {"top_p": chosen.top_p, "min_p": chosen.min_p or 0.0}
        tokens: list[int] = []
        arrivals: list[float] = []
        self._model.reset()  # or what the prompt shares with the last one is not read again
        begin = time.perf_counter()
        for token in self._model.generate(prompt, **how):
            tokens.append(int(token))
            arrivals.append(time.perf_counter() - begin)
            if len(tokens) == call.new_tokens or token in call.ends:
                break
        return Sample(time.perf_counter() - begin, [arrivals], [tokens])
