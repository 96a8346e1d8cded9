"""What one call asks for, checked, and the host's copy of what has become of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .errors import InputError
from .sampling.options import Sampling


class Request(NamedTuple):
    """A checked request.

    Attributes:
        prompts: Token ids of each row, 1-D int64 on the CPU.
        budgets: New tokens for each row.
        min_new_tokens: New tokens before which no end token may be chosen.
        eos_token_ids: Ids that end a row.
        sampling: How tokens are chosen.
    """

    prompts: list[torch.Tensor]
    budgets: list[int]
    min_new_tokens: int
    eos_token_ids: list[int]
    sampling: Sampling

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and budget."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.budgets))


@dataclasses.dataclass
class Rows:
    """The host's copy of what the rows have come to.

    Attributes:
        count: Rows that have a prompt; those behind are spare.
        lengths: Committed tokens.
        limits: Lengths at which rows are done.
        done: Whether they are.
    """

    count: int
    lengths: list[int]
    limits: list[int]
    done: list[bool] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.done = [n >= limit for n, limit in zip(self.lengths, self.limits)]

    @property
    def live(self) -> list[int]:
        """Rows that still generate."""
        return [r for r, done in enumerate(self.done) if not done]

    def left(self, row: int) -> int:
        """Returns the rest of a row's budget."""
        return self.limits[row] - self.lengths[row]


def admit(
    prompts: Sequence[Any],
    max_new_tokens: int | Sequence[int],
    min_new_tokens: int,
    eos_token_ids: Any,
    sampling: Sampling | None,
    *,
    vocab_size: int,
    positions: int | None,
) -> Request:
    """Checks a request.

    Args:
        prompts: Rows of token ids: sequences of integers or 1-D integer tensors.
        max_new_tokens: One budget, or one for each row.
        min_new_tokens: See `Request`.
        eos_token_ids: See `Request`.
        sampling: See `Request`; None is greedy.
        vocab_size: Ids that the target has an embedding for.
        positions: Tokens that a row can hold, or None.

    Raises:
        InputError: What is wrong and what to do.
    """
    if not isinstance(prompts, Iterable):
        raise InputError(f"Prompts must be a list of rows of token ids, not {prompts!r}.")
    rows = [_row(index, prompt) for index, prompt in enumerate(prompts)]
    if not rows:
        raise InputError("No prompt was given: pass at least one row of token ids.")
    each = isinstance(max_new_tokens, Sequence)
    given = list(max_new_tokens) if each else [max_new_tokens] * len(rows)
    if len(given) != len(rows):
        raise InputError(f"{len(given)} budgets were given for {len(rows)} prompts.")
    budgets = [_whole("The budget of new tokens", budget, 1) for budget in given]
    least = _whole("min_new_tokens", min_new_tokens, 0)
    for index, (row, budget) in enumerate(zip(rows, budgets)):
        if int(row.min()) < 0 or int(row.max()) >= vocab_size:
            raise InputError(
                f"Prompt {index} holds ids outside 0..{vocab_size - 1}: check its tokenizer."
            )
        if least > budget:
            raise InputError(f"min_new_tokens={least} is more than the budget of {budget}.")
        if positions is not None and len(row) + budget > positions:
            raise InputError(
                f"Prompt {index} has {len(row)} tokens and {budget} new ones are asked for, but "
                f"only {positions} positions exist: shorten the prompt or ask for fewer tokens."
            )
    sampling = sampling or Sampling()
    if isinstance(sampling.seed, tuple) and len(sampling.seed) != len(rows):
        raise InputError(f"{len(sampling.seed)} seeds were given for {len(rows)} prompts.")
    return Request(rows, budgets, least, list(token_ids(eos_token_ids)), sampling)


def token_ids(value: Any) -> tuple[int, ...]:
    """Returns the ids in an integer, a flat collection or tensor of them, or None, each once.

    Raises:
        InputError: It holds something else.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    values = [] if value is None else value
    values = list(values) if isinstance(values, (list, tuple, set, frozenset, range)) else [values]
    try:
        ids = tuple(dict.fromkeys(operator.index(item) for item in values))
    except TypeError:
        ids = (1 << 63,)
    if any(not -(1 << 63) <= item < 1 << 63 for item in ids):
        raise InputError(f"An eos_token_id or pad_token_id must be a whole number, not {value!r}.")
    return ids


def _row(index: int, prompt: Any) -> torch.Tensor:
    try:
        row = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Prompt {index} is not a row of token ids: {error}") from error
    if row.numel() == 0:
        raise InputError(f"Prompt {index} is empty: give at least one token.")
    if row.dim() != 1 or row.is_floating_point() or row.dtype == torch.bool:
        raise InputError(
            f"Prompt {index} must be one row of integer token ids, not of shape "
            f"{list(row.shape)} and type {row.dtype}: pass a list of rows."
        )
    return row.long().cpu()


def _whole(what: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InputError(f"{what} must be a whole number of at least {least}, not {value!r}.")
    return number
