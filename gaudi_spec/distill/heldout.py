"""How good a draft is: acceptance on text of the target that nobody trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -1


@dataclass(frozen=True)
class HeldOut:
    """Greedy text of the target.

    Attributes:
        tokens: `[B, W]` int64, prompts left-justified, each followed by the target's text.
        prompt: `[B]` int64, prompt lengths.
        count: `[B]` int64, tokens of the target's text.
        kinds: Kind of each row.
    """

    tokens: torch.Tensor
    prompt: torch.Tensor
    count: torch.Tensor
    kinds: list[str]

    @classmethod
    def of(cls, prompts: list[list[int]], texts: list[torch.Tensor], kinds: list[str]) -> HeldOut:
        """Packs prompts and the target's continuations of them."""
        rows = [torch.cat([torch.tensor(p), text]) for p, text in zip(prompts, texts)]
        return cls(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.tensor([len(p) for p in prompts]),
            torch.tensor([len(text) for text in texts]),
            kinds,
        )

    @torch.no_grad()
    def matches(self, draft: Any) -> list[list[bool]]:
        """Returns, for each row and token of its text, whether `draft` would propose it.

        After an accepted prefix the draft has read exactly the target's text, so one forward over
        that text tells what it proposes at every place.
        """
        device = draft.device
        guess = draft(input_ids=self.tokens[:, :-1].to(device)).logits.argmax(-1).cpu()
        right = guess == self.tokens[:, 1:]
        spans = zip(right, (self.prompt - 1).tolist(), self.count.tolist())
        return [row[begin : begin + count].tolist() for row, begin, count in spans]

    def by_kind(self, matches: list[list[bool]]) -> dict[str, float]:
        """Returns the agreement of each kind of prompt."""
        return {
            kind: agreement([m for m, k in zip(matches, self.kinds) if k == kind])
            for kind in dict.fromkeys(self.kinds)
        }


def walk(matches: list[list[bool]], k: int) -> tuple[int, int, int]:
    """Replays greedy speculative decoding with K = `k`.

    Returns:
        Proposed tokens, accepted tokens, cycles. A row with r tokens left gets r - 1 proposals.
    """
    proposed = accepted = cycles = 0
    for row in matches:
        place = 0
        while place < len(row):
            usable = min(k, len(row) - place - 1)
            right = next((i for i in range(usable) if not row[place + i]), usable)
            proposed, accepted, cycles = proposed + usable, accepted + right, cycles + 1
            place += right + 1
    return proposed, accepted, cycles


def agreement(matches: list[list[bool]]) -> float:
    """Returns the share of tokens that the draft would propose (acceptance at K = 1)."""
    flat = [match for row in matches for match in row]
    return sum(flat) / max(len(flat), 1)


def best_k(
    matches: list[list[bool]], cost: float, verify: float = 1.0, most: int = 8
) -> tuple[int, float]:
    """Returns the K with the largest expected speed-up over plain decoding, and that speed-up.

    Args:
        matches: From `HeldOut.matches`.
        cost: Time of a draft step, in plain steps of the target.
        verify: Time of a verification, in the same unit.
        most: Largest K.
    """
    tokens = sum(map(len, matches))
    gains = {k: tokens / (walk(matches, k)[2] * (verify + k * cost)) for k in range(1, most + 1)}
    k = max(gains, key=gains.__getitem__)
    return k, gains[k]
