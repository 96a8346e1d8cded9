"""Formats of what a cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import fp8
from .linear import int8_codes


@dataclass(frozen=True)
class KvFormat:
    """Keys and values in a cache; this one stores them as they are, cast to `store`.

    Attributes:
        name: As in `SpecConfig.target_kv_dtype`, or the dtype of the model.
        store: Dtype of the buffers.
        compute: Dtype in which attention reads.
        scaled: Whether each token and head has a scale beside its codes.
    """

    name: str
    store: torch.dtype
    compute: torch.dtype
    scaled: bool = False

    @property
    def coarse(self) -> bool:
        """Whether less comes back than was stored."""
        return self.store != self.compute

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns codes like `states` `[N, H_kv, D]`, and scales `[N, H_kv, 1]` if there are."""
        return (states.to(self.store),)

    def decode(self, codes: torch.Tensor, *scale: torch.Tensor) -> torch.Tensor:
        """Returns what was stored, in `compute`; the shape is that of `codes`."""
        return codes.to(self.compute)


class _Int8(KvFormat):
    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scale = int8_codes(states)
        return codes, scale.to(self.compute)

    def decode(self, codes: torch.Tensor, *scale: torch.Tensor) -> torch.Tensor:
        return codes.to(self.compute) * scale[0]


@dataclass(frozen=True)
class _Fp8(KvFormat):
    """e4m3 as bytes: not every device copies 8-bit floats by index."""

    limit: float = 448.0
    pow2: bool = False

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = fp8.scale_for(states, self.limit, self.pow2)
        codes = fp8.cast(states.float() / scale, self.limit)
        return codes.view(self.store), scale.to(self.compute)

    def decode(self, codes: torch.Tensor, *scale: torch.Tensor) -> torch.Tensor:
        return codes.view(fp8.E4M3).to(self.compute) * scale[0]


class KVCache(nn.Module):
    """Writes one layer's keys or values; Neural Compressor knows it by this name and its methods.

    On a card it puts a module of its own in the place of this one, which converts what is written
    and what is read.
    """

    def allocate(self, inp_seq_len, dtype, device, shape) -> torch.Tensor:
        """Returns zeros of `shape`."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def update(self, prev, cur, dim, idx, inp_seq_len) -> torch.Tensor:
        """Writes `cur` at `idx` of `prev` along `dim`, and returns all of `prev`."""
        return prev.index_copy_(dim, idx, cur)

    def get_shape(self) -> None:
        """Is there to be replaced."""

    def forward(self, prev, cur, dim, idx, inp_seq_len=None) -> torch.Tensor:
        """Calls `update`."""
        return self.update(prev, cur, dim, idx, inp_seq_len)


def kv_modules(model: nn.Module) -> list[tuple[Any, Any]]:
    """Returns Neural Compressor's writers of keys and values of each layer, or nothing."""
    found: dict[Any, tuple[Any, Any]] = {
        module.layer_idx: (module.k_cache, module.v_cache)
        for module in model.modules()
        if hasattr(module, "k_cache") and type(module.k_cache) is not KVCache
    }
    return [found[index] for index in sorted(found)]


def add_kv_modules(model: nn.Module) -> nn.Module:
    """Gives every attention layer a `k_cache` and a `v_cache`, in place, and returns the model."""
    layers = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    for module in layers:
        if type(module).__name__.endswith("Attention"):
            module.k_cache, module.v_cache = KVCache(), KVCache()
    return model


def kv_format(name: str, compute: torch.dtype, limit: float, pow2: bool) -> KvFormat:
    """Returns the format called `name`.

    Args:
        name: A value of `SpecConfig.target_kv_dtype`.
        compute: Dtype of the model's keys and values.
        limit: Largest e4m3 value of the device.
        pow2: Whether the device's e4m3 scales are powers of two.
    """
    if name == "int8":
        return _Int8(name, torch.int8, compute, True)
    if name == "fp8":
        return _Fp8(name, torch.uint8, compute, True, limit, pow2)
    store = torch.bfloat16 if name == "bf16" else compute
    return KvFormat(str(store).removeprefix("torch."), store, compute)
