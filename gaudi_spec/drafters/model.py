"""Drafting with a smaller language model that has its own slot cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..state import State
from .base import Context, Drafter, Proposal


class ModelDrafter(Drafter):
    """Takes proposals from a draft model by the target's own rules, one width-1 step per token.

    Every cycle starts by reading the last *two* committed tokens. After a fully accepted cycle
    the draft's cache lacks one entry, otherwise none; rewriting a slot with the same value changes
    nothing, so one shape serves both.

    Args:
        context: With a draft model. Ids that only one of the vocabularies has are never proposed.

    Attributes:
        model: The draft with its slot cache.
    """

    needs_draft = True
    draws = True

    def __init__(self, context: Context) -> None:
        self.model, self._fill = context.host(context.draft)
        self.shapes = self.model.shapes
        self._vocab_size = context.target.vocab_size
        self._threshold = context.config.confidence
        self._covered: list[int] = []
        self._caught_up: list[int] = []
        self._window = context.slots

    def reset(self, kept: Sequence[int] = ()) -> None:
        """Forgets what the cache covers beyond the first `kept` tokens of each row."""
        self.forwards = 0
        self._covered = [min(pair) for pair in zip(self._covered, kept)]
        self._covered += [0] * (self.model.cache.batch - len(self._covered))

    def behind(self, lengths: list[int], live: list[bool]) -> int:
        """Returns how many tokens `catch_up` would feed to the row that lacks most."""
        rows = self._served(lengths, live)
        missing = max((lengths[r] - 1 - self._covered[r] for r in rows), default=0)
        # After a plain cycle the draft was not run, so a gap can be one token more; that one is
        # among the two that `propose` reads.
        return missing if missing > 1 else 0

    def catch_up(self, state: State, lengths: list[int], live: list[bool]) -> None:
        """Feeds committed tokens that the cache lacks, in chunks; usually there are none."""
        self._caught_up = rows = self._served(lengths, live)
        missing = self.behind(lengths, live)
        if missing:
            self.forwards += self._fill(self._covered, missing)
            for row in rows:
                self._covered[row] = lengths[row] - 1

    @property
    def window(self) -> int:
        """Slots that live rows stay within; attention reads as many of the draft's own."""
        return self._window

    @window.setter
    def window(self, slots: int) -> None:
        self._window = slots
        self.model.cache.window = min(slots, self.model.slots)

    def has_room(self, length: int) -> bool:
        """Returns whether at least one proposal fits at `length`."""
        return self._fits(length)

    def propose(self, state: State, k: int) -> Proposal:
        """Proposes as many tokens as fit into the draft's own slots."""
        return self._propose(state, k, None)

    def _served(self, lengths: list[int], live: list[bool]) -> list[int]:
        return [r for r, alive in enumerate(live) if alive and self._fits(lengths[r])]

    def _fits(self, length: int) -> bool:
        return length <= self.model.slots

    def _propose(self, state: State, k: int, given: Proposal | None) -> Proposal:
        """Proposes, and feeds to the model, what is `given` in place of the model's choice."""
        at = state.length[:, None]
        pair = (at - 2 + torch.arange(2, device=at.device)).clamp(min=0)
        ids = state.tokens.gather(1, pair)
        drafted, probs, sure = state.tokens[:, :0], [], []
        for step in range(k):
            positions = pair if step == 0 else at + (step - 1)
            logits = self.model.forward(ids, positions.clamp(max=self.model.slots - 1), last=True)
            # Fewer columns than the target has are filled up; more are cut off.
            lacking = self._vocab_size - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, lacking), value=float("-inf"))
            ids, q, logits = state.rules.propose(logits, state.text(drafted, at + step))
            if self._threshold is not None:
                sure.append(logits.softmax(-1).gather(2, ids[:, :, None])[:, :, 0])
            if given is not None:
                known = step < given.n_proposed[:, None]
                ids = torch.where(known, given.tokens[:, step : step + 1], ids)
                q = None if q is None else torch.where(known[:, :, None], _certain(ids, q), q)
                if sure:
                    sure[-1] = torch.where(known, 1.0, sure[-1])
            drafted = torch.cat([drafted, ids], 1)
            probs += [] if q is None else [q]
        counts = self.model.slots + 1 - state.length
        if self._threshold is not None:
            counts = torch.minimum(counts, _confident(torch.cat(sure, 1), self._threshold))
        return Proposal(drafted, counts, torch.cat(probs, 1) if probs else None)

    def committed(self, lengths: list[int], k: int) -> None:
        """Notes that after a drafted cycle the cache covers all but the last two tokens."""
        self.forwards += k
        for row, length in enumerate(lengths):
            # Rows that ended in plain cycles fed the cache nothing; what a stop cut off is void.
            sound = max(0, length - 2)
            if row not in self._caught_up:
                sound = min(sound, self._covered[row])
            if self._fits(length):
                self._covered[row] = sound


def _certain(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the distribution of tokens that were not drawn, `[B, 1, V]`."""
    return (torch.arange(like.shape[-1], device=ids.device) == ids[:, :, None]).to(like.dtype)


def _confident(sure: torch.Tensor, threshold: float) -> torch.Tensor:
    """Returns how many tokens are proposed, `[B]`: the first doubtful one is the last of them.

    That one must be tested too. Whether a place is proposed may depend on the tokens before it,
    but not on its own: to take back a token for what it is, and draw another from the target,
    would make that token rarer than the target makes it.

    Args:
        sure: `[B, K]`, the probability that the draft gave each of its tokens.
        threshold: Below it a token is doubtful.
    """
    return 1 + (sure[:, :-1] >= threshold).long().cumprod(1).sum(1)
