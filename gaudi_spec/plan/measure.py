"""`--hardware this`: a short measurement of the machine at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..device import Device
from ..models.equip import equip
from ..models.hf import HFCausalLM
from ..models.shadow import shadow
from .hardware import Hardware

_MEGABYTES = 256  # more than any cache of a processor holds
_LAYERS, _WIDE, _REPEATS = 8, 5, 7


@torch.no_grad()
def this_machine(device: Device, dtype: torch.dtype) -> Hardware:
    """Measures the bandwidth of a matrix-vector product, and steps of a small random model.

    Args:
        device: Where.
        dtype: Of weights and cache.
    """
    place = device.torch_device
    per_gb = _reading(device, dtype)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    model: Any = LlamaForCausalLM(config).eval()
    model.to(place, dtype)
    adapter = HFCausalLM(
        equip(shadow(model), device.kernels()), 1, 256
    )  # with the engine's own kernels
    read = sum(p.numel() for p in model.parameters()) - 2048 * 512
    gigabytes = (read + adapter.cache.slots * 2 * 4 * 64 * _LAYERS) * dtype.itemsize / 1e9

    def step(width: int) -> float:
        ids = torch.zeros(1, width, dtype=torch.long, device=place)
        positions = torch.arange(width, device=place)[None]

        def work() -> torch.Tensor:
            return adapter.forward(ids, positions)

        return _time(device, device.capture(work) if device.captures else work)

    one, wide = step(1), step(_WIDE)
    tflop = 2 * read / 1e12
    per_tflop = max(wide - one, 0.0) / (_WIDE - 1) / tflop
    per_layer = max(one - per_gb * gigabytes - per_tflop * tflop, 0.0) / _LAYERS
    return Hardware(
        "this",
        device.memory()["total"],
        per_layer,
        per_gb,
        per_tflop,
        source=f"measured now on this machine ({device.describe()})",
        cards=1,
        label="projected from a measurement of this machine",
    )


def _reading(device: Device, dtype: torch.dtype) -> float:
    """Returns the ms that reading a GB takes in a matrix-vector product."""
    columns = 1024
    shape = (_MEGABYTES * 1_000_000 // (columns * dtype.itemsize), columns)
    matrix = torch.zeros(shape, dtype=dtype, device=device.torch_device)
    vector = torch.ones(columns, dtype=dtype, device=device.torch_device)
    return _time(device, lambda: matrix @ vector) / (matrix.nbytes / 1e9)


def _time(device: Device, work: Callable[[], object]) -> float:
    """Returns the median ms of `work`, warmed up."""
    times = []
    for _ in range(_REPEATS + 2):
        device.synchronize()
        begin = time.perf_counter()
        work()
        device.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])
