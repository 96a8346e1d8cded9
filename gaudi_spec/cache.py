"""The slot cache: a KV cache whose length is data.

Row b's token at absolute position p lives in slot p, for the whole run. Writing is one
`index_copy_` on a whole base buffer (an in-place update through a view cannot be captured in an
HPU graph), reading is a view, and rolling back is done by nobody: a rejected token's slot is
hidden by the mask until its position is written again.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """Preallocated keys and values of one model, written at `positions`.

    It passes as a Transformers `Cache`, but only `update` is used: masks and positions are made
    by the adapter, so the sizes that a `Cache` usually reports are never asked for.

    Args:
        geometry: `(kv_heads, head_dim)` for each layer.
        batch: B, rows.
        slots: S, slots of each row.
        dtype: Dtype of keys and values.
        device: Where the buffers live.
    """

    is_compileable = True

    def __init__(
        self,
        geometry: list[tuple[int, int]],
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch, self.slots = batch, slots
        self.window = slots  # slots that attention reads; a static part of every shape
        # Zeros, not empty: 0 x NaN would pass through a mask.
        self.keys = [
            torch.zeros(batch * slots, heads, dim, dtype=dtype, device=device)
            for heads, dim in geometry
        ]
        self.values = [torch.zeros_like(key) for key in self.keys]
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
        return (
            self.write(self.keys[layer_idx], key_states),
            self.write(self.values[layer_idx], value_states),
        )

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Writes `[B, H_kv, T, D]` to one layer's keys or values, and returns what `read` does."""
        heads, dim = buffer.shape[1:]
        new = states.transpose(1, 2).reshape(-1, heads, dim).to(buffer.dtype)
        buffer.index_copy_(0, self._index, new)
        return self.read(buffer)

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a view of one layer's keys or values, the window `[B, H_kv, W, D]`."""
        rows = buffer.view(self.batch, self.slots, *buffer.shape[1:])
        return rows[:, : self.window].transpose(1, 2)

    def get_seq_length(self, *_, **__) -> int:
        """Returns 0: length is data here, and every caller is handed explicit positions."""
        return 0

    def get_max_cache_shape(self, *_, **__) -> int:
        """Returns S."""
        return self.slots

    def __len__(self) -> int:
        return len(self.keys)

    def zero(self) -> None:
        """Overwrites all slots with zeros, in place."""
        for buffer in (*self.keys, *self.values):
            buffer.zero_()
