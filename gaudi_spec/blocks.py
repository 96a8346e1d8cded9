"""Buffers of one block of K + 1 tokens, for what one graph leaves to the next or to the host."""

from __future__ import annotations

import torch

from .drafters.base import Proposal
from .verify import Verdict


class Blocks:
    """Allocates each buffer at its first use; it keeps its storage from then on.

    Args:
        batch: B.
        vocab_size: V.
        device: Where.
        keep_logits: Whether `kept` is wanted.
    """

    def __init__(
        self, batch: int, vocab_size: int, device: torch.device, keep_logits: bool
    ) -> None:
        self._batch, self._vocab_size, self._device = batch, vocab_size, device
        self._keep_logits = keep_logits
        self._kept: dict[int, torch.Tensor] = {}
        self._proposals: dict[tuple[int, bool], Proposal] = {}
        self._decided: dict[int, tuple[torch.Tensor, Verdict, torch.Tensor]] = {}

    def kept(self, k: int) -> torch.Tensor | None:
        """Returns `[2, B, k+1, V]`, the logits of the last cycle of k drafts, if they are kept."""
        if not self._keep_logits:
            return None
        if k not in self._kept:
            self._kept[k] = self._zeros(2, self._batch, k + 1, self._vocab_size)
        return self._kept[k]

    def proposal(self, k: int, drawn: bool) -> Proposal:
        """Returns what a draft graph leaves for the verify graph of the same K.

        Args:
            k: K.
            drawn: With the distributions `[B, K, V]` that the tokens were drawn from.
        """
        if (k, drawn) not in self._proposals:
            self._proposals[k, drawn] = Proposal(
                self._zeros(self._batch, k, dtype=torch.long),
                self._zeros(self._batch, dtype=torch.long),
                self._zeros(self._batch, k, self._vocab_size) if drawn else None,
            )
        return self._proposals[k, drawn]

    def decided(self, k: int) -> tuple[torch.Tensor, Verdict, torch.Tensor]:
        """Returns logits, verdict and soundness of a block that is decided about on the host."""
        if k not in self._decided:
            verdict = Verdict(
                self._zeros(self._batch, dtype=torch.long),
                self._zeros(self._batch, k + 1, dtype=torch.long),
            )
            logits = self._zeros(self._batch, k + 1, self._vocab_size)
            sound = self._zeros(self._batch, k + 1, dtype=torch.bool)
            self._decided[k] = logits, verdict, sound
        return self._decided[k]

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)
