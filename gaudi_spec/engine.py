"""The engine: checks a request, builds what it needs, and runs it one call at a time.

Prefill only fills caches: it runs each model without its head over `prompt[:-1]`; the last prompt
token is the first cycle's `last`, so the first new tokens already come out of a cycle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from .buckets import round_up
from .config import MAX_ASSISTANT_TOKENS, SpecConfig
from .cycle import RowOutcome
from .device import Device, get_device
from .drafters.registry import pick
from .errors import ConfigError, GaudiSpecError, InputError
from .flow import Flow
from .ledger import Step, TokenEvent
from .metrics import Report
from .models.hf import self_check
from .models.shadow import fingerprint
from .models.support import check_supported, is_tested, max_positions, vocabulary
from .quant import apply
from .quant.facts import facts
from .quant.linear import KINDS
from .request import Request, admit
from .runtime import Runtime
from .sampling.options import Sampling
from .schedule import Schedule, schedule_of


class SpeculativeEngine:
    """Speculative decoding of a ragged batch, exact to the target's own output or distribution.

    Args:
        target: A Transformers causal LM, on its device. It is not modified.
        draft: A smaller causal LM over the same tokenizer, on the same device, or None. May be the
            target itself. `config.drafter` says what proposes; with "auto", None decodes plainly.
        config: Settings; see `SpecConfig`.
        device: A device name or object; None takes the target's.

    Attributes:
        report: Counted facts of the last call.
        lock: Held while a call computes; take it to read `report` before the next call's.

    Raises:
        UnsupportedModelError: A model cannot be served; the message says why.
        ConfigError: Models on different devices; no such drafter.
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
        pick(self.config.drafter, draft is not None)
        self.device = get_device(target.device if device is None else device)
        for role, model in (("target", target), ("draft", draft)):
            apply.check(self.config.quant(role), model, role, self.device)
            if model is None:
                continue
            if model.device.type != self.device.torch_device.type:
                raise ConfigError(
                    f"The {role} is on {model.device}, the engine on {self.device.name}: move it "
                    f"with model.to({self.device.torch_device.type!r}) first."
                )
            if not is_tested(model):
                self_check(model)
        self._models = (target, draft)
        self._schedule = schedule_of(self.config)  # what it learns in one call serves the next
        self.lock = threading.RLock()
        self._turn = 0
        self._prints: tuple[int, ...] = ()
        self.report = Report()
        self.runtime: Runtime | None = None

    @property
    def target_model(self) -> Any:
        """The target as it computes here, quantized if it is; before the first call, the given."""
        return self._models[0] if self.runtime is None else self.runtime.target.model

    def facts(self) -> dict[str, Any]:
        """Returns what each loaded model really is, by role: see `quant/facts.py`."""
        models = self.runtime.models if self.runtime is not None else {}
        return {role: facts(held.model, held.cache) for role, held in models.items()}

    def generate(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | Sequence[int],
        **options: Any,
    ) -> list[torch.Tensor]:
        """Generates for every prompt until it ends; arguments as for `stream`.

        One call at a time: a second thread waits.

        Returns:
            New tokens of each row, int64 on the CPU.
        """
        with self.lock:
            rows: dict[int, list[int]] = {}
            for event in self.stream(prompts, max_new_tokens, **options):
                rows.setdefault(event.row, []).append(event.token)
        return [torch.tensor(rows[row], dtype=torch.long) for row in sorted(rows)]

    def stream(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | Sequence[int],
        *,
        eos_token_ids: Sequence[int] | int | None = (),
        min_new_tokens: int = 0,
        sampling: Sampling | None = None,
        schedule: Schedule | None = None,
        step: Step | None = None,
        reuse: bool = False,
        each_cycle: Callable[[], None] | None = None,
    ) -> Iterator[TokenEvent]:
        """Yields every token, in order within its row, as soon as a cycle has committed it.

        A stream may be dropped half way. One that another call on this engine interrupts cannot
        go on and says so.

        Args:
            prompts: Token ids of each row, without padding; lengths may differ.
            max_new_tokens: Budget of new tokens, one for all rows or one for each.
            eos_token_ids: Ids that end a row, or one id; the end token itself is returned.
            min_new_tokens: New tokens before which no end token may be chosen.
            sampling: How tokens are chosen; None is greedy.
            schedule: Picks K; None means as `config` says.
            step: Watches every decoding step and may end rows, see `Ledger` and `Steps`.
            reuse: Keep the cache entries of what each prompt shares with the text that its row
                had in the call before, as in the next turn of a chat. Only sound if no weight was
                changed in place since.
            each_cycle: Called after each cycle, or each `config.sync_every` of them.

        Raises:
            InputError: An empty prompt, an id outside the vocabulary, a budget below 1, or a
                sequence that does not fit.
            NumericalError: The target's logits are NaN or infinite.
        """
        given = (prompts, max_new_tokens, min_new_tokens, eos_token_ids, sampling)
        for _, events in self._run(given, schedule, step, reuse):
            if each_cycle is not None:
                each_cycle()
            yield from events

    def cycles(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | Sequence[int],
        *,
        eos_token_ids: Sequence[int] | int | None = (),
        min_new_tokens: int = 0,
        sampling: Sampling | None = None,
        schedule: Schedule | None = None,
    ) -> Iterator[list[RowOutcome]]:
        """Yields after every cycle what it did to each row; arguments as for `stream`."""
        given = (prompts, max_new_tokens, min_new_tokens, eos_token_ids, sampling)
        for outcomes, _ in self._run(given, schedule):
            yield from outcomes

    def _run(
        self,
        given: tuple,
        schedule: Schedule | None,
        step: Step | None = None,
        reuse: bool = False,
    ) -> Iterator[tuple[list[list[RowOutcome]], list[TokenEvent]]]:
        """Yields what `Flow.advance` returns until all rows are done."""
        begin = time.perf_counter()
        schedule = schedule or self._schedule
        with self.lock:
            schedule.begin()
            request = self._admit(given, schedule.sizes)
            self._turn += 1
            turn = self._turn
            flow = Flow(self.runtime, self.config, request, schedule, step)
            self.report = flow.report
            flow.start(begin, reuse)
        while flow.rows.live:
            with self.lock:
                if turn != self._turn:
                    raise GaudiSpecError(
                        "Another call has used this engine while its stream was open: finish the "
                        "stream first, or use an engine for each."
                    )
                result = flow.advance()
            yield result

    def warm_up(
        self, batch: int, length: int, quiet: bool = False, sampling: Sampling | None = None
    ) -> None:
        """Builds every graph for `batch` rows of up to `length` tokens before the first token.

        Args:
            batch: B.
            length: Prompt and new tokens of a row.
            quiet: No progress bar on standard error.
            sampling: Graphs for such calls; values do not matter, only which options are set.
        """
        like = Request([], [], 0, [], sampling or Sampling())
        with self.lock:
            self._build(batch, length, self._schedule.sizes)
            self.runtime.warm_up(set(self._schedule.sizes), quiet, like)

    def _admit(self, given: tuple, sizes: Collection[int]) -> Request:
        """Checks a request and builds or grows the buffers for it, and graphs for its rules."""
        target = self._models[0]
        limits = (self.config.max_length, max_positions(target.config))
        request = admit(
            *given,
            vocab_size=vocabulary(target)[0],
            positions=min((limit for limit in limits if limit is not None), default=None),
        )
        if not sizes or not all(0 <= k <= MAX_ASSISTANT_TOKENS for k in sizes):
            raise ConfigError(
                f"The schedule's sizes are {sorted(sizes)}; each K must be from 0 to "
                f"{MAX_ASSISTANT_TOKENS}."
            )
        self._build(len(request.prompts), request.longest, sizes)
        if not self.runtime.knows(request):
            self.runtime.warm_up({*sizes, *self._schedule.sizes}, False, request)
        return request

    def _build(self, batch: int, length: int, sizes: Collection[int]) -> None:
        """Allocates caches and state for `batch` rows of `length` tokens, unless they suffice.

        They do not if a model was changed since, other than by writing into its tensors.
        """
        prints = tuple(self._print(*given) for given in zip(("target", "draft"), self._models))
        if self.runtime is not None and prints == self._prints:
            state = self.runtime.state
            wide = state.tokens.shape[1] - state.slots > max(sizes)
            if batch <= state.batch and length <= state.slots and wide:
                return
            batch, length = max(batch, state.batch), max(length, state.slots)
        self._prints = prints
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
        widest = max(*sizes, self.config.most_drafts)
        self.runtime = Runtime(target, draft, self.config, self.device, batch, slots, widest)

    def _print(self, role: str, model: Any) -> int:
        """Returns a number that changes with whatever the engine's copy of a model was made of."""
        if model is None:
            return 0
        written = apply.versions(model) if self.config.quant(role).scheme in KINDS else 0
        return hash((fingerprint(model), written))
