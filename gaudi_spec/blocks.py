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
        turns: N, cycles whose outcomes the host may read at once.
        width: W, numbers of an outcome of the largest K.

    Attributes:
        outcomes: `[N, B, W]` int64, filled up with zeros; written by graphs where N is more than 1.
    """

    def __init__(
        self,
        batch: int,
        vocab_size: int,
        device: torch.device,
        keep_logits: bool,
        turns: int = 1,
        width: int = 0,
    ) -> None:
        self._batch, self._vocab_size, self._device = batch, vocab_size, device
        self._keep_logits = keep_logits
        self._kept: dict[int, torch.Tensor] = {}
        self._proposals: dict[tuple[int, bool], Proposal] = {}
        self._decided: dict[int, tuple[torch.Tensor, Verdict, torch.Tensor]] = {}
        self.outcomes = self._zeros(turns, batch, width, dtype=torch.long)
        self._turn = self._zeros(1, dtype=torch.long)

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

    def rewind(self) -> None:
        """Makes the next cycle's outcome the first of `outcomes`."""
        self._turn.zero_()

    def note(self, packed: torch.Tensor) -> torch.Tensor:
        """Adds the outcome of a cycle `[B, 5 + K + 1]`, which it returns, to `outcomes`."""
        turns, _, width = self.outcomes.shape
        if turns > 1:
            wide = torch.nn.functional.pad(packed, (0, width - packed.shape[1]))
            self.outcomes.index_copy_(0, self._turn, wide[None])
            self._turn.copy_((self._turn + 1).clamp(max=turns - 1))
        return packed

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)
