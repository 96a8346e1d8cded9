"""Mixtures of experts over static shapes.

Transformers sends each token to its experts by index: shapes that depend on data, which no graph
can hold. Here every expert sees every token, and a token's weight for an expert that it did not
choose is 0. The sums are the same, in the same order. While few rows are decoded, all experts are
read either way; a long prompt costs as many times more as there are experts for each one chosen.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


def use_static_experts(model: nn.Module) -> nn.Module:
    """Replaces the routing on the modules of a shadow in place, and returns it."""
    for module in model.modules():
        method = _METHODS.get(type(module).__name__)
        if method is _block and not isinstance(module.experts, nn.ModuleList):
            continue  # Transformers 5 has the loop in the module of the experts
        if method is not None:
            module.forward = types.MethodType(method, module)
    return model


def _block(module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes `[B, T, H]` (Transformers 4); returns the same shape, and the router's logits."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = module.gate(rows)
    weights, chosen = functional.softmax(logits, dim=1, dtype=torch.float).topk(module.top_k, -1)
    if getattr(module, "norm_topk_prob", True):  # Mixtral always does
        weights = weights / weights.sum(-1, keepdim=True)
    experts = [expert.forward for expert in module.experts]
    mixed = _mix(rows, chosen, weights.to(rows.dtype), experts)
    if hasattr(module, "shared_expert"):
        gate = functional.sigmoid(module.shared_expert_gate(rows))
        mixed = mixed + gate * module.shared_expert(rows)
    return mixed.reshape(hidden.shape), logits


def _experts(
    module: nn.Module, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Applies the experts (Transformers 5) to `[N, H]`, `chosen` and `weights` being `[N, k]`."""

    def expert(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def apply(x: torch.Tensor) -> torch.Tensor:
            gate, up = functional.linear(x, module.gate_up_proj[index]).chunk(2, -1)
            return functional.linear(module.act_fn(gate) * up, module.down_proj[index])

        return apply

    return _mix(rows, chosen, weights, [expert(i) for i in range(module.num_experts)])


def _mix(
    rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: list[Callable]
) -> torch.Tensor:
    share = weights.new_zeros(len(rows), len(experts)).scatter(1, chosen, weights)
    mixed = torch.zeros_like(rows)
    for index, expert in enumerate(experts):
        mixed = mixed + (expert(rows) * share[:, index : index + 1]).to(rows.dtype)
    return mixed


_METHODS: dict[str, Callable] = {
    **{f"{name}SparseMoeBlock": _block for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe")},
    **{f"{name}Experts": _experts for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe")},
}
