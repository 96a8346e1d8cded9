"""The few tensors that a generation consists of: tokens, lengths, limits, flags.

A growing sequence is never a growing shape. Rows that are done are masked, not removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sampling.options import Sampling
from .sampling.processors import Text
from .sampling.rules import Plan, Rules, Structure


class State:
    """Per-row state, allocated once and reset for every call.

    Attributes:
        tokens: `[B, S + spare]` int64, prompt and committed tokens; what lies at and beyond
            `length` is stale. The spare columns let a whole block be scattered at the end.
        length: `[B]` int64, committed tokens.
        prompt: `[B]` int64, tokens of the prompt.
        limit: `[B]` int64, length at which the row is done.
        min_length: `[B]` int64, length below which no end-of-text token may be chosen.
        cursor: `[B]` int64, index from which the next fill feeds each row.
        done: `[B]` bool.
        ends: `[V]` int32, 1 at end-of-text ids.
        rules: How tokens are chosen; another object where the call has another structure.
        sampling: What they were made of, and the callables that run on the host.
        rows: Rows that have a prompt; those behind are spare.

    Args:
        verifier: How drawn tokens are verified, "rejection" or "coupled".
    """

    def __init__(
        self,
        batch: int,
        slots: int,
        spare: int,
        vocab_size: int,
        device: torch.device,
        verifier: str = "rejection",
    ) -> None:
        self.batch, self.slots, self.device = batch, slots, device
        self.tokens = torch.zeros(batch, slots + spare, dtype=torch.long, device=device)
        self.length, self.prompt, self.limit, self.min_length, self.cursor = (
            torch.ones(batch, dtype=torch.long, device=device) for _ in range(5)
        )
        self.done = torch.ones(batch, dtype=torch.bool, device=device)
        self.ends = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._verifier = verifier
        self._rules: dict[Structure, Rules] = {}
        self.rows, self.sampling = 0, Sampling()
        self.choose_by(self.plan(self.sampling, ()), 0)

    def reset(
        self,
        prompts: Sequence[torch.Tensor],
        budgets: Sequence[int],
        min_new_tokens: int,
        eos_token_ids: Sequence[int],
        sampling: Sampling | None = None,
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
        self.prompt.copy_(length)
        self.limit.copy_(limit)
        self.min_length.copy_(length + min_new_tokens)
        self.done.copy_(length >= limit)
        ends = torch.zeros(self.ends.shape, dtype=torch.int32)
        ends[[i for i in eos_token_ids if 0 <= i < len(ends)]] = 1
        self.ends.copy_(ends)
        self.rows, self.sampling = len(prompts), sampling or Sampling()
        self.choose_by(self.plan(self.sampling, eos_token_ids), self.rows)

    def plan(self, sampling: Sampling, eos_token_ids: Sequence[int]) -> Plan:
        """Returns the rules that a call would have."""
        return Plan.of(sampling, self._verifier, len(self.ends), list(eos_token_ids))

    def choose_by(self, plan: Plan, rows: int) -> None:
        """Makes `plan` the rules of the first `rows` rows."""
        if plan.structure not in self._rules:
            self._rules[plan.structure] = Rules(plan, self.batch, self.device)
        self.rules = self._rules[plan.structure]
        self.rules.load(plan, rows)

    def text(self, candidates: torch.Tensor, index: torch.Tensor) -> Text:
        """Returns what processors read.

        Args:
            candidates: `[B, N]` int64, tokens that may follow the committed ones.
            index: `[B, T]` int64, where each predicted token would stand.
        """
        tokens = self.tokens
        if self.rules.reads_history and candidates.shape[1]:
            offset = torch.arange(candidates.shape[1], device=index.device)
            tokens = tokens.scatter(1, self.length[:, None] + offset, candidates)
        return Text(tokens, index, self.prompt, self.limit, self.min_length, self.ends)

    def set_ends(self, lengths: Sequence[int], done: Sequence[bool]) -> None:
        """Sets every row's length and whether it is done: what lies behind a length is stale."""
        self.length.copy_(torch.tensor(lengths, dtype=torch.long))
        self.done.copy_(torch.tensor(done))

    def is_eos(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns, for ids of any shape, which are end-of-text (bool, same shape)."""
        return self.ends.index_select(0, ids.reshape(-1)).view(ids.shape) > 0
