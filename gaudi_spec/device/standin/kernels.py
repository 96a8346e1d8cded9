"""Fused kernels of the bridge, in plain PyTorch."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

import torch
from torch.nn import functional


class FusedSDPA:
    """Scaled dot product attention, called as `FusedSDPA.apply(...)`."""

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
    ) -> torch.Tensor:
        """Returns attention of `[B, H, T, D]` queries; fewer key heads are shared by several.

        `valid_seq_len` with its padding side is not emulated.
        """
        if valid_seq_len is not None:
            raise NotImplementedError("The emulated FusedSDPA takes a mask, not valid_seq_len.")
        shared = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=shared
        )


class FusedRMSNorm:
    """Root mean square norm, called as `FusedRMSNorm.apply(...)`."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns `[B, T, H]` over its root mean square, times `weight` `[H]`."""
        if x.dim() != 3 or x.dtype != weight.dtype:
            raise RuntimeError("FusedRMSNorm takes three dimensions, and one dtype.")
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)


class RotaryPosEmbeddingMode(enum.Enum):
    """Which elements are rotated together: halves, or neighbours."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """Rotates `p` by angles that are given for each of its elements; halves only."""
    if position_ids is not None or offset or mode is not RotaryPosEmbeddingMode.BLOCKWISE:
        raise NotImplementedError("The emulated rotary embedding takes gathered angles of halves.")
    left, right = p.chunk(2, -1)
    return p * cos + torch.cat([-right, left], -1) * sin


@contextlib.contextmanager
def sdp_kernel(enable_recompute: bool = False) -> Iterator[None]:
    """Context for `FusedSDPA`; recomputing saves memory on the card, and means nothing here."""
    yield


def mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w1: list[torch.Tensor],
    w2: list[torch.Tensor],
    w3: list[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """Returns the weighted sum of the experts `[N, D]` that each token was routed to.

    All experts see all tokens: a graph cannot choose.

    Args:
        hidden_states: `[N, D]`.
        expert_routing_table: `[N, k]`, experts of each token.
        router_weights: `[N, k]`.
        w1: Gate projection `[F, D]` of each expert.
        w2: Up projection, likewise.
        w3: Down projection `[D, F]`.
        permuted_weights: Whether weights are stored as above; only so here.
        activation: Only "silu" here.
        experts_min: Number of the first expert given.
        experts_max: Number of the last one.
    """
    if not permuted_weights or activation != "silu":
        raise NotImplementedError("The emulated experts take permuted weights and silu.")
    total = torch.zeros_like(hidden_states)
    for number, gate, up, down in zip(range(experts_min, experts_max + 1), w1, w2, w3):
        share = (router_weights * (expert_routing_table == number)).sum(-1, keepdim=True)
        inner = functional.silu(hidden_states @ gate.T) * (hidden_states @ up.T)
        total = total + share * (inner @ down.T)
    return total
