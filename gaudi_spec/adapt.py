"""The caller's model made ready to run: over a slot cache, with the device's kernels, quantized."""

from __future__ import annotations

import functools
from typing import Any

from .config import SpecConfig
from .device import Device
from .errors import UnsupportedOptionError
from .models.capturable import capturable
from .models.equip import equip
from .models.experts import use_static_experts
from .models.gaudi import is_gaudi
from .models.habana import HabanaCausalLM
from .models.hf import HFCausalLM
from .models.shadow import shadow
from .quant.apply import quantize
from .quant.kv import kv_format


def adapt(
    model: Any, role: str, device: Device, config: SpecConfig, batch: int, slots: int
) -> HFCausalLM:
    """Returns the caller's `model` over a cache of its own, quantized as its role is.

    Raises:
        UnsupportedOptionError: A model of Optimum Habana's classes is to be quantized.
    """
    quant = config.quant(role)
    if is_gaudi(model):  # with kernels of its own
        if quant.scheme not in ("auto", "none") or quant.kv_dtype != "auto":
            raise UnsupportedOptionError(
                f"{role}_quant and {role}_kv_dtype are for models as Transformers has them: leave "
                "them out with Optimum Habana's classes."
            )
        options = config.forward_options
        return HabanaCausalLM(capturable(shadow(model)), batch, slots, options)
    ours = quantize(capturable(shadow(model, device.nests)), quant, device)
    if config.captures(device.captures):
        use_static_experts(ours)
    kv = functools.partial(kv_format, quant.kv_dtype, limit=device.fp8_limit, pow2=device.fp8_pow2)
    return HFCausalLM(equip(ours, device.kernels(), config.kernels), batch, slots, kv)
