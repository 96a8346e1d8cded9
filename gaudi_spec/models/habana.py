"""The adapter for the classes that Optimum Habana's `adapt_transformers_to_gaudi()` puts in place.

They take no `Cache`: past keys and values are tensors with one write position for all rows, and
they make their own mask. Here each past tensor is a `_Past` that writes to the slots of every
row's own positions, and the functions that make masks are ours. Everything else, the fused kernels
too, is their code. All of it happens on a shadow: the caller's model and Optimum Habana's modules
stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..cache import SlotCache
from ..errors import UnsupportedModelError
from ..masks import attention_bias, visible
from .hf import HFCausalLM
from .shadow import shadow


class HabanaCausalLM(HFCausalLM):
    """A causal LM of Optimum Habana over its own slot cache; see `ModelAdapter`.

    Args:
        model: The model object, on its device, left as it is.
        batch: B.
        slots: S.
        options: Names in `FORWARD_OPTIONS` that are on; a family ignores those it does not have.
    """

    def __init__(self, model: Any, batch: int, slots: int, options: tuple[str, ...] = ()) -> None:
        self._options = dict.fromkeys(options, True)
        self._positions = torch.zeros(0)
        self._value_dtype = torch.float32
        super().__init__(model, batch, slots)
        # GPT-NeoX keeps keys in float32 and values as they are.
        self.cache.values = [each.to(self._value_dtype) for each in self.cache.values]
        pairs = zip(self.cache.keys, self.cache.values)
        self._past = [tuple(_Past(self.cache, each) for each in pair) for pair in pairs]

    def fill(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Writes cache entries as `HFCausalLM.fill`, no more at a time than there are slots.

        Where heads share keys, their attention would cut the mask's queries to as many.
        """
        pieces = zip(ids.split(self.slots, 1), positions.split(self.slots, 1))
        for piece in pieces:
            last = super().fill(*piece)
        return last

    def _writers(self) -> list[tuple[Any, Any]]:
        return []  # quantized caches are refused: what the modules hold by now is ours

    def _own(self, model: Any) -> Any:
        model = shadow(model)
        if "clear_inputs" in vars(model):  # from `wrap_in_hpu_graph`: runs the caller's modules
            vars(model).pop("forward")
        names = {
            "_gaudi_prepare_4d_causal_attention_mask": self._ready_mask,
            "_prepare_4d_causal_attention_mask": self._ready_mask,
            "_prepare_4d_causal_attention_mask_for_sdpa": self._ready_mask,
            "create_sinusoidal_positions": functools.cache(self._sinusoids),
        }
        if model.config.model_type == "bloom":
            names["update"] = _update_bloom
        for module in model.modules():
            self._own_module(module, names)
        return model

    def _own_module(self, module: nn.Module, names: dict[str, Any]) -> None:
        """Replaces, on one module of the shadow, what keeps a cache or makes a mask."""
        function: Any = type(module).forward
        used = names.keys() & set(function.__code__.co_names)
        if used:
            ours = {name: names[name] for name in used}
            module.forward = types.MethodType(_with_names(function, ours), module)
        for name, child in module.named_children():
            if name in ("k_cache", "v_cache"):
                module._modules[name] = _Write()
            elif name == "rotary_emb" and type(child).__module__.startswith("optimum.habana."):
                module._modules[name] = _Rotary(child, self.slots)
        if "bias" in module._buffers:  # a causal mask, where the last query sees the last slot
            module._buffers = {k: v for k, v in module._buffers.items() if k != "bias"}
            vars(module)["bias"] = _Seen(self)

    def _call(self, module, ids, positions, cache, **extra):
        self._positions = positions
        rows, width = positions.shape[0], cache.window
        values = {
            "position_ids": positions,
            # Nothing is padding; what a query sees is said by the mask.
            "attention_mask": torch.ones(rows, width, dtype=torch.long, device=positions.device),
            "past_key_values": self._past,
            "token_idx": positions,
            "use_cache": True,
            "lazy_mode": False,
            **self._options,
            **extra,
        }
        taken = _parameters(module)
        if self.model.config.model_type == "bloom":  # from it, one-hot products are made
            del values["token_idx"]
        return module(
            input_ids=ids.clamp(max=self._embeddings - 1),
            **{name: value for name, value in values.items() if name in taken},
        )

    def _slots_read(self) -> torch.Tensor:
        return self._slot_ids[: self._past[0][0].shape[-2]]

    def _ready_mask(
        self,
        attention_mask,
        input_shape,
        inputs_embeds,
        past_key_values_length=0,
        sliding_window=None,
    ):
        """Returns the additive mask `[B, 1, T, W]`, in place of one of theirs."""
        # A token sees `sliding_window` tokens before itself, one more than in Transformers.
        window = None if sliding_window is None else sliding_window + 1
        return attention_bias(self._positions, self._slots_read(), window, inputs_embeds.dtype)

    def _sinusoids(self, count: int, dim: int) -> torch.Tensor:
        """Returns GPT-J's table `[count, dim]`, which its own code makes anew on every call."""
        steps = torch.arange(0, dim, 2, dtype=torch.int64, device=self.device) / dim
        at = torch.arange(count, dtype=torch.int64, device=self.device).float()
        angles = at[:, None] * (1.0 / (10000**steps))
        return torch.cat([angles.sin(), angles.cos()], 1)

    def _probe(self) -> tuple[list[tuple[int, int]], torch.dtype]:
        layers = self.model.config.num_hidden_layers
        self._past = [(_Probe(), _Probe()) for _ in range(layers)]
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with torch.no_grad():
                self._call(self._body, zero, zero, types.SimpleNamespace(window=1))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be run over a cache of ours: {error!r}"
            ) from error
        states = [key.states for key, _ in self._past]
        if any(each is None or each.shape != states[0].shape for each in states):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not write one cache entry per layer."
            )
        self._value_dtype = self._past[0][1].states.dtype
        return [(each.shape[1], each.shape[3]) for each in states], states[0].dtype


