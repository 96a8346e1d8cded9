"""Verification kernels: which drafted tokens the target accepts. Pure, batched, no host reads."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """Outcome of one verification.

    Attributes:
        n_accepted: `[B]` int64, leading drafted tokens that the target agrees with.
        tokens: `[B, K+1]` int64; the first `n_accepted + 1` are the target's own choice, so they
            are what plain decoding would have produced.
    """

    n_accepted: torch.Tensor
    tokens: torch.Tensor


def greedy(drafted: torch.Tensor, chosen: torch.Tensor, n_proposed: torch.Tensor) -> Verdict:
    """Accepts the longest prefix of drafted tokens equal to the target's own choices.

    The greedy case of Leviathan et al. 2022 (arXiv:2211.17192).

    Args:
        drafted: `[B, K]` int64, the draft's proposals.
        chosen: `[B, K+1]` int64, the target's choice after each of `[last, d1 .. dK]`.
        n_proposed: `[B]` int64, how many of the K count as proposed in each row.
    """
    k = drafted.shape[1]
    counts = torch.arange(k, device=drafted.device) < n_proposed[:, None]
    match = (chosen[:, :k] == drafted) & counts
    return Verdict(match.long().cumprod(1).sum(1), chosen)
