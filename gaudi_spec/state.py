"""The few tensors that a generation consists of: tokens, lengths, limits, flags.

A growing sequence is never a growing shape. Rows that are done are masked, not removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class State:
    """Per-row state, allocated once and reset for every call.

    Attributes:
        tokens: `[B, S + spare]` int64, prompt and committed tokens; what lies at and beyond
            `length` is stale. The spare columns let a whole block be scattered at the end.
        length: `[B]` int64, committed tokens.
        limit: `[B]` int64, length at which the row is done.
        min_length: `[B]` int64, length below which no end-of-text token may be chosen.
        cursor: `[B]` int64, index from which the next fill feeds each row.
        done: `[B]` bool.
        ends: `[V]` int32, 1 at end-of-text ids.
    """

    def __init__(
        self, batch: int, slots: int, spare: int, vocab_size: int, device: torch.device
    ) -> None:
        self.batch, self.slots, self.device = batch, slots, device
        self.tokens = torch.zeros(batch, slots + spare, dtype=torch.long, device=device)
        self.length, self.limit, self.min_length, self.cursor = (
            torch.ones(batch, dtype=torch.long, device=device) for _ in range(4)
        )
        self.done = torch.ones(batch, dtype=torch.bool, device=device)
        self.ends = torch.zeros(vocab_size, dtype=torch.int32, device=device)

    def reset(
        self,
        prompts: Sequence[torch.Tensor],
        budgets: Sequence[int],
        min_new_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Loads a `Request`, left-justified; rows without a prompt are done from the start.

        The tensors keep their storage.
        """
        tokens = torch.zeros(self.tokens.shape, dtype=torch.long)
        length = torch.ones(self.batch, dtype=torch.long)
        limit = torch.ones(self.batch, dtype=torch.long)
        for row, (prompt, budget) in enumerate(zip(prompts, budgets)):
            # What lies behind a prompt is fed as filler; a token of the row's own is a sound one.
            tokens[row] = prompt[0]
            tokens[row, : len(prompt)] = prompt
            length[row] = len(prompt)
            limit[row] = len(prompt) + budget
        self.tokens.copy_(tokens)
        self.length.copy_(length)
        self.limit.copy_(limit)
        self.min_length.copy_(length + min_new_tokens)
        self.done.copy_(length >= limit)
        ends = torch.zeros(self.ends.shape, dtype=torch.int32)
        ends[[i for i in eos_token_ids if 0 <= i < len(ends)]] = 1
        self.ends.copy_(ends)

    def set_ends(self, lengths: Sequence[int], done: Sequence[bool]) -> None:
        """Sets every row's length and whether it is done: what lies behind a length is stale."""
        self.length.copy_(torch.tensor(lengths, dtype=torch.long))
        self.done.copy_(torch.tensor(done))

    def is_eos(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns, for ids of any shape, which are end-of-text (bool, same shape)."""
        return self.ends.index_select(0, ids.reshape(-1)).view(ids.shape) > 0
