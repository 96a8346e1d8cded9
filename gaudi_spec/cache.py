"""The slot cache: a KV cache whose length is data.

Row b's token at absolute position p lives in slot p, for the whole run. Writing is one
`index_copy_` on a whole base buffer (an in-place update through a view cannot be captured in an
HPU graph), reading is a view, and rolling back is done by nobody: a rejected token's slot is
hidden by the mask until its position is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from .quant.kv import KvFormat


class SlotCache(Cache):
    """Preallocated keys and values of one model, written at `positions`.

    It passes as a Transformers `Cache`, but only `update` is used: masks and positions are made
    by the adapter, so the sizes that a `Cache` usually reports are never asked for.

    Args:
        geometry: `(kv_heads, head_dim)` for each layer.
        batch: B, rows.
        slots: S, slots of each row.
        form: What the buffers hold.
        device: Where the buffers live.
        writers: Neural Compressor's modules for each layer's keys and values, which then decide
            what is held; none: this class writes.

    Attributes:
        keys: Each layer's buffer `[B*S, H_kv, D]`.
        values: The same.
        key_scales: Each layer's `[B*S, H_kv, 1]`, where the format has scales.
        value_scales: The same.
    """

    is_compileable = True

    def __init__(
        self,
        geometry: list[tuple[int, int]],
        batch: int,
        slots: int,
        form: KvFormat,
        device: torch.device,
        writers: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        self.form = form
        self.batch, self.slots = batch, slots
        self.window = slots  # slots that attention reads; a static part of every shape
        # Zeros, not empty: 0 x NaN would pass through a mask.
        self.keys = [
            torch.zeros(batch * slots, heads, dim, dtype=form.store, device=device)
            for heads, dim in geometry
        ]
        self.values = [torch.zeros_like(key) for key in self.keys]
        self._writers = writers
        if writers:
            shapes = [key.shape for key in self.keys]
            self.keys, self.values = (
                [
                    pair[i].allocate(None, form.compute, device, s)
                    for pair, s in zip(writers, shapes)
                ]
                for i in (0, 1)
            )
            store = self.keys[0].dtype
            name = f"Neural Compressor {str(store).removeprefix('torch.')}"
            self.form = form = KvFormat(name, store, form.compute)
        scaled = self.keys if form.scaled else []
        self.key_scales = [torch.zeros_like(k[..., :1], dtype=form.compute) for k in scaled]
        self.value_scales = [torch.zeros_like(scale) for scale in self.key_scales]
        self._row_start = torch.arange(batch, device=device)[:, None] * slots
        self._index = self._row_start[:, 0]
        self.layers: list[object] = []  # read by `Cache` properties of some versions

    def at(self, positions: torch.Tensor) -> SlotCache:
        """Directs the next forward's writes to the slots of `positions` `[B, T]`."""
        self._index = (self._row_start + positions).reshape(-1)
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, H_kv, T, D]` keys and values and returns the window `[B, H_kv, W, D]`."""
        if self._writers:
            key, value = self._writers[layer_idx]
            return (
                self._write_by(key, self.keys[layer_idx], key_states),
                self._write_by(value, self.values[layer_idx], value_states),
            )
        one = slice(layer_idx, layer_idx + 1)
        return (
            self._write([*self.keys[one], *self.key_scales[one]], key_states),
            self._write([*self.values[one], *self.value_scales[one]], value_states),
        )

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Writes `[B, H_kv, T, D]` to one layer's keys or values, and returns what `read` does."""
        buffer.index_copy_(0, self._index, states.transpose(1, 2).flatten(0, 1).to(buffer.dtype))
        return self.read(buffer)

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a view of one layer's keys or values, the window `[B, H_kv, W, D]`."""
        return self._window(buffer).transpose(1, 2)

    def _write(self, buffers: list[torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        encoded = self.form.encode(states.transpose(1, 2).flatten(0, 1))
        for buffer, new in zip(buffers, encoded):
            buffer.index_copy_(0, self._index, new)
        return self.form.decode(*map(self._window, buffers)).transpose(1, 2)

    def _write_by(self, writer: Any, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        new = states.transpose(1, 2).flatten(0, 1)
        return self._window(writer.update(buffer, new, 0, self._index, None)).transpose(1, 2)

    def _window(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the slots that attention reads, `[B, W, H_kv, ...]`."""
        return buffer.view(self.batch, self.slots, *buffer.shape[1:])[:, : self.window]

    def get_seq_length(self, *_, **__) -> int:
        """Returns 0: length is data here, and every caller is handed explicit positions."""
        return 0

    def get_max_cache_shape(self, *_, **__) -> int:
        """Returns S."""
        return self.slots

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All that is allocated."""
        return [*self.keys, *self.values, *self.key_scales, *self.value_scales]

    def zero(self) -> None:
        """Overwrites all slots with zeros, in place."""
        for buffer in self.buffers:
            buffer.zero_()
