"""One draft-verify-commit cycle as pure tensor code: no Python decision depends on data.

Shapes: B rows, K drafted tokens, V vocabulary. The host reads one packed tensor afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import verify
from .drafters.base import Drafter, Proposal
from .models.base import ModelAdapter
from .sampling import noise
from .sampling.rules import Rules
from .state import State

FACTS = 5  # numbers in front of the tokens of a packed outcome


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

    @property
    def rejected(self) -> bool:
        """Whether a proposal was tested and rejected; one behind the end of text was not."""
        return self.n_accepted < min(self.n_proposed, self.n_emitted)

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


def draft(state: State, drafter: Drafter | None, k: int) -> Proposal:
    """Returns what is proposed, `n_proposed` saying how many tokens count in each row.

    A row with r tokens of budget left can use r - 1 proposals, since every cycle adds one token
    of the target's own: K is clipped by masking, never by shape.
    """
    if drafter is None or k == 0:
        return Proposal(state.tokens[:, :0], torch.zeros_like(state.length))
    proposal = drafter.propose(state, k)
    usable = torch.minimum(state.limit - state.length - 1, proposal.n_proposed)
    return proposal._replace(n_proposed=usable.clamp(min=0, max=k))


def check(
    state: State, target: ModelAdapter, proposal: Proposal, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Verifies K proposals in one target forward and commits the outcome to `state`.

    Args:
        state: Tokens and lengths.
        target: The target.
        proposal: K tokens a row.
        kept: `[2, B, K+1, V]` float32 that receives the logits, as they come and processed, where
            somebody wants them.

    Returns:
        `[B, 5 + K + 1]` int64, one `RowOutcome` a row; `unpack` reads it.
    """
    raw, index = score(state, target, proposal)
    logits = state.rules.process(raw, state.text(proposal.tokens, index))
    if kept is not None:
        kept.copy_(torch.stack([raw, logits]))
    verdict, sound = judge(state.rules, proposal, logits, index)
    return commit(state, verdict, proposal.n_proposed, sound)


def score(
    state: State, target: ModelAdapter, proposal: Proposal
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the target's logits `[B, K+1, V]` over a block, and the indices they are for."""
    offset = torch.arange(proposal.tokens.shape[1] + 1, device=state.device)
    index = state.length[:, None] + offset
    last = state.tokens.gather(1, state.length[:, None] - 1)
    ids = torch.cat([last, proposal.tokens], 1)
    # The last slot is never needed by a committed token (the last token of a full row is not fed),
    # so every position past the end can share it.
    return target.forward(ids, (index - 1).clamp(max=target.slots - 1)), index


def judge(
    rules: Rules, proposal: Proposal, logits: torch.Tensor, index: torch.Tensor
) -> tuple[verify.Verdict, torch.Tensor]:
    """Decides about a block.

    Args:
        rules: How tokens are chosen.
        proposal: K tokens a row.
        logits: `[B, K+1, V]`, processed.
        index: `[B, K+1]` int64, absolute positions.

    Returns:
        The verdict, and whether the logits at each place are sound `[B, K+1]` bool: NaN or an
        infinite maximum is not.
    """
    best, chosen = logits.max(-1)
    return _verdict(rules, proposal, logits, index, chosen), torch.isfinite(best)


def _verdict(
    rules: Rules,
    proposal: Proposal,
    logits: torch.Tensor,
    index: torch.Tensor,
    chosen: torch.Tensor,
) -> verify.Verdict:
    drafted, counts = proposal.tokens, proposal.n_proposed
    if rules.structure.verifier == "greedy":
        return verify.greedy(drafted, chosen, counts)
    p = logits.softmax(-1)
    if rules.structure.verifier == "coupled":
        return verify.greedy(drafted, rules.draw(p, index, noise.TARGET), counts)
    uniform = noise.uniform(rules.keys, index[:, :-1], noise.ACCEPT)
    n_accepted = verify.accepted(drafted, p, proposal.probs, counts, uniform)
    left = verify.remainder(drafted, p, proposal.probs, counts, n_accepted)
    own = rules.draw(left, index[:, :1] + n_accepted[:, None], noise.TARGET)
    offset = torch.arange(index.shape[1], device=index.device)
    behind = torch.cat([drafted, own], 1)
    return verify.Verdict(n_accepted, torch.where(offset < n_accepted[:, None], behind, own))


def commit(
    state: State, verdict: verify.Verdict, n_proposed: torch.Tensor, sound: torch.Tensor
) -> torch.Tensor:
    """Writes a verdict into `state`; returns what `check` does."""
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
        [RowOutcome(*row[:FACTS], row[FACTS : FACTS + row[0]]) for row in rows]
        for rows in packed.tolist()
    ]
    if kept is not None:
        kept = kept.to("cpu", copy=True)
        rows = enumerate(cycles[0])
        cycles = [[facts._replace(vectors=kept[:, r, : facts.n_emitted]) for r, facts in rows]]
    return cycles
