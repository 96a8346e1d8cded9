"""Puts quantized layers into a model's shadow; the caller's model stays as it is."""

from __future__ import annotations

import copy
import fnmatch
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from ..config import UNQUANTIZED, Quant, refuse_quant
from ..device import Device
from ..errors import ConfigError
from .kv import kv_modules
from .linear import KINDS, Int4WeightOnly, QuantLinear

# Weight of the caller's -> (version, bias, recipe) -> the layer made of it, for the next engine.
_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def checkpoint_scheme(config: Any) -> str | None:
    """Returns by which method a checkpoint with this config was quantized, or None."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def check(quant: Quant, model: Any, role: str, device: Device) -> None:
    """Refuses what cannot be done with this model on this device.

    Args:
        quant: Settings of the role.
        model: The caller's model, or None if the role has none.
        role: "target" or "draft".
        device: Where it runs.

    Raises:
        ConfigError: Settings for a draft without a draft; another scheme for weights or layers that
            are quantized already; patterns without a scheme; a scheme that the device has no kernel
            for; patterns or a scheme that leave no layer.
    """
    if model is None:
        refuse_quant(quant, role)
        return
    stored = checkpoint_scheme(model.config)
    if stored is not None and quant.scheme != "auto":
        raise ConfigError(
            f"The {role}'s weights are quantized already ({stored}), so {role}_quant="
            f"{quant.scheme!r} cannot be applied: leave it at 'auto'."
        )
    done = {module.scheme for module in model.modules() if isinstance(module, QuantLinear)}
    if done and quant.scheme not in ("auto", *done):
        raise ConfigError(
            f"The {role}'s layers are {', '.join(sorted(done))} already, so {role}_quant="
            f"{quant.scheme!r} cannot be applied: load the model again."
        )
    if kv_modules(model) and quant.kv_dtype != "auto":
        raise ConfigError(
            f"The {role} was converted by Neural Compressor, which decides what its cache holds: "
            f"leave {role}_kv_dtype at 'auto'."
        )
    if quant.scheme in ("auto", "none"):
        if quant.exclude != UNQUANTIZED:
            raise ConfigError(
                f"{role}_quant_exclude says what {role}_quant leaves out: give {role}_quant too, "
                "or leave it out."
            )
        return
    if quant.scheme not in device.quant_schemes:
        hint = device.quant_hint.format(role=role)
        raise ConfigError(f"{role}_quant={quant.scheme!r} has no kernel on {device.name}: {hint}")
    if not done and not _layers(model, quant):
        raise ConfigError(
            f"{role}_quant={quant.scheme!r} fits no layer of the {role}: "
            f"{role}_quant_exclude leaves none, or their sizes do not suit the scheme."
        )


def quantize(shadow: nn.Module, quant: Quant, device: Device) -> nn.Module:
    """Replaces the linear layers of a shadow in place, and returns it.

    Args:
        shadow: From `models/shadow.py`: its module tree is ours, its tensors are the caller's.
            Layers that are quantized already stay.
        quant: Settings of the role; "auto" and "none" leave all as it is.
        device: Where it runs.
    """
    if quant.scheme in KINDS:
        for name in _layers(shadow, quant):
            parent, _, child = name.rpartition(".")
            owner = shadow.get_submodule(parent)
            made = _replaced(getattr(owner, child), quant.scheme, device)
            owner._modules[child] = copy.copy(made)  # a shadow: engines differ in kernels
    return shadow


def replace(model: nn.Module, quant: Quant, role: str, device: Device) -> None:
    """Quantizes in place a model that nobody else holds, so that what it had is freed.

    Engines and `check` take it with the same settings. Arguments and errors are those of `check`.
    """
    check(quant, model, role, device)
    quantize(model, quant, device)


def versions(model: nn.Module) -> int:
    """Returns a number that changes when a weight is written to, which makes codes stale."""
    return hash(tuple(_version(tensor) for tensor in model.parameters()))


def _layers(model: nn.Module, quant: Quant) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and not any(
            fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"*.{p}")
            for p in quant.exclude
        )
        and (quant.scheme != "int4wo" or Int4WeightOnly.fits(*_weight(module).shape))
    ]


def _weight(module: nn.Linear | Conv1D) -> torch.Tensor:
    """Returns the weight of a linear layer, `[outputs, inputs]`."""
    weight = module.weight.detach()
    return weight.t() if isinstance(module, Conv1D) else weight


def _replaced(module: Any, scheme: str, device: Device) -> QuantLinear:
    recipe = (scheme, device.fp8_limit, device.fp8_pow2)
    key = (_version(module.weight), id(module.bias), *recipe)
    layer = _made.get(module.weight, {}).get(key)
    if layer is None:
        limits = (device.fp8_limit, device.fp8_pow2) if scheme == "fp8" else ()
        with torch.no_grad():
            layer = KINDS[scheme](_weight(module).contiguous(), module.bias, *limits).eval()
        # One at a time: codes of a former recipe are of no use. Replaced, since threads share it.
        _made[module.weight] = {key: layer}
    return layer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
