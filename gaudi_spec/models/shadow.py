"""A module tree of our own over the caller's weights.

The engine runs a model in eval mode and marks its layers for the compiler, and the caller's model
must not be changed. A shadow copies the module objects, which costs nothing, and shares every
parameter, buffer and hook.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn


def shadow(model: nn.Module, regions: bool = False) -> nn.Module:
    """Returns a copy of `model`, in eval mode, that shares its tensors.

    Args:
        model: The caller's model.
        regions: Mark the decoder layers as regions of one kind, which `torch.compile` compiles
            once, so that compile time does not grow with depth.
    """
    return _copy(model, _layer_class(model) if regions else None)


def fingerprint(module: nn.Module) -> int:
    """Returns a number that changes with anything that a shadow does not share.

    That is: modules, parameters and attributes that are replaced, and parameters that are cast or
    moved. Values written into a tensor are shared.
    """
    tensors = ((id(tensor), tensor.dtype, tensor.device) for tensor in module.parameters())
    attributes = (
        (name, value if isinstance(value, (int, float, str)) else id(value))
        for part in module.modules()
        for name, value in vars(part).items()
        if name != "training" and name[0] != "_"
    )
    return hash((tuple(map(id, module.modules())), tuple(tensors), tuple(attributes)))


def _copy(module: nn.Module, layer_class: type[nn.Module] | None) -> nn.Module:
    new = copy.copy(module)
    new.__dict__ = dict(module.__dict__)
    new.__dict__["_modules"] = {
        name: None if child is None else _copy(child, layer_class)
        for name, child in module._modules.items()
    }
    new.training = False
    if layer_class is not None and type(module) is layer_class:
        new.__class__ = _as_region(layer_class)
    return new


@functools.cache
def _as_region(layer_class: type[nn.Module]) -> type[nn.Module]:
    forward = torch.compiler.nested_compile_region(layer_class.forward)
    return type(layer_class.__name__, (layer_class,), {"forward": forward})


def _layer_class(model: nn.Module) -> type[nn.Module] | None:
    """Returns the class of the decoder layers: what the longest module list consists of."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m))
    longest = max(lists, key=len, default=())
    kinds = {type(layer) for layer in longest}
    return kinds.pop() if len(kinds) == 1 else None
