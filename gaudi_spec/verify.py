"""Verification kernels: which drafted tokens the target accepts. Pure, batched, no host reads."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """Outcome of one verification.

    Attributes:
        n_accepted: `[B]` int64, leading drafted tokens that the target agrees with.
        tokens: `[B, K+1]` int64; the first `n_accepted + 1` are the target's own choice, or
            distributed as it; the others mean nothing.
    """

    n_accepted: torch.Tensor
    tokens: torch.Tensor


def greedy(drafted: torch.Tensor, chosen: torch.Tensor, n_proposed: torch.Tensor) -> Verdict:
    """Accepts the longest prefix of drafted tokens equal to the target's own choices.

    The greedy case of Leviathan et al. 2022 (arXiv:2211.17192). It also serves where draft and
    target both take the best of their logits under one noise (cf. Daliri et al. 2024,
    arXiv:2408.07978): then the target's choice is what it would draw without a draft.

    Args:
        drafted: `[B, K]` int64, the draft's proposals.
        chosen: `[B, K+1]` int64, the target's choice after each of `[last, d1 .. dK]`.
        n_proposed: `[B]` int64, how many of the K count as proposed in each row.
    """
    match = chosen[:, : drafted.shape[1]] == drafted
    return Verdict(_leading(match, n_proposed), chosen)


def accepted(
    drafted: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None,
    n_proposed: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Returns how many leading drafted tokens rejection sampling accepts, `[B]` int64.

    Each is accepted with probability min(1, p/q) (Leviathan et al. 2022, arXiv:2211.17192; Chen
    et al. 2023, arXiv:2302.01318).

    Args:
        drafted: `[B, K]` int64.
        p: `[B, K+1, V]`, the target's distributions.
        q: `[B, K, V]`, those that the draft drew from; None: each token was certain.
        n_proposed: `[B]` int64, how many of the K count as proposed in each row.
        uniform: `[B, K]` in (0, 1).
    """
    at = drafted[:, :, None]
    mine = p[:, : drafted.shape[1]].gather(2, at)[:, :, 0]
    theirs = 1.0 if q is None else q.gather(2, at)[:, :, 0]
    return _leading(uniform * theirs < mine, n_proposed)


def remainder(
    drafted: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None,
    n_proposed: torch.Tensor,
    n_accepted: torch.Tensor,
) -> torch.Tensor:
    """Returns what the token behind the accepted ones is drawn from, `[B, 1, V]`, not normalised.

    Behind a rejected token that is max(p - q, 0). Behind the last that counted nothing was
    rejected, so it is p itself.

    Args:
        drafted: As for `accepted`.
        p: As for `accepted`.
        q: As for `accepted`.
        n_proposed: As for `accepted`.
        n_accepted: `[B]` int64, its result.
    """
    at = n_accepted[:, None, None]
    mine = p.gather(1, at.expand(-1, 1, p.shape[2]))
    if not drafted.shape[1]:
        return mine
    inside = at.clamp(max=drafted.shape[1] - 1)
    if q is None:
        rejected = drafted.gather(1, inside[:, :, 0])[:, :, None]
        theirs = (torch.arange(p.shape[2], device=p.device) == rejected).to(p.dtype)
    else:
        theirs = q.gather(1, inside.expand(-1, 1, p.shape[2]))
    left = (mine - theirs).clamp(min=0)
    # Where p = q nothing is left, and nothing is rejected but by rounding.
    rejected = (at < n_proposed[:, None, None]) & (left.sum(2, keepdim=True) > 0)
    return torch.where(rejected, left, mine)


def _leading(match: torch.Tensor, n_proposed: torch.Tensor) -> torch.Tensor:
    """Returns how many of the first `n_proposed` flags `[B, K]` are set before the first unset."""
    counts = torch.arange(match.shape[1], device=match.device) < n_proposed[:, None]
    return (match & counts).long().cumprod(1).sum(1)
