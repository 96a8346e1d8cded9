"""What a loaded model really consists of, read from its tensors and not from any setting."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..cache import SlotCache
from .linear import QuantLinear


@dataclass
class Part:
    """Layers of one kind that are stored in the same way.

    Attributes:
        part: "linear", "head", "embedding" or "other".
        scheme: A scheme of `SpecConfig.target_quant`, else the dtypes of the tensors; for layers
            of other libraries with the name of their class.
        layers: Modules.
        weights: Numbers that the layers stand for.
        bytes: What their tensors take, scales included; a shared tensor counts once.
    """

    part: str
    scheme: str
    layers: int = 0
    weights: int = 0
    bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits for each weight."""
        return 8 * self.bytes / self.weights if self.weights else 0.0


def parts(model: nn.Module) -> list[Part]:
    """Returns the parts of a model, the largest first."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    found: dict[tuple[str, str], Part] = {}
    seen: set[int] = set()
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        fresh = [t for t in tensors if id(t) not in seen]
        seen.update(map(id, fresh))
        if not fresh:
            continue
        kind = "head" if module is head else _kind(module)
        scheme = _scheme(module, fresh)
        part = found.setdefault((kind, scheme), Part(kind, scheme))
        part.layers += 1
        part.bytes += sum(map(_bytes, fresh))
        size = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
        part.weights += size or sum(t.numel() for t in fresh)
    return sorted(found.values(), key=lambda part: -part.bytes)


def facts(model: nn.Module, cache: SlotCache) -> dict[str, Any]:
    """Returns plain values for JSON: a model's parts, and what its cache holds."""
    held = sum(_bytes(buffer) for buffer in cache.buffers)
    numbers = sum(buffer.numel() for buffer in (*cache.keys, *cache.values))
    return {
        "weights": [asdict(part) | {"bits": part.bits} for part in parts(model)],
        "kv_cache": {"scheme": cache.form.name, "bytes": held, "bits": 8 * held / numbers},
    }


def lines(role: str, values: dict[str, Any]) -> list[str]:
    """Returns one printed line for each part and for the cache."""
    shown = [
        (f"{role} {p['part']}", f"{p['scheme']}, {p['bits']:.2f} bits, {_mb(p['bytes'])}")
        for p in values["weights"]
    ]
    kv = values["kv_cache"]
    shown.append((f"{role} KV cache", f"{kv['scheme']}, {kv['bits']:.2f} bits, {_mb(kv['bytes'])}"))
    return [f"{name.capitalize():35} = {value}" for name, value in shown]


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    # Conv1D of GPT-2 has no in_features.
    linear = hasattr(module, "in_features") or type(module).__name__ == "Conv1D"
    return "linear" if linear else "other"


def _scheme(module: nn.Module, tensors: list[torch.Tensor]) -> str:
    if isinstance(module, QuantLinear):
        return module.scheme
    dtypes = "+".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    wrapped = {type(t).__name__ for t in tensors if is_traceable_wrapper_subclass(t)}
    names = wrapped or ({type(module).__name__} if "+" in dtypes or "float8" in dtypes else set())
    return " ".join([*sorted(names), dtypes])


def _bytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        inner, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return sum(_bytes(getattr(tensor, name)) for name in inner)
    return tensor.numel() * tensor.element_size()


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
