"""`--hardware this`: a short measurement of the machine at hand."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..clock import reading, timed
from ..config import Quant
from ..device import Device
from ..models.equip import equip
from ..models.hf import HFCausalLM
from ..models.shadow import shadow
from ..quant.apply import quantize
from .hardware import Hardware
from .memory import weight_bytes
from .sizes import weights

_LAYERS, _WIDE, _REPEATS = 8, 5, 7


def this_machine(device: Device, dtype: torch.dtype, int8: bool = False) -> Hardware:
    """Measures the bandwidth of a matrix-vector product, and steps of a small random model.

    Args:
        device: Where.
        dtype: Of weights and cache.
        int8: Measure steps of 8-bit weights too.
    """
    per_gb = 1e12 / reading(device, dtype)
    plain = _measured(device, dtype, per_gb, Quant("none"))
    return replace(plain, int8=_measured(device, dtype, per_gb, Quant("int8")) if int8 else None)


@torch.no_grad()
def _measured(device: Device, dtype: torch.dtype, per_gb: float, quant: Quant) -> Hardware:
    place = device.torch_device
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
    ours = quantize(shadow(model), quant, device)
    adapter = HFCausalLM(equip(ours, device.kernels()), 1, 256)  # with the engine's own kernels
    counted = weights(model)
    read, width = counted["parameters"] - counted["table"], dtype.itemsize
    size = weight_bytes(counted["linear"], quant.scheme, width, read)
    gigabytes = (size + adapter.cache.slots * 2 * 4 * 64 * _LAYERS * width) / 1e9

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
