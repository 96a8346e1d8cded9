"""Attention over the slot cache that reads each key and value once, however many heads share them.

Transformers' SDPA copies the cache for every query head of a group before it attends. Here the
query heads of a group are rows of one query instead: same sums, a fraction of the memory traffic.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "gaudi_spec"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends; arguments as for every attention function of Transformers.

    Args:
        module: The attention layer.
        query: `[B, H, T, D]`.
        key: `[B, H_kv, W, D]`, any strides.
        value: Like `key`.
        attention_mask: `[B, 1, T, W]`, added to the scores.
        dropout: Ignored: layers are in eval mode.
        scaling: Factor of the scores; None means 1 / sqrt(D).
        **kwargs: What some families pass besides; they then get Transformers' own function.

    Returns:
        `[B, T, H, D]`, and None for the weights.
    """
    if not is_plain(attention_mask, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    batch, heads, width, _ = query.shape
    shared = heads // key.shape[1]
    mask = attention_mask[..., : key.shape[2]].expand(batch, shared, width, key.shape[2])
    mixed = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], shared * width, -1),
        key,
        value,
        attn_mask=mask.reshape(batch, 1, shared * width, -1),
        scale=scaling,
    )
    return mixed.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def is_plain(mask: torch.Tensor | None, options: dict[str, Any]) -> bool:
    """Returns whether attention is softmax over scores plus one mask for all heads."""
    special = ("softcap", "position_bias", "s_aux")
    extra = any(options.get(name) is not None for name in special)
    return mask is not None and mask.shape[1] == 1 and not extra


def use_grouped_attention(model: nn.Module) -> nn.Module:
    """Makes a shadow attend with `grouped_attention` where it would use SDPA."""
    return attend_with(model, NAME)


def attend_with(model: nn.Module, name: str) -> nn.Module:
    """Makes a shadow attend with a registered function where it would use SDPA.

    Args:
        model: From `shadow`; its config is replaced by a copy, the caller's stays as it is.
        name: In Transformers' registry.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return model
    ours = copy.copy(config)
    ours._attn_implementation = name
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = ours
    return model


ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
