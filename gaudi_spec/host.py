"""Tokens that Python decides about: processors of the user, one position after the other.

The rows go in step, as in Transformers: a processor is called once for each new token with the ids
of all rows, padded on the left, and never for a position that is not committed. So it may keep a
state. The price is a host read of all logits in every cycle, and that a block ends for all rows
where it ends for one.
"""

from __future__ import annotations

import torch

from . import cycle
from .drafters.base import Proposal
from .errors import InputError
from .sampling.processors import Text
from .sampling.rules import Rules
from .state import State
from .verify import Verdict


def choose(
    state: State, proposal: Proposal, logits: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[Verdict, torch.Tensor]:
    """Decides about a block on the CPU.

    Args:
        state: Device state; it is read, not written.
        proposal: K tokens a row.
        logits: `[B, K+1, V]`, the target's own.
        kept: See `cycle.check`.

    Returns:
        The verdict for all rows, and `[B, K+1]` bool, whether the logits behind each token were
        sound.
    """
    rows, rules = state.rows, state.rules.on_host()
    names = ("tokens", "length", "prompt", "limit", "min_length")
    tokens, length, prompt, limit, least = (getattr(state, n)[:rows].cpu() for n in names)
    tokens, ends, live = tokens.clone(), state.ends.cpu(), ~state.done[:rows].cpu()
    drafted, counts, probs = (x if x is None else x[:rows].cpu() for x in proposal)
    logits, k = logits[:rows].cpu(), drafted.shape[1]
    chosen = torch.zeros(state.batch, k + 1, dtype=torch.long)
    sound = torch.ones(state.batch, k + 1, dtype=torch.bool)
    size = length.clone()
    for t in range(k + 1):
        index = (length + t)[:, None]
        text = Text(tokens, index, prompt, limit, least, ends)
        ids = _running(tokens, prompt, size, live, state.sampling.pad_token_id)
        scores = _process(state, rules, logits[:, t], text, ids)
        one = Proposal(
            drafted[:, t : t + 1],
            (counts > t).long(),
            None if probs is None else probs[:, t : t + 1],
        )
        if kept is not None:
            kept[:, :rows, t].copy_(torch.stack([logits[:, t].float(), scores]))
        places = torch.arange(one.tokens.shape[1] + 1)
        scores = scores[:, None].expand(-1, len(places), -1)
        verdict, fine = cycle.judge(rules, one, scores, index + places)
        token = verdict.tokens[:, :1]
        chosen[:rows, t], sound[:rows, t] = token[:, 0], fine[:, 0]
        tokens.scatter_(1, index, token)
        size += live
        live &= (ends[token[:, 0]] == 0) & (size < limit)
        if not live.any() or (live & (verdict.n_accepted == 0)).any():
            break
    return Verdict(torch.full((state.batch,), t), chosen), sound


def _process(
    state: State, rules: Rules, logits: torch.Tensor, text: Text, ids: torch.Tensor
) -> torch.Tensor:
    """Returns the scores `[B, V]` of one position, all processors in Transformers' order."""
    scores = rules.process(logits.float()[:, None], text, rules.part(0))[:, 0]
    allowed = state.sampling.prefix_allowed_tokens_fn
    if allowed is not None:
        mask = torch.full_like(scores, float("-inf"))
        for row in range(len(ids)):
            tokens = torch.as_tensor(allowed(row, ids[row]), dtype=torch.long)
            if not len(tokens):
                raise InputError(f"prefix_allowed_tokens_fn allows no token in row {row}.")
            mask[row, tokens] = 0
        scores = scores + mask
    scores = rules.process(scores[:, None], text, rules.part(1))[:, 0]
    for processor in state.sampling.logits_processor:
        scores = processor(ids, scores)
    return rules.process(scores.float()[:, None], text, rules.part(2))[:, 0]


def _running(
    tokens: torch.Tensor, prompt: torch.Tensor, size: torch.Tensor, live: torch.Tensor, pad: int
) -> torch.Tensor:
    """Returns the ids that plain generation would have by now, `[B, W + new]`."""
    width, new = int(prompt.max()), int((size - prompt)[live].max())
    ids = torch.full((len(tokens), width + new), pad)
    for row, (own, begin, n) in enumerate(zip(tokens, prompt.tolist(), size.tolist())):
        ids[row, width - begin : width - begin + n] = own[:n]
    return ids
