"""What `generate` returns: Transformers' result object, and the caches for the next turn."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .engine import SpeculativeEngine
from .ledger import TokenEvent
from .stopping import stack_rows

_FIELDS = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
CACHE_FIELD = "cache" if "cache" in _FIELDS else "past_key_values"  # renamed in Transformers 5


@dataclasses.dataclass(frozen=True, eq=False)
class KeptCaches:
    """Both caches as a call has left them; `past_key_values` of the next turn.

    The next call, with the same models and longer `input_ids`, feeds only what is new. Another
    call in between costs time, not correctness: the tokens are compared.

    Attributes:
        key: Names models, settings and rows.
        engine: Whose caches they are.
    """

    key: tuple
    engine: SpeculativeEngine


class Collected:
    """Collects the events of a call.

    Args:
        count: Rows.
    """

    def __init__(self, count: int) -> None:
        self._rows: list[list[TokenEvent]] = [[] for _ in range(count)]

    def add(self, event: TokenEvent) -> None:
        """Takes the next token of a row."""
        self._rows[event.row].append(event)

    def tokens(self, pad: int) -> torch.Tensor:
        """Returns `[B, N]` int64, the new tokens and then `pad`."""
        width = max(len(row) for row in self._rows)
        rows = [[e.token for e in row] + [pad] * (width - len(row)) for row in self._rows]
        return torch.tensor(rows, dtype=torch.long)

    def vectors(self, name: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns `logits` or `scores` by step, each `[B, V]`; zeros in rows that had ended."""
        width = max(len(row) for row in self._rows)
        by_row = [[getattr(event, name) for event in row] for row in self._rows]
        steps = ([row[i] if i < len(row) else None for row in by_row] for i in range(width))
        return tuple(stack_rows(step).to(device) for step in steps)


def result(
    sequences: torch.Tensor, rows: Collected, kept: KeptCaches, scores: bool, logits: bool
) -> Any:
    """Returns a `GenerateDecoderOnlyOutput` with what was asked for."""
    device = sequences.device
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=rows.vectors("scores", device) if scores else None,
        logits=rows.vectors("logits", device) if logits else None,
        **{CACHE_FIELD: kept},
    )
