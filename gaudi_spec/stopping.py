"""Stopping criteria and streamers, shown every decoding step as plain `generate` would show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from .errors import ConfigError, InputError

Criterion = Callable[[torch.Tensor, Any], Any]

_REASONS = {
    StopStringCriteria: "stop_string",
    MaxTimeCriteria: "max_time",
    MaxLengthCriteria: "length",
    EosTokenCriteria: "stop",
}


def gather_criteria(
    stop_strings: str | Sequence[str] | None,
    max_time: float | None,
    tokenizer: Any,
    given: Iterable[Criterion] | None,
) -> tuple[Criterion, ...]:
    """Returns Transformers' criteria for these options, and the caller's own.

    As in Transformers, one of the caller's takes the place of one of the same type.

    Args:
        stop_strings: Strings that end a row as soon as its text holds one.
        max_time: Seconds, from now, after which all rows end.
        tokenizer: Needed for stop strings.
        given: The caller's `StoppingCriteriaList`, or any callables like it.

    Raises:
        InputError: Stop strings without a tokenizer, or what is no string.
        ConfigError: What is no criterion.
    """
    try:
        own = tuple(given or ())
    except TypeError:
        own = (None,)
    if not all(callable(criterion) for criterion in own):
        raise ConfigError(f"stopping_criteria must be a list of callables, not {given!r}.")
    ours: list[Criterion] = []
    if max_time is not None:
        ours.append(MaxTimeCriteria(max_time))
    if stop_strings is not None:
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if not strings or not all(isinstance(text, str) and text for text in strings):
            raise InputError(f"stop_strings must be strings that are not empty: {stop_strings!r}.")
        if tokenizer is None:
            raise InputError("stop_strings need the model's tokenizer: pass it as tokenizer=.")
        try:
            ours.append(StopStringCriteria(tokenizer, strings))
        except ValueError as error:
            raise InputError(
                f"stop_strings={strings} cannot be looked for: Transformers' search needs a "
                "tokenizer that can spell any text, such as a byte-level one, and fails on this "
                f"({' '.join(str(error).split())}); pass a StoppingCriteria of your own."
            ) from error
    types = {type(criterion) for criterion in own}
    return (*(criterion for criterion in ours if type(criterion) not in types), *own)


class Steps:
    """Calls streamer and criteria once for every decoding step; the `step` of an engine's stream.

    A criterion sees `(input_ids [B, n], scores)`, as in Transformers: the caller's prompts with
    their padding, the same number of new tokens in every row, and the pad token where a row has
    ended. It answers with one bool for each row, or one for all.

    Args:
        input_ids: `[B, W]` prompts.
        pad: Fills rows that have ended.
        criteria: Called in this order.
        streamer: Gets the `[B]` new tokens of every step.
        scored: Show criteria the scores of all steps, as Transformers does with `output_scores`.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        pad: int,
        criteria: Sequence[Criterion] = (),
        streamer: Any = None,
        scored: bool = False,
    ) -> None:
        self._ids, self._pad = input_ids, pad
        self._criteria, self._streamer = criteria, streamer
        self._scores: tuple[torch.Tensor, ...] | None = () if scored else None

    def __call__(
        self, tokens: list[int | None], scores: list[torch.Tensor | None]
    ) -> list[str | None]:
        """Takes each row's next token, and says which rows end with it and why."""
        column = torch.tensor([self._pad if token is None else token for token in tokens])
        self._ids = torch.cat([self._ids, column[:, None].to(self._ids)], 1)
        if self._scores is not None:
            self._scores += (stack_rows(scores).to(self._ids.device),)
        if self._streamer is not None:
            self._streamer.put(column)
        reasons: list[str | None] = [None] * len(tokens)
        for criterion in self._criteria:
            for row, ends in enumerate(self._ask(criterion)):
                if ends and reasons[row] is None:
                    reasons[row] = _REASONS.get(type(criterion), "criteria")
        return reasons

    def _ask(self, criterion: Criterion) -> list[bool]:
        answer = torch.as_tensor(criterion(self._ids, self._scores))
        rows = len(self._ids)
        if answer.dtype != torch.bool or answer.numel() not in (1, rows):
            raise ConfigError(
                f"The stopping criterion {type(criterion).__name__} must return one bool for each "
                f"of {rows} rows, not {answer.dtype} of shape {list(answer.shape)}."
            )
        return answer.reshape(-1).expand(rows).tolist()


def stack_rows(vectors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Returns `[B, V]`, zeros for rows that have none; at least one has."""
    some = next(vector for vector in vectors if vector is not None)
    return torch.stack([torch.zeros_like(some) if v is None else v for v in vectors])
