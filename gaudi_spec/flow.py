"""One call under way: prefills, then runs cycles and settles what they did."""

from __future__ import annotations

import time
import warnings

from . import cycle
from .config import SpecConfig
from .cycle import RowOutcome
from .errors import ConfigError, NumericalError
from .ledger import Ledger, Step, TokenEvent
from .metrics import Report
from .request import Request, Rows
from .runtime import Runtime
from .schedule import Schedule

_ENOUGH_DRAFTS = 50  # blocks of proposals, before their acceptance says something


class Flow:
    """The cycles of one call.

    Args:
        runtime: Buffers and graphs, large enough.
        config: Settings.
        request: What to generate.
        schedule: Picks K.
        step: Watches every decoding step, see `Ledger`.

    Attributes:
        rows: The host's copy of what the rows have come to.
        report: Counted facts.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: SpecConfig,
        request: Request,
        schedule: Schedule,
        step: Step | None = None,
    ) -> None:
        self.runtime, self.config, self.schedule = runtime, config, schedule
        self._request = request
        count = len(request.prompts)
        self.report = Report(emitted=[0] * count, finish_reasons=["length"] * count)
        self._ledger = Ledger(self.report, count, step)
        self._watched = step is not None
        reads = step is not None or config.keep_logits or config.confidence is not None
        reads = reads or request.sampling.on_host  # no processor is called for an ended text
        self._every = 1 if reads else config.sync_every
        spare = [1] * (runtime.state.batch - count)  # rows without a prompt are done from the start
        lengths = [len(prompt) for prompt in request.prompts]
        limits = [n + budget for n, budget in zip(lengths, request.budgets)]
        self.rows = Rows(count, lengths + spare, limits + spare)

    def start(self, begin: float, reuse: bool) -> None:
        """Loads the request into the buffers and prefills.

        Args:
            begin: When the call began.
            reuse: Keep the cache entries of what a row's prompt shares with the row's text of the
                call before.
        """
        runtime, request = self.runtime, self._request
        self._begin = begin
        prompts = [prompt.tolist() for prompt in request.prompts]
        prompts += [[] for _ in range(runtime.state.batch - self.rows.count)]
        kept = [_shared(old, new) if reuse else 0 for old, new in zip(runtime.held, prompts)]
        # An interrupt may come at any time: what is held is what is sound.
        runtime.held = [prompt[: n + 1] for prompt, n in zip(prompts, kept)]
        runtime.state.reset(*request)
        runtime.reset(kept)
        self.report.reused_tokens = sum(kept)
        runtime.prefill(kept, max(len(prompt) - 1 - n for prompt, n in zip(prompts, kept)))
        runtime.held = prompts
        runtime.seconds["prefill"] += time.perf_counter() - begin

    def advance(self) -> tuple[list[list[RowOutcome]], list[TokenEvent]]:
        """Runs cycles up to the next host read.

        Returns:
            The outcome of each cycle that did something, and the tokens that can be handed out.
        """
        rows, runtime = self.rows, self.runtime
        k = self._usable(self._choose())
        outcomes, events = [], []
        results, verified, seconds = self._cycles(k)
        for outcome in results:
            if not rows.live:
                break
            self._check(outcome)
            self.schedule.learn(k, [outcome[row] for row in rows.live], seconds)
            for row, facts in enumerate(outcome):
                rows.lengths[row] += facts.n_emitted
                runtime.held[row] += facts.tokens
            rows.done = [facts.done > 0 or done for facts, done in zip(outcome, rows.done)]
            self.report.add_cycle(verified)
            settled, excess = self._ledger.add(outcome)
            self._roll_back(excess)
            if k:
                runtime.drafter.committed(rows.lengths, k)
            if self.report.first_token_seconds is None:
                self.report.first_token_seconds = time.perf_counter() - self._begin
            self._tell()
            outcomes.append(outcome[: rows.count])
            events += settled
        if not rows.live:
            self._warn_of_acceptance()
        return outcomes, events

    def _choose(self) -> int:
        """Returns the K that the schedule chooses."""
        rows = self.rows
        left = max(rows.left(r) for r in rows.live)
        costs = self.runtime.costs(rows.lengths, [not done for done in rows.done], left)
        self.report.step_seconds = dict(costs.seconds)
        k = self.schedule.choose(self.report.cycles, costs)
        if k not in self.schedule.sizes and k != 0:
            raise ConfigError(f"The schedule chose K = {k}, which is not among its sizes.")
        return k

    def _tell(self) -> None:
        """Writes what is counted elsewhere into the report."""
        self.runtime.tell(self.report)
        if self.runtime.drafter is not None:
            self.report.schedule = self.schedule.name
            self.report.schedule_reason = self.schedule.reason

    def _warn_of_acceptance(self) -> None:
        """Says so, once, if a draft is of no use: the text is right, so nobody would notice."""
        report, runtime = self.report, self.runtime
        modelled = runtime.drafter is not None and runtime.drafter.needs_draft
        if not modelled or runtime.warned_acceptance or report.drafts < _ENOUGH_DRAFTS:
            return
        if report.accepted >= report.drafts / 10:
            return
        runtime.warned_acceptance = True
        warnings.warn(
            f"Only {report.acceptance_rate:.1%} of {report.proposed} drafted tokens were accepted: "
            "the text is right, but decoding without this draft is faster. Check that the draft "
            "fits the target, and its quantization.",
            stacklevel=5,
        )

    def _roll_back(self, excess: dict[int, int]) -> None:
        """Ends rows, taking back what they have gone too far: both caches hide it at once."""
        rows = self.rows
        for row, count in excess.items():
            rows.lengths[row] -= count
            rows.done[row] = True
            del self.runtime.held[row][rows.lengths[row] :]
        if excess:
            self.runtime.state.set_ends(rows.lengths, rows.done)

    def _usable(self, k: int) -> int:
        """Returns k, or 0 where no live row can use a proposal."""
        drafter, rows = self.runtime.drafter, self.rows
        if drafter is None or k == 0:
            return 0
        if self._watched and self._request.sampling.on_host:
            return 0  # a processor must not be called for tokens behind a stop in the same block
        outside = [r for r in rows.live if not drafter.has_room(rows.lengths[r])]
        if outside and not self.runtime.warned_room:
            self.runtime.warned_room = True
            warnings.warn(
                f"A sequence of {rows.lengths[outside[0]]} tokens is longer than the draft's "
                "maximum positions; it goes on without a draft, so it gets slower but not "
                "different.",
                stacklevel=5,
            )
        usable = max((rows.left(r) - 1 for r in rows.live if r not in outside), default=0)
        return min(n for n in (0, k, *self.schedule.sizes) if n >= min(k, usable))

    def _cycles(self, k: int) -> tuple[list[list[RowOutcome]], int, float]:
        """Runs cycles until the host reads: one, or up to `sync_every` of the same K.

        Returns:
            What each did, the K that was verified, and the seconds of one.
        """
        rows, runtime = self.rows, self.runtime
        longest = max(rows.left(r) for r in rows.live)
        count = max(1, min(self._every, longest // (k + 1)))
        alive = [not done for done in rows.done]
        window = runtime.window(max(rows.lengths[r] for r in rows.live))
        start = time.perf_counter()
        if k:
            runtime.catch_up(rows.lengths, alive)
        begin, built = time.perf_counter(), runtime.graphs.facts.built
        if count > 1:
            runtime.blocks.rewind()
        for i in range(count):
            result = runtime.cycle(k, rows.lengths, alive, ahead=i * (k + 1))
        verified = result.shape[1] - cycle.FACTS - 1
        read = time.perf_counter()
        packed = runtime.blocks.outcomes if count > 1 else result[None]
        outcomes = cycle.unpack(packed, runtime.blocks.kept(verified))[:count]
        end = time.perf_counter()
        self.report.host_reads += 1 + self.config.keep_logits + (runtime.trims and k > 0)
        last = "cycle" if "cycle" in runtime.seconds else "verify"
        runtime.seconds[last] += end - read
        if built == runtime.graphs.facts.built:  # a first use takes longer
            runtime.times.add(k, (end - begin) / count, window, runtime.state.rules.structure)
        return outcomes, verified, (end - start) / count

    def _check(self, outcome: list[RowOutcome]) -> None:
        """Stops on unsound logits."""
        for row in self.rows.live:
            if outcome[row].n_unsound:
                self.runtime.clean()
                raise NumericalError(
                    f"The target's logits are NaN or infinite in row {row} near position "
                    f"{self.rows.lengths[row] + outcome[row].n_emitted - 1}, or the call's options "
                    "forbid every token there: check the checkpoint and those options, or load it "
                    "in float32."
                )


def _shared(held: list[int], prompt: list[int]) -> int:
    """Returns how many leading cache entries of `held` are those of `prompt[:-1]`.

    The entry of the last held token was never written, and that of the last prompt token will be.
    """
    most = max(0, min(len(held), len(prompt)) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
