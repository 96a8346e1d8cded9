"""Methods of Transformers' modules that no HPU graph can hold, in a form that one can.

Each is replaced on our shadow of a model, never on the caller's, and computes the same values.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


def capturable(model: nn.Module) -> nn.Module:
    """Replaces such methods on the modules of `model` in place, and returns it."""
    for module in model.modules():
        for name, method in _METHODS.get(type(module).__name__, {}).items():
            setattr(module, name, types.MethodType(method, module))
    return model


def _falcon_split_heads(
    module: nn.Module, fused: torch.Tensor, broadcast: bool = True
) -> tuple[torch.Tensor, ...]:
    """Splits `[B, T, heads]` into queries, keys and values by slices.

    Falcon's own indexes with the lists [-2] and [-1]: a tensor made from host data, and a gather.
    Optimum Habana's says whether keys and values are repeated for each query head.
    """
    rows, width, _ = fused.shape
    groups = 1
    if module.new_decoder_architecture:
        groups = module.num_kv_heads
    elif not module.multi_query:
        heads = fused.view(rows, width, module.num_heads, 3, module.head_dim)
        return heads[..., 0, :], heads[..., 1, :], heads[..., 2, :]
    heads = fused.view(rows, width, groups, module.num_heads // groups + 2, module.head_dim)
    query, key, value = heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
    if module.new_decoder_architecture and broadcast:
        key, value = key.expand_as(query), value.expand_as(query)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _gptj_rotary(
    module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Looks sines and cosines up as embeddings, not by advanced indexing (Transformers 5)."""
    table = functional.embedding(position_ids, module.embed_positions).to(x.dtype)
    return table.chunk(2, -1)


_METHODS: dict[str, dict[str, Callable]] = {
    "FalconAttention": {"_split_heads": _falcon_split_heads},
    "GaudiFalconAttention": {"_split_heads": _falcon_split_heads},
    "GPTJRotaryEmbedding": {"forward": _gptj_rotary},
}
