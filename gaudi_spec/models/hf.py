"""The adapter for unmodified Transformers causal language models (4.55 to 5.x).

The model is called as it is: with our slot cache as its cache object, explicit `position_ids`,
and a ready 4-D additive mask (one per layer type where a model has sliding layers). Nothing of
the model is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..cache import SlotCache
from ..errors import UnsupportedModelError
from ..masks import attention_bias
from ..quant.kv import KvFormat, kv_modules
from .attention import use_grouped_attention
from .shadow import shadow
from .support import layer_windows, max_positions, vocabulary


class _GeometryProbe(Cache):
    """Stands in for a cache during one single-token forward and notes each layer's K/V shape."""

    is_compileable = True
    window = 1

    def __init__(self) -> None:
        self.geometry: dict[int, tuple[int, int]] = {}
        self.dtype = torch.float32
        self.layers: list[object] = []

    def update(self, key_states, value_states, layer_idx, *_, **__):
        if key_states.shape != value_states.shape:
            raise UnsupportedModelError("Keys and values of different sizes are not supported yet.")
        self.geometry[layer_idx] = (key_states.shape[1], key_states.shape[3])
        self.dtype = key_states.dtype
        return key_states, value_states

    def get_seq_length(self, *_, **__) -> int:
        return 0

    def get_max_cache_shape(self, *_, **__) -> int:
        return 1


class HFCausalLM:
    """A Transformers causal LM over its own slot cache; see `ModelAdapter`.

    Args:
        model: The model object, on its device, left as it is.
        batch: B.
        slots: S.
        kv: Makes the cache's format from the model's dtype; None stores keys and values as they
            are.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        slots: int,
        kv: Callable[[torch.dtype], KvFormat] | None = None,
    ) -> None:
        self.slots = slots
        self.model = model = self._own(model)
        self.device = model.device
        self._embeddings, self.vocab_size = vocabulary(model)
        self.max_positions = max_positions(model.config)
        self.shapes: set[tuple[str, int, int]] = set()
        # Some text-only classes keep the prefix of their multimodal sibling.
        self._body = getattr(model, model.base_model_prefix, None) or model.model
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in accepted else "cache"
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache_position = "cache_position" in accepted
        self._windows = layer_windows(model.config)
        self._slot_ids = torch.arange(slots, device=self.device)
        geometry, dtype = self._probe()
        form = kv(dtype) if kv else KvFormat("auto", dtype, dtype)
        self.cache = SlotCache(geometry, batch, slots, form, self.device, self._writers())

    def _writers(self) -> list[tuple[Any, Any]]:
        """Returns the modules that write keys and values in place of the cache, if there are."""
        return kv_modules(self.model)

    def _own(self, model: Any) -> Any:
        """Returns the module tree to run, over the weights of the caller's `model`."""
        return use_grouped_attention(shadow(model))

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, last: bool = False
    ) -> torch.Tensor:
        """Returns logits `[B, T, V]`, or `[B, 1, V]` of the last token if `last`."""
        self._note("forward", ids)
        extra = self._keep_last if last else {}
        logits = self._call(self.model, ids, positions, self.cache.at(positions), **extra).logits
        return logits[:, -1:] if last else logits

    def fill(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Writes the cache entries of `ids` `[B, T]`; the head is not run.

        Returns:
            `[B]`, a number for each row that depends on every layer. Nobody needs it, but a
            compiler may drop a layer whose result goes nowhere, and its cache entries with it.
        """
        self._note("fill", ids)
        return self._call(self._body, ids, positions, self.cache.at(positions))[0][:, -1, 0]

    def _note(self, method: str, ids: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            self.shapes.add((method, *ids.shape))

    def _call(self, module, ids, positions, cache, **extra):
        if self._cache_position:
            extra["cache_position"] = positions[0]
        return module(
            # An id that only the other model's padded vocabulary has must not leave the table.
            input_ids=ids.clamp(max=self._embeddings - 1),
            position_ids=positions,
            attention_mask=self._mask(positions, cache),
            use_cache=True,
            **{self._cache_name: cache},
            **extra,
        )

    def _mask(self, positions: torch.Tensor, cache: Any) -> torch.Tensor | dict[str, torch.Tensor]:
        slots = self._slot_ids[: cache.window]
        masks = {
            kind: attention_bias(positions, slots, window, self.model.dtype)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _probe(self) -> tuple[list[tuple[int, int]], torch.dtype]:
        probe = _GeometryProbe()
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with torch.no_grad():
                self._call(self._body, zero, zero, probe)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be run over a cache of ours: {error}"
            ) from error
        if sorted(probe.geometry) != list(range(len(probe.geometry))) or not probe.geometry:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not write one cache entry per layer."
            )
        return [probe.geometry[i] for i in sorted(probe.geometry)], probe.dtype


@torch.no_grad()
def self_check(model: Any, length: int = 24, slots: int = 1024) -> None:
    """Compares the slot-cached, rolled-back forward of `model` with its plain one.

    Used for families outside the tested list. There are many more slots than tokens, because a
    model that masks by the size of its cache is right while the cache is full.

    Raises:
        UnsupportedModelError: The logits differ, or the model cannot be called this way.
    """
    who = f"{type(model).__name__} ({model.config.model_type})"
    ids = torch.arange(3, 3 + length, device=model.device)[None] % 50
    positions = torch.arange(length, device=model.device)[None]
    adapter = HFCausalLM(model, 1, min(slots, max_positions(model.config) or slots))
    try:
        want = adapter.model(input_ids=ids).logits.float()
        adapter.fill(ids[:, :8], positions[:, :8])
        adapter.forward(ids[:, :5] + 1, positions[:, 8:13])  # wrong tokens, to be rolled back
        got = adapter.forward(ids[:, 8:], positions[:, 8:]).float()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{who} cannot be run over a preallocated cache: {error}"
        ) from error
    if not torch.allclose(got, want[:, 8:], atol=2e-2 * float(want.abs().max()), rtol=0):
        raise UnsupportedModelError(
            f"{who} does not follow explicit positions and masks: its cached forward differs from "
            "its plain one, so it cannot be served."
        )
