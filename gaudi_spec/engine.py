"""The engine: checks a request, prefills, then runs cycles and counts what they did.

Prefill only fills caches: it runs each model without its head over `prompt[:-1]`; the last prompt
token is the first cycle's `last`, so the first new tokens already come out of a cycle.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import cycle
from .buckets import round_up
from .config import MAX_ASSISTANT_TOKENS, SpecConfig
from .cycle import RowOutcome
from .device import Device, get_device
from .errors import ConfigError, InputError, NumericalError
from .metrics import Report
from .models.hf import self_check
from .models.support import TESTED_FAMILIES, check_supported, max_positions
from .runtime import Runtime
from .schedule import Constant, Schedule


class SpeculativeEngine:
    """Greedy speculative decoding of a ragged batch, exact to the target's own output.

    Args:
        target: A Transformers causal LM, on its device. It is not modified.
        draft: A smaller causal LM over the same tokenizer, on the same device; None decodes
            plainly through the same static path. May be the target itself.
        config: Settings; see `SpecConfig`.
        device: A device name or object; None takes the target's.

    Attributes:
        report: Counted facts of the last call.

    Raises:
        UnsupportedModelError: A model cannot be served; the message says why.
        ConfigError: Models on different devices.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        config: SpecConfig | None = None,
        device: str | torch.device | Device | None = None,
    ) -> None:
        self.config = config or SpecConfig()
        check_supported(target, "target", self.config.allow_untested_models)
        if draft is not None:
            check_supported(draft, "draft", self.config.allow_untested_models)
        self.device = get_device(target.device if device is None else device)
        for role, model in (("target", target), ("draft", draft)):
            if model is None:
                continue
            if model.device.type != self.device.torch_device.type:
                raise ConfigError(
                    f"The {role} is on {model.device}, the engine on {self.device.name}: move it "
                    f"with model.to({self.device.name!r}) first."
                )
            if model.config.model_type not in TESTED_FAMILIES:
                self_check(model)
        self._models = (target, draft)
        self._lock = threading.Lock()
        self._warned_room = False
        self.report = Report()
        self.runtime: Runtime | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | Sequence[int],
        *,
        eos_token_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        schedule: Schedule | None = None,
    ) -> list[torch.Tensor]:
        """Generates for every prompt until end of text or its budget.

        One call at a time: a second thread waits.

        Args:
            prompts: Token ids of each row, without padding; lengths may differ.
            max_new_tokens: Budget of new tokens, one for all rows or one for each.
            eos_token_ids: Ids that end a row; the end token itself is returned.
            min_new_tokens: New tokens before which no end token may be chosen.
            schedule: Picks K; None means `config.num_assistant_tokens` always.

        Returns:
            New tokens of each row, int64 on the CPU.

        Raises:
            InputError: An empty prompt, an id outside the vocabulary, a budget below 1, or a
                sequence that does not fit.
            NumericalError: The target's logits are NaN or infinite.
        """
        with self._lock:
            rows: list[list[int]] = [[] for _ in prompts]
            for outcome in self.stream(
                prompts,
                max_new_tokens,
                eos_token_ids=eos_token_ids,
                min_new_tokens=min_new_tokens,
                schedule=schedule,
            ):
                for row, facts in zip(rows, outcome):
                    row.extend(facts.tokens)
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def stream(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | Sequence[int],
        *,
        eos_token_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        schedule: Schedule | None = None,
    ) -> Iterator[list[RowOutcome]]:
        """Yields after every cycle what it did to each row; arguments as for `generate`."""
        begin = time.perf_counter()
        schedule = schedule or Constant(self.config.num_assistant_tokens)
        ids, budgets = self._admit(prompts, max_new_tokens, min_new_tokens, schedule)
        runtime = self.runtime
        spare = runtime.state.batch - len(ids)
        self.report = Report(emitted=[0] * len(ids), finish_reasons=["length"] * len(ids))
        runtime.state.reset(ids, budgets, min_new_tokens, list(dict.fromkeys(eos_token_ids)))
        runtime.reset()
        runtime.prefill(max(len(row) for row in ids) - 1)
        runtime.seconds["prefill"] += time.perf_counter() - begin
        lengths = [len(row) for row in ids] + [1] * spare
        limits = [n + b for n, b in zip(lengths, budgets)] + [1] * spare
        live = [length < limit for length, limit in zip(lengths, limits)]
        while any(live):
            k = self._usable(schedule.choose(self.report.cycles), lengths, limits, live)
            for outcome in self._cycles(k, lengths, limits, live):
                if not any(live):
                    break
                lengths = [length + row.n_emitted for length, row in zip(lengths, outcome)]
                if k:
                    runtime.drafter.committed(lengths, k)
                self.report.add_cycle(outcome)
                self._note(outcome, live, lengths, limits, begin)
                live = [not row.done for row in outcome]
                yield outcome[: len(ids)]

    def warm_up(self, batch: int, length: int, quiet: bool = False) -> None:
        """Builds every graph for `batch` rows of up to `length` tokens before the first token.

        Args:
            batch: B.
            length: Prompt and new tokens of a row.
            quiet: No progress bar on standard error.
        """
        with self._lock:
            self._build(batch, length, self.config.num_assistant_tokens)
            self.runtime.warm_up({self.config.num_assistant_tokens}, quiet)

    def _admit(self, prompts, max_new_tokens, min_new_tokens, schedule):
        """Checks a request, builds or grows the buffers, and returns its ids and budgets."""
        ids = [torch.as_tensor(prompt, dtype=torch.long).reshape(-1).cpu() for prompt in prompts]
        if not ids:
            raise InputError("No prompt was given: pass at least one row of token ids.")
        budgets = (
            [max_new_tokens] * len(ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        )
        if len(budgets) != len(ids):
            raise InputError(f"{len(budgets)} budgets were given for {len(ids)} prompts.")
        vocab = self._models[0].get_input_embeddings().weight.shape[0]
        limits = (self.config.max_length, max_positions(self._models[0].config))
        limit = min((x for x in limits if x is not None), default=None)
        for row, (prompt, budget) in enumerate(zip(ids, budgets)):
            _check_row(row, prompt, budget, min_new_tokens, vocab, limit)
        for k in schedule.sizes:
            if not 0 <= k <= MAX_ASSISTANT_TOKENS:
                raise ConfigError(
                    f"The schedule asks for K = {k}; K is 0 to {MAX_ASSISTANT_TOKENS}."
                )
        need = max(len(prompt) + budget for prompt, budget in zip(ids, budgets))
        self._build(len(ids), need, max(schedule.sizes))
        return ids, budgets

    def _build(self, batch: int, length: int, k: int) -> None:
        """Allocates caches and state for `batch` rows of `length` tokens, unless they suffice."""
        if self.runtime is not None:
            state = self.runtime.state
            wide = state.tokens.shape[1] - state.slots > k
            if batch <= state.batch and length <= state.slots and wide:
                return
            batch, length = max(batch, state.batch), max(length, state.slots)
        if self.config.batch_size is not None:
            if batch > self.config.batch_size:
                raise InputError(
                    f"{batch} prompts were given to an engine built for batch_size="
                    f"{self.config.batch_size}: raise batch_size or send fewer."
                )
            batch = self.config.batch_size
        target, draft = self._models
        slots = self.config.max_length or round_up(length, self.config.length_multiple)
        slots = min(slots, max_positions(target.config) or slots)
        widest = max(k, self.config.num_assistant_tokens)
        self.runtime = Runtime(target, draft, self.config, self.device, batch, slots, widest)

    def _usable(self, k: int, lengths: list[int], limits: list[int], live: list[bool]) -> int:
        """Returns k, or 0 where no live row can use a proposal."""
        drafter = self.runtime.drafter
        if drafter is None or k == 0:
            return 0
        rows = [r for r, alive in enumerate(live) if alive]
        outside = [r for r in rows if not drafter.has_room(lengths[r])]
        if outside and not self._warned_room:
            self._warned_room = True
            warnings.warn(
                f"A sequence of {lengths[outside[0]]} tokens is longer than the draft's maximum "
                "positions; it goes on without a draft, so it gets slower but not different.",
                stacklevel=5,
            )
        usable = any(r not in outside and limits[r] - lengths[r] > 1 for r in rows)
        return k if usable else 0

    def _cycles(self, k, lengths, limits, live) -> list[list[RowOutcome]]:
        """Runs cycles until the host reads: one, or up to `sync_every` of the same K."""
        left = max(limit - n for limit, n, alive in zip(limits, lengths, live) if alive)
        count = max(1, min(self.config.sync_every, left // (k + 1)))
        packed = []
        for i in range(count):
            result = self.runtime.cycle(k, lengths, live, ahead=i * (k + 1))
            packed.append(result.clone() if count > 1 else result)
        begin = time.perf_counter()
        outcomes = [cycle.unpack(result) for result in packed]
        last = "cycle" if "cycle" in self.runtime.seconds else "verify"
        self.runtime.seconds[last] += time.perf_counter() - begin
        return outcomes

    def _note(self, outcome, live, lengths, limits, begin) -> None:
        """Adds what the report says beyond counts, and stops on unsound logits."""
        report = self.report
        if report.first_token_seconds is None:
            report.first_token_seconds = time.perf_counter() - begin
        report.seconds = self.runtime.seconds
        report.target_prefill_forwards = self.runtime.prefill_forwards
        report.target_shapes = len(self.runtime.target.shapes)
        report.graphs = dataclasses.replace(self.runtime.graphs.facts)
        if self.runtime.drafter is not None:
            report.draft_forwards = self.runtime.drafter.forwards
            report.draft_shapes = len(self.runtime.drafter.shapes)
        for row, facts in enumerate(outcome):
            if facts.n_unsound:
                raise NumericalError(
                    f"The target's logits are NaN or infinite in row {row} near position "
                    f"{lengths[row] - 1}: check the checkpoint, or load it in float32."
                )
            if live[row] and facts.done and lengths[row] < limits[row]:
                report.finish_reasons[row] = "stop"


def _check_row(row, prompt, budget, min_new_tokens, vocab, limit) -> None:
    if len(prompt) == 0:
        raise InputError(f"Prompt {row} is empty: give at least one token.")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab:
        raise InputError(f"Prompt {row} holds ids outside 0..{vocab - 1}: check its tokenizer.")
    if not isinstance(budget, int) or budget < 1:
        raise InputError(f"The budget of new tokens must be at least 1, not {budget!r}.")
    if not 0 <= min_new_tokens <= budget:
        raise InputError(
            f"min_new_tokens={min_new_tokens} does not lie between 0 and the budget of {budget}."
        )
    if limit is not None and len(prompt) + budget > limit:
        raise InputError(
            f"Prompt {row} has {len(prompt)} tokens and {budget} new ones are asked for, but only "
            f"{limit} positions exist: shorten the prompt or ask for fewer tokens."
        )
