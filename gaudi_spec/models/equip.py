"""Kernels of a device in Transformers' modules: each replaces one computation on a shadow.

A module takes a kernel only if it computes what the kernel computes, which is tried on random
numbers where a class name does not tell.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ConfigError
from ..quant.linear import FewRowsInt8
from .attention import attend_with, is_plain

FUSED = "gaudi_spec_fused"


def equip(
    model: nn.Module, kernels: Mapping[str, Any], names: Sequence[str] | None = None
) -> nn.Module:
    """Makes a shadow of a model use kernels, and returns it.

    Args:
        model: From `shadow`, on the device; changed in place.
        kernels: From `Device.kernels`.
        names: Which of them; None takes all.

    Raises:
        ConfigError: There is no kernel of that name.
    """
    for name in kernels if names is None else names:
        if name not in kernels:
            have = f"choose from {', '.join(kernels)}" if kernels else "it has none"
            raise ConfigError(f"This device has no kernel {name!r}: {have}.")
        _APPLY[name](model, kernels[name])
    return model


def _linear(model: nn.Module, kernel: Any) -> None:
    """Swaps the class of linear layers for a subclass with the kernel that knows which fit."""
    kinds: dict[Any, Any] = {kind.__base__: kind for kind in (kernel, FewRowsInt8)}
    for module in model.modules():
        kind = kinds.get(type(module))
        if kind is not None and kind.fits(module):
            module.__class__ = kind


def _sdpa(model: nn.Module, kernel: Callable) -> None:
    """Attends with `kernel(query, key, value, mask, scale)`; keys may have fewer heads."""

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        if not is_plain(attention_mask, kwargs):
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **kwargs
            )
        mask = attention_mask[..., : key.shape[2]]
        return kernel(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(FUSED, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FUSED, sdpa_mask)
    attend_with(model, FUSED)


def _rms_norm(model: nn.Module, kernel: Callable) -> None:
    """Normalizes with `kernel(x, weight, eps)`, x being `[B, T, H]`."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, *x.shape[-2:]) if x.dim() > 2 else x[None]
        return kernel(flat.to(module.weight.dtype), module.weight, _eps(module)).reshape(x.shape)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_rms_norm(module):
            module.forward = types.MethodType(forward, module)


def _eps(module: nn.Module) -> float:
    return getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0)


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    """Returns whether x is divided by its root mean square and multiplied by the weight."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1:
        return False
    x = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None, None]
    plain = x.float() * torch.rsqrt(x.float().square().mean() + _eps(module)) * weight.float()
    return torch.allclose(module(x).float(), plain, rtol=2e-2, atol=1e-3)


def _rope(model: nn.Module, kernel: Callable) -> None:
    """Rotates queries and keys `[B, H, T, D]` with `kernel(x, cos, sin)`, these `[B, 1, T, D]`."""

    def rotate(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return kernel(q, cos, sin), kernel(k, cos, sin)

    name = "apply_rotary_pos_emb"
    for module in model.modules():
        method = inspect.unwrap(type(module).forward)
        theirs = getattr(method, "__globals__", {}).get(name)
        if theirs is None or name not in method.__code__.co_names or not _is_rope(theirs):
            continue
        # The function of the shadow alone is replaced: the module's globals are everybody's.
        own = types.FunctionType(
            method.__code__,
            {**method.__globals__, name: rotate},
            method.__name__,
            method.__defaults__,
            method.__closure__,
        )
        own.__kwdefaults__ = method.__kwdefaults__
        module.forward = types.MethodType(own, module)


def _is_rope(function: Callable) -> bool:
    """Returns whether halves are rotated, of whole heads and by angles as they are given."""
    if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    q, k, cos, sin = torch.linspace(-1, 1, 4 * 24).reshape(4, 1, 1, 3, 8)
    got = function(q, k, cos[:, 0], sin[:, 0])
    turned = (torch.cat([-x[..., 4:], x[..., :4]], -1) for x in (q, k))
    want = (x * cos + y * sin for x, y in zip((q, k), turned))
    return all(torch.allclose(a, b) for a, b in zip(got, want))


_APPLY = {"linear": _linear, "sdpa": _sdpa, "rms_norm": _rms_norm, "rope": _rope}
