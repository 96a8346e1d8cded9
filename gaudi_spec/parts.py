"""What a cycle is made of: one piece of work, or several with buffers or the host between them."""

from __future__ import annotations

import torch

from . import cycle, host
from .blocks import Blocks
from .drafters.base import Drafter, Proposal
from .graphs import Work
from .models.base import ModelAdapter
from .state import State


class Parts:
    """The work of cycles over the buffers of one pair.

    Args:
        state: Tokens and lengths.
        target: The target.
        drafter: What proposes, or None; may be replaced.
        blocks: What one part leaves to the next.
        fused: Draft and verify as one part, where the host has nothing to do in between; may
            change between calls.
    """

    def __init__(
        self,
        state: State,
        target: ModelAdapter,
        drafter: Drafter | None,
        blocks: Blocks,
        fused: bool,
    ) -> None:
        self._state, self._target, self.drafter = state, target, drafter
        self._blocks, self.fused = blocks, fused

    def of(self, k: int, verified: int, window: int) -> list[tuple[str, int, Work]]:
        """Returns the parts of a cycle: the role, the K that the part depends on, and its work.

        Args:
            k: Drafted tokens.
            verified: How many of them are verified: k, or fewer if no live row proposes more.
            window: Attention window.
        """
        state, target, blocks = self._state, self._target, self._blocks
        kept = blocks.kept(verified)

        def propose() -> Proposal:
            if self.drafter is not None:
                self.drafter.window = window
            return cycle.draft(state, self.drafter, k)

        def check(proposal: Proposal) -> torch.Tensor:
            target.cache.window = window
            return blocks.note(cycle.check(state, target, proposal, kept))

        if self.fused and not state.sampling.on_host:
            return [("cycle", k, lambda: check(propose()))]
        rejects = state.rules.structure.verifier == "rejection"
        drawn = k > 0 and rejects and self.drafter is not None and self.drafter.draws
        whole = blocks.proposal(k, drawn)
        block = whole.first(verified)

        def first() -> torch.Tensor:
            for buffer, value in zip(whole, propose()):
                if buffer is not None:
                    buffer.copy_(value)
            return torch.where(state.done, 0, whole.n_proposed).amax()

        if not state.sampling.on_host:
            return [("draft", k, first), ("verify", verified, lambda: check(block))]
        logits, verdict, sound = blocks.decided(verified)

        def score() -> None:
            target.cache.window = window
            logits.copy_(cycle.score(state, target, block)[0])

        def decide() -> None:
            (n_accepted, tokens), fine = host.choose(state, block, logits, kept)
            for buffer, value in zip((*verdict, sound), (n_accepted, tokens, fine)):
                buffer.copy_(value)

        def commit() -> torch.Tensor:
            return blocks.note(cycle.commit(state, verdict, block.n_proposed, sound))

        parts = [("draft", k, first), ("score", verified, score)]
        return [*parts, ("host", verified, decide), ("commit", verified, commit)]
