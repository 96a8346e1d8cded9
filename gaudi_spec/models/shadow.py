"""A module tree of our own over the caller's weights.

The engine runs a model in eval mode and may have to change its modules (to fuse, to compile), and
the caller's model must not be changed. A shadow copies the module objects, which costs nothing,
and shares every parameter, buffer and hook.
"""

from __future__ import annotations

import copy

from torch import nn


def shadow(module: nn.Module) -> nn.Module:
    """Returns a copy of `module`, in eval mode, that shares its tensors."""
    new = copy.copy(module)
    new.__dict__ = dict(module.__dict__)
    new.__dict__["_modules"] = {
        name: None if child is None else shadow(child) for name, child in module._modules.items()
    }
    new.training = False
    return new


def fingerprint(module: nn.Module) -> int:
    """Returns a number that changes when a module or parameter is replaced, cast or moved."""
    tensors = ((id(tensor), tensor.dtype, tensor.device) for tensor in module.parameters())
    return hash((tuple(map(id, module.modules())), tuple(tensors)))
