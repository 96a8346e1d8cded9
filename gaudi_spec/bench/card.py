"""What is known before anything is timed: sizes, the memory ceiling, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..clock import READ_BYTES, copying, reading
from ..device import Device
from ..loading import Pair
from ..models.support import vocabulary
from ..plan.sizes import geometry, weights


@dataclass(frozen=True)
class Size:
    """Bytes that one model moves.

    Attributes:
        parameters: How many.
        weights: Bytes of weights that a forward reads; of an embedding of its own, which is only
            looked up, none.
        kv_token: Bytes of keys and values of one token, over all layers.
    """

    parameters: int
    weights: int
    kv_token: int

    @classmethod
    def of(cls, model: Any) -> Size:
        """Reads a loaded model."""
        counted, (heads, width) = weights(model), geometry(model.config)
        kv = 2 * model.config.num_hidden_layers * heads * width * model.dtype.itemsize
        held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        unread = counted["table"] * model.get_input_embeddings().weight.element_size()
        return cls(counted["parameters"], held - unread, kv)

    def step(self, rows: int, context: float) -> float:
        """Returns bytes that a forward over `rows` of `context` tokens must read."""
        return self.weights + self.kv_token * rows * context


@dataclass(frozen=True)
class Card:
    """Everything static of a run.

    Attributes:
        target: Of the target.
        draft: Of the draft, or None.
        bandwidth: Measured ceiling of memory, in bytes per second.
    """

    target: Size
    draft: Size | None
    bandwidth: float

    @classmethod
    def of(cls, pair: Pair, device: Device) -> Card:
        """Reads the models and measures the ceiling."""
        draft = None if pair.draft is None else Size.of(pair.draft)
        return cls(Size.of(pair.target), draft, bandwidth(device))

    def utilisation(self, rows: int, context: float, k: int, seconds: float) -> float:
        """Returns bytes moved in a cycle of K drafts / its time / the ceiling."""
        moved = self.target.step(rows, context)
        if k and self.draft is not None:
            moved += k * self.draft.step(rows, context)
        return moved / seconds / self.bandwidth

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        values: dict[str, Any] = {}
        for role, size in (("target", self.target), ("draft", self.draft)):
            if size is not None:
                values |= {
                    f"{role}_parameters": size.parameters,
                    f"{role}_bytes": size.weights,
                    f"{role}_kv_bytes_per_token": size.kv_token,
                }
        return values | {
            "memory_bandwidth": self.bandwidth,
            "plain_ceiling_tokens_per_second": self.bandwidth / self.target.weights,
        }


def describe(pair: Pair) -> dict[str, Any]:
    """Returns names, data types and vocabularies of the models."""
    models = {"target": pair.target, "draft": pair.draft}
    return {
        f"{role}_{name}": value
        for role, model in models.items()
        if model is not None
        for name, value in (
            ("family", model.config.model_type),
            ("layers", model.config.num_hidden_layers),
            ("dtype", str(model.dtype).removeprefix("torch.")),
            ("vocabulary", vocabulary(model)[1]),
        )
    }


def bandwidth(device: Device, size: int = READ_BYTES, count: int = 5) -> float:
    """Returns bytes per second of the faster of a big copy and a big matrix times a vector."""
    return max(copying(device, size, count), reading(device, size=size, count=count))
