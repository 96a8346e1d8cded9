"""Drafting with a smaller language model that has its own slot cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import sampling
from ..buckets import chunks
from ..models.base import ModelAdapter
from ..state import State
from .base import Proposal


class ModelDrafter:
    """Draws proposals greedily from a draft model, one width-1 step per token.

    Every cycle starts by reading the last *two* committed tokens. After a fully accepted cycle
    the draft's cache lacks one entry, otherwise none; rewriting a slot with the same value changes
    nothing, so one shape serves both.

    Args:
        model: The draft with its slot cache.
        vocab_size: V of the target; ids beyond it are never proposed.
        prefill_chunks: Widths in which missing tokens are fed.
        fill: Feeds a chunk of that width of committed tokens, from these indices of each row.
    """

    def __init__(
        self,
        model: ModelAdapter,
        vocab_size: int,
        prefill_chunks: tuple[int, ...],
        fill: Callable[[int, list[int]], None],
    ) -> None:
        self.model = model
        self.forwards = 0
        self.shapes = model.shapes
        self._vocab_size = vocab_size
        self._chunks, self._fill = prefill_chunks, fill
        self._covered: list[int] = []

    def reset(self) -> None:
        """Forgets what the cache covers; the buffers stay."""
        self.forwards = 0
        self._covered = [0] * self.model.cache.batch

    def catch_up(self, state: State, lengths: list[int], live: list[bool]) -> None:
        """Feeds committed tokens that the cache lacks, in chunks; usually there are none."""
        rows = [r for r, alive in enumerate(live) if alive and self.has_room(lengths[r])]
        missing = max((lengths[r] - 2 - self._covered[r] for r in rows), default=0)
        # After a plain cycle the draft was not run, so a gap can be one token; that one is among
        # the two that `propose` reads.
        if missing > 0:
            missing = max(lengths[r] - 1 - self._covered[r] for r in rows)
            offset = 0
            for width in chunks(missing, self._chunks):
                self._fill(width, [covered + offset for covered in self._covered])
                self.forwards += 1
                offset += width
            for row in rows:
                self._covered[row] = lengths[row] - 1

    @property
    def window(self) -> int:
        """Cache slots that attention reads."""
        return self.model.cache.window

    @window.setter
    def window(self, slots: int) -> None:
        self.model.cache.window = min(slots, self.model.slots)

    def has_room(self, length: int) -> bool:
        """Returns whether at least one proposal fits at `length`."""
        return length <= self.model.slots

    def propose(self, state: State, k: int) -> Proposal:
        """Proposes as many tokens as fit into the draft's own slots."""
        at = state.length[:, None]
        pair = (at - 2 + torch.arange(2, device=at.device)).clamp(min=0)
        ids = state.tokens.gather(1, pair)
        drafted = []
        for step in range(k):
            positions = pair if step == 0 else at + (step - 1)
            logits = self.model.forward(ids, positions.clamp(max=self.model.slots - 1), last=True)[
                ..., : self._vocab_size
            ]
            choice, _ = sampling.greedy(logits, at + step, state)
            drafted.append(choice)
            ids = choice
        return Proposal(torch.cat(drafted, 1), self.model.slots + 1 - state.length)

    def committed(self, lengths: list[int], k: int) -> None:
        """Notes that after a drafted cycle the cache covers all but the last two tokens."""
        self.forwards += k
        self._covered = [
            max(0, length - 2) if self.has_room(length) else covered
            for length, covered in zip(lengths, self._covered)
        ]
