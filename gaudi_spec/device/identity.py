"""What a trace depends on, as a digest that is the same in every process."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .linear import processor

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_HELD = (*_PLAIN, dict, list, tuple, set, frozenset)
_CODE = (type, types.ModuleType, types.MethodType, functools.partial)
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
# Of Transformers' hub module and generation configs: another in every process.
_CHANGING = {"SESSION_ID", "_original_object_hash"}
# Their code is told by their version.
_VERSIONED = {"torch", "numpy", "tqdm", *sys.stdlib_module_names}


def identity(root: Any) -> str:
    """Returns a digest of what a trace over `root` depends on, but for the content of tensors.

    That is: every value that is reached from it; sizes, types and aliases of tensors; the code of
    classes and of their modules; versions; and the settings that machine code depends on.
    """
    found = hashlib.sha256(repr(_environment()).encode())
    storages: dict[int, str] = {}
    for path, value in leaves(root):
        found.update(f"{path} {_text(value)}\n".encode())
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            found.update(storages.setdefault(value.untyped_storage().data_ptr(), path).encode())
    return found.hexdigest()


def leaves(root: Any, code: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields what is reached from `root`, every object once, and the way to it.

    Args:
        root: Any object.
        code: False does not enter classes, nor what methods are bound to.
    """
    seen: dict[int, str] = {}
    todo = [("", root)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, _PLAIN):
            yield path, value
            continue
        if not code and isinstance(value, _CODE):
            continue
        if id(value) in seen:
            yield path, f"as {seen[id(value)]}"
            continue
        seen[id(value)] = path
        children = _children(value)
        if children is None or isinstance(value, types.FunctionType):
            yield path, value
        todo += [(f"{path}.{name}", child) for name, child in children or ()]


def facts(tensor: torch.Tensor) -> str:
    """Returns everything about a tensor but its content."""
    kind, shape = type(tensor).__name__, tuple(tensor.shape)
    if tensor.layout != torch.strided:
        return f"{kind} {tensor.layout} {shape} {tensor.dtype}"
    where = f"{tensor.stride()} {tensor.storage_offset()} {tensor.device}"
    return f"{kind} {shape} {where} {tensor.dtype} {tensor.requires_grad}"


@functools.cache
def _source() -> list[bytes]:
    """Returns what the package's files were when it was first asked for: they are loaded then."""
    package = Path(__file__).parents[1]
    return [hashlib.sha256(path.read_bytes()).digest() for path in sorted(package.rglob("*.py"))]


def _environment() -> tuple[Any, ...]:
    return (
        _source(),
        (torch.__version__, importlib.metadata.version("transformers"), sys.version),
        (processor(), torch.get_num_threads(), torch._inductor.config.get_hash()),
        (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        (torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled()),
    )


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns what a value consists of; None where it is a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, (dict, list, tuple)):
        held = dict.items(value) if isinstance(value, dict) else enumerate(value)
        return [*held, *getattr(value, "__dict__", {}).items()]
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, (staticmethod, classmethod)):
        return [("function", value.__func__)]
    if isinstance(value, property):
        return [("get", value.fget)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("args", value.args), ("named", value.keywords)]
    if isinstance(value, type):
        return None if _package(value.__module__) in _VERSIONED else _of_class(value)
    if isinstance(value, types.ModuleType):
        return None if _package(value.__name__) in _VERSIONED else _of_module(value)
    slots = [name for name in vars(type(value)).get("__slots__", ()) if hasattr(value, name)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    own = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    kept = [(name, child) for name, child in own.items() if name not in _CHANGING]
    return [("class", type(value)), *kept]


def _package(name: str | None) -> str:
    return (name or "").split(".")[0]


def _of_function(function: types.FunctionType) -> list[tuple[Any, Any]]:
    """Returns defaults, closure, and what it names: plain values, code of the same package."""
    code, package = function.__code__, _package(function.__module__)
    cells = [(n, c.cell_contents) for n, c in zip(code.co_freevars, function.__closure__ or ())]
    known = function.__globals__
    named = [(n, known[n]) for n in code.co_names if n in known and n not in _CHANGING]
    helpers = [
        (name, value)
        for name, value in named
        if isinstance(value, _PLAIN)
        or (isinstance(value, (types.FunctionType, type)) and _package(value.__module__) == package)
    ]
    defaults = [("defaults", function.__defaults__), ("named", function.__kwdefaults__)]
    return [*defaults, *cells, *helpers]


def _of_class(kind: type) -> list[tuple[Any, Any]]:
    own = [(n, v) for n, v in vars(kind).items() if isinstance(v, (*_METHODS, *_HELD))]
    return [*own, ("bases", kind.__bases__), ("module", sys.modules.get(kind.__module__))]


def _of_module(module: types.ModuleType) -> list[tuple[Any, Any]]:
    """Returns functions, values, classes of its own, and modules of its package."""
    package = _package(module.__name__)
    hub = package == "transformers"

    def counts(value: Any) -> bool:
        if isinstance(value, type):
            return value.__module__ == module.__name__
        if isinstance(value, types.ModuleType):
            return package == _package(value.__name__) != "transformers"
        # Transformers' tables are told by its version.
        return isinstance(value, (types.FunctionType, *(_PLAIN if hub else _HELD)))

    return [
        (name, value)
        for name, value in vars(module).items()
        if name[:2] != "__" and name not in _CHANGING and counts(value)
    ]


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return facts(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.FunctionType):
        return _text(value.__code__)
    if isinstance(value, types.CodeType):
        return f"{value.co_code!r} {value.co_names} {[_text(c) for c in value.co_consts]}"
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_text, value)))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
