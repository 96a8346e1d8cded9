"""What Optimum Habana needs besides the bridge so that it can be imported where there is no card.

Nothing that is installed is touched: a finder, in place only while the emulator is, completes four
of its modules after they were executed. Their code stays; what it lacks here is put beside it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from . import kernels

VERSION = "1.24.0"  # of Intel's software that Optimum Habana 1.21.2 was validated for
_PACKAGE = "optimum.habana"
_MODELS = f"{_PACKAGE}.transformers.models"
_NOTICE = (
    "EMULATED HPU: Optimum Habana runs over stand-ins for habana_frameworks, its version and the "
    f"driver's ({VERSION}), torch.ops.hpu.mixture_of_experts, torchvision where it is missing, and "
    "the fused rotary kernel of mistral and mixtral; nothing here is Intel's code or a measurement."
)


def _version(module: ModuleType) -> None:
    """The versions, which it reads from `pip list` and `hl-smi`."""
    version = module.version.parse(VERSION)
    for name in ("get_habana_frameworks_version", "get_driver_version"):
        setattr(module, name, lambda: version)


def _rotary(module: ModuleType) -> None:
    """The rotary kernel: off the card, the module's own way out does not look positions up."""

    def apply_customized_rope(q, k, cos, sin, position_ids, training=True):
        cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    vars(module).update(apply_customized_rope=apply_customized_rope)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


_COMPLETED: dict[str, Callable[[ModuleType], None]] = {
    f"{_PACKAGE}.utils.misc": _version,
    f"{_MODELS}.mistral.modeling_mistral": _rotary,
    f"{_MODELS}.mixtral.modeling_mixtral": _rotary,
}
_WANTS_TORCHVISION = f"{_MODELS}.glm4v.tokenization_chatglm"


class Finder(MetaPathFinder):
    """Finds the modules of Optimum Habana that need completion, and wraps their loaders."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Returns None for all other modules, as the protocol has it."""
        if fullname == _PACKAGE:
            print(_NOTICE, file=sys.stderr)
        if fullname not in _COMPLETED and fullname != _WANTS_TORCHVISION:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Completing(spec.loader)
        return spec


class _Completing(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        lacking = module.__name__ == _WANTS_TORCHVISION and not _installed("torchvision")
        if lacking:  # an undeclared requirement, of which only the name is used at import
            sys.modules["torchvision"] = ModuleType("torchvision")
            vars(sys.modules["torchvision"]).update(transforms=None)
        try:
            self._loader.exec_module(module)
        finally:
            if lacking:
                del sys.modules["torchvision"]
        if module.__name__ in _COMPLETED:
            _COMPLETED[module.__name__](module)


_finder = Finder()
_library: list[torch.library.Library] = []


def install() -> None:
    """Puts the finder and the operator of the experts in place."""
    sys.meta_path.insert(0, _finder)
    library = torch.library.Library("hpu", "FRAGMENT")
    schema = torch.library.infer_schema(kernels.mixture_of_experts, mutates_args=())
    library.define("mixture_of_experts" + schema)
    library.impl("mixture_of_experts", kernels.mixture_of_experts, "CompositeExplicitAutograd")
    _library.append(library)


def remove() -> None:
    """Takes both away again."""
    sys.meta_path.remove(_finder)
    _library.pop()._destroy()


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
