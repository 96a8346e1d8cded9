"""One draft-verify-commit cycle as pure tensor code: no Python decision depends on data.

Shapes: B rows, K drafted tokens, V vocabulary. The host reads one packed tensor afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import sampling, verify
from .drafters.base import Drafter
from .models.base import ModelAdapter
from .state import State


class RowOutcome(NamedTuple):
    """What one cycle did to one row, as read by the host.

    Attributes:
        n_emitted: Tokens committed.
        n_accepted: How many of those were drafted.
        n_proposed: Drafted tokens that counted.
        done: 0 while the row goes on, 1 if it is finished, 2 if it was finished just now by an
            end-of-text token.
        n_unsound: Committed tokens whose logits were NaN or infinite.
        tokens: The `n_emitted` ids.
        vectors: `[2, n_emitted, V]` float32, the logits that each was chosen by and the same
            after processing; None unless they are kept.
    """

    n_emitted: int
    n_accepted: int
    n_proposed: int
    done: int
    n_unsound: int
    tokens: list[int]
    vectors: torch.Tensor | None = None

    def cut(self, count: int) -> RowOutcome:
        """Returns the outcome of a row that ended after `count` of these tokens."""
        accepted = min(self.n_accepted, count)
        return self._replace(n_emitted=count, n_accepted=accepted, tokens=self.tokens[:count])


def fill(state: State, model: ModelAdapter, width: int) -> torch.Tensor:
    """Feeds `width` committed tokens of each row, from `state.cursor` on, into the model's cache.

    What lies at or beyond a row's length is stale; its slots are hidden by the mask until they
    are written again. Returns what `ModelAdapter.fill` does.
    """
    positions = state.cursor[:, None] + torch.arange(width, device=state.cursor.device)
    positions = positions.clamp(max=model.slots - 1)
    return model.fill(state.tokens.gather(1, positions), positions)


def draft(state: State, drafter: Drafter | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns proposals `[B, k]` and how many of them count in each row `[B]`.

    A row with r tokens of budget left can use r - 1 proposals, since every cycle adds one token
    of the target's own: K is clipped by masking, never by shape.
    """
    if drafter is None or k == 0:
        return state.tokens[:, :0], torch.zeros_like(state.length)
    proposal = drafter.propose(state, k)
    usable = torch.minimum(state.limit - state.length - 1, proposal.n_proposed)
    return proposal.tokens, usable.clamp(min=0, max=k)


def check(
    state: State,
    target: ModelAdapter,
    drafted: torch.Tensor,
    n_proposed: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Verifies `drafted` `[B, K]` in one target forward and commits the outcome to `state`.

    Args:
        state: Tokens and lengths.
        target: The target.
        drafted: Proposals.
        n_proposed: `[B]`, how many of them count.
        kept: `[2, B, K+1, V]` float32 that receives the logits, as they come and processed, where
            somebody wants them.

    Returns:
        `[B, 5 + K + 1]` int64, one `RowOutcome` a row; `unpack` reads it.
    """
    offset = torch.arange(drafted.shape[1] + 1, device=drafted.device)
    index = state.length[:, None] + offset
    last = state.tokens.gather(1, state.length[:, None] - 1)
    # The last slot is never needed by a committed token (the last token of a full row is not fed),
    # so every position past the end can share it.
    logits = target.forward(torch.cat([last, drafted], 1), (index - 1).clamp(max=target.slots - 1))
    if kept is not None:
        kept.copy_(torch.stack([logits, sampling.block_early_eos(logits, index, state)]))
    chosen, sound = sampling.greedy(logits, index, state)
    verdict = verify.greedy(drafted, chosen, n_proposed)
    return _commit(state, verdict, n_proposed, sound)


def _commit(
    state: State, verdict: verify.Verdict, n_proposed: torch.Tensor, sound: torch.Tensor
) -> torch.Tensor:
    offset = torch.arange(verdict.tokens.shape[1], device=sound.device)
    eos = state.is_eos(verdict.tokens)
    after_eos = eos.long().cumsum(1) - eos.long() > 0
    live = ~state.done[:, None]
    keep = (offset <= verdict.n_accepted[:, None]) & ~after_eos & live
    n_emitted = keep.sum(1)
    state.tokens.scatter_(1, state.length[:, None] + offset, verdict.tokens)
    state.length.add_(n_emitted)
    ended = (keep & eos).sum(1) > 0
    state.done.logical_or_(ended | (state.length >= state.limit))
    facts = (
        n_emitted,
        torch.minimum(verdict.n_accepted, n_emitted),
        n_proposed * live[:, 0],
        state.done.long() + ended.long(),
        (keep & ~sound).sum(1),
    )
    return torch.cat([torch.stack(facts, 1), verdict.tokens], 1)


def unpack(packed: torch.Tensor, kept: torch.Tensor | None = None) -> list[list[RowOutcome]]:
    """Reads the packed outcomes of some cycles, `[N, B, 5 + K + 1]`, in one host read.

    Args:
        packed: What `check` returned.
        kept: What it kept, if it did; then N is 1.
    """
    cycles = [
        [RowOutcome(*row[:5], row[5 : 5 + row[0]]) for row in rows] for rows in packed.tolist()
    ]
    if kept is not None:
        kept = kept.to("cpu", copy=True)
        rows = enumerate(cycles[0])
        cycles = [[facts._replace(vectors=kept[:, r, : facts.n_emitted]) for r, facts in rows]]
    return cycles
