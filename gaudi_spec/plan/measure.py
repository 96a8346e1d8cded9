"""`--hardware this`: a short measurement of the machine at hand."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..clock import reading, timed
from ..device import Device
from ..models.equip import equip
from ..models.hf import HFCausalLM
from ..models.shadow import shadow
from .hardware import Hardware

_LAYERS, _WIDE, _REPEATS = 8, 5, 7


@torch.no_grad()
def this_machine(device: Device, dtype: torch.dtype) -> Hardware:
    """Measures the bandwidth of a matrix-vector product, and steps of a small random model.

    Args:
        device: Where.
        dtype: Of weights and cache.
    """
    place = device.torch_device
    per_gb = 1e12 / reading(device, dtype)
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

        run = device.capture(work) if device.captures else work
        return 1000 * statistics.median(timed(device, run, _REPEATS, untimed=2))

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
