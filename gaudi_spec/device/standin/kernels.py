"""Fused kernels of the bridge, in plain PyTorch."""

from __future__ import annotations

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
