"""Hands out committed tokens in order, counts them, and ends a row where a step says so.

Rows of a batch commit different numbers of tokens a cycle. Whoever watches a generation step by
step, as Transformers' stopping criteria and streamers do, must be shown what plain decoding shows:
at step t, the t-th new token of every row. So a row that is ahead waits here until the others have
got there; if it is ended before, what it has gone too far is dropped, uncounted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .cycle import RowOutcome
from .metrics import Report

Step = Callable[["list[int | None]", "list[torch.Tensor | None]"], "list[str | None]"]


class TokenEvent(NamedTuple):
    """One emitted token.

    Attributes:
        row: Whose token it is.
        token: The id.
        from_draft: Whether the draft had proposed it; else the target added it.
        finish_reason: Why the row ends with this token ("stop": end of text, "length": budget, or
            what the step said), or None while it goes on.
        logits: `[V]` float32 on the CPU that the token was chosen by, as the target gave them;
            None unless `SpecConfig.keep_logits`.
        scores: The same after processing.
    """

    row: int
    token: int
    from_draft: bool
    finish_reason: str | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class Ledger:
    """The tokens of one call.

    Args:
        report: Counts what is handed out.
        count: Rows.
        step: Called once for every decoding step with each row's token (None for a row that has
            ended) and its scores; says, for each row, why it ends there, or None. Without it no
            row waits.
    """

    def __init__(self, report: Report, count: int, step: Step | None) -> None:
        self._report, self._step = report, step
        self._waiting: list[list[RowOutcome]] = [[] for _ in range(count)]
        self._used = [0] * count  # tokens of the first waiting outcome that were handed out
        self._ended = [False] * count

    def add(self, outcomes: list[RowOutcome]) -> tuple[list[TokenEvent], dict[int, int]]:
        """Takes in what a cycle did to each row.

        Returns:
            The tokens that can be handed out, and for rows that a step has just ended, how many
            of their committed tokens go too far.
        """
        for row, waiting in enumerate(self._waiting):
            if outcomes[row].n_emitted:
                waiting.append(outcomes[row])
        if self._step is None:
            return [self._take(row) for row in self._ready() for _ in range(self._left(row))], {}
        events: list[TokenEvent] = []
        excess: dict[int, int] = {}
        while (ready := self._ready()) and len(ready) == self._ended.count(False):
            taken = {row: self._take(row) for row in ready}
            shown = [taken.get(row) for row in range(len(self._waiting))]
            reasons = self._step([e and e.token for e in shown], [e and e.scores for e in shown])
            for row, event in taken.items():
                if event.finish_reason is None and reasons[row] is not None:
                    event = event._replace(finish_reason=reasons[row])
                    self._report.finish_reasons[row] = reasons[row]
                    excess[row] = self._end(row)
                events.append(event)
        return events, excess

    def _ready(self) -> list[int]:
        return [r for r, waiting in enumerate(self._waiting) if waiting and not self._ended[r]]

    def _left(self, row: int) -> int:
        return sum(outcome.n_emitted for outcome in self._waiting[row]) - self._used[row]

    def _take(self, row: int) -> TokenEvent:
        outcome, at = self._waiting[row][0], self._used[row]
        self._used[row] += 1
        reason = None
        if self._used[row] == outcome.n_emitted:
            self._report.add_row(row, outcome)
            self._waiting[row].pop(0)
            self._used[row] = 0
            if outcome.done:
                reason = "stop" if outcome.done == 2 else "length"
                self._report.finish_reasons[row] = reason
                self._ended[row] = True
        vectors = (None, None) if outcome.vectors is None else outcome.vectors[:, at]
        return TokenEvent(row, outcome.tokens[at], at < outcome.n_accepted, reason, *vectors)

    def _end(self, row: int) -> int:
        """Ends a row at the token taken last; returns how many tokens it has gone too far."""
        excess, used = self._left(row), self._used[row]
        if used:
            self._report.add_row(row, self._waiting[row][0].cut(used))
        self._waiting[row].clear()
        self._ended[row] = True
        return excess