class _Past:
    """Takes the place of one layer's past keys or values, a tensor `[B, H_kv, W, D]` to callers.

    Writing goes to the slots of the current positions, whatever index is named; wherever else a
    tensor is needed, it is the window of the cache.

    Args:
        cache: The slot cache.
        buffer: The layer's keys or values in it.
    """

    def __init__(self, cache: SlotCache, buffer: torch.Tensor) -> None:
        self._cache, self._buffer = cache, buffer

    @property
    def shape(self) -> torch.Size:
        heads, dim = self._buffer.shape[1:]
        return torch.Size((self._cache.batch, heads, self._cache.window, dim))

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def read(self) -> torch.Tensor:
        return self._cache.read(self._buffer)

    def write(self, states: torch.Tensor) -> torch.Tensor:
        return self._cache.write(self._buffer, states)

    def index_copy_(self, dim: int, index: torch.Tensor, states: torch.Tensor) -> _Past:
        self.write(states)
        return self

    def view(self, *shape: int) -> torch.Tensor:
        return self.read().reshape(*shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [arg.read() if isinstance(arg, _Past) else arg for arg in args]
        return func(*args, **(kwargs or {}))


class _Probe(_Past):
    """A past of one slot that keeps what is written."""

    def __init__(self) -> None:
        self.states: Any = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, 1, 1, 1))

    def read(self) -> torch.Tensor:
        return self.states

    def write(self, states: torch.Tensor) -> torch.Tensor:
        self.states = states
        return states


class _Write(nn.Module):
    """Takes the place of a `KVCache` module."""

    def update(self, prev, cur, dim, idx, inp_seq_len):
        return cur.read() if isinstance(cur, _Past) else prev.write(cur)


def _update_bloom(prev, cur, dim, idx):
    """Writes Bloom's keys `[B*H, D, T]` (dim 2) or values `[B*H, T, D]` (dim 1)."""
    states = cur if dim == 1 else cur.transpose(1, 2)
    window = prev.write(states.unflatten(0, (prev.shape[0], -1))).flatten(0, 1)
    return window if dim == 1 else window.transpose(1, 2)


class _Rotary(nn.Module):
    """Gives the whole table of sines and cosines, not as many rows as the cache has.

    A finished row may stand beyond the attention window of the others.
    """

    def __init__(self, inner: nn.Module, slots: int) -> None:
        super().__init__()
        self._inner, self._slots = inner, slots

    def forward(self, x: torch.Tensor, seq_len: int | None = None) -> tuple[_Table, _Table]:
        cos, sin = self._inner(x, seq_len=self._slots)
        return _Table(cos), _Table(sin)


class _Table:
    """A tensor whose rows are looked up as embeddings: an HPU graph holds no advanced indexing."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __getitem__(self, positions: torch.Tensor) -> torch.Tensor:
        return functional.embedding(positions, self._table)

    def __getattr__(self, name: str) -> Any:  # for fused kernels, which take the table itself
        return getattr(self._table, name)


class _Seen:
    """Takes the place of a causal mask buffer: any cut of it says what the queries see."""

    def __init__(self, adapter: HabanaCausalLM) -> None:
        self._adapter = adapter

    def __getitem__(self, _: Any) -> torch.Tensor:
        return visible(self._adapter._positions, self._adapter._slots_read())


def _with_names(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Returns a copy of `function` for which global `names` mean something else."""
    copied = types.FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
