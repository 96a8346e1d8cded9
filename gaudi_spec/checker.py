"""Is a text the target's own greedy text? And where two texts differ: was it a near-tie?

In float32 the engine's output equals plain decoding. In bfloat16 or with quantized weights, a
many-token forward rounds differently from a one-token forward, so where the two most likely
tokens are almost equally likely either may win, with or without a draft. These functions prove or
refute that explanation from the model's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .quant.linear import QuantLinear

# Rounding steps that the largest logit may be off by after a whole forward in low precision.
_STEPS = 4


@dataclass(frozen=True)
class Difference:
    """Where a text leaves the target's greedy choice.

    Attributes:
        index: Position in the continuation, from 0.
        token: The id that stands there.
        best: The id the target finds most likely there.
        gap: Logit of `best` minus logit of `token`.
        tolerance: Largest gap that counts as a near-tie for the model's dtype.
    """

    index: int
    token: int
    best: int
    gap: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap <= self.tolerance


@torch.no_grad()
def greedy_differences(
    model: Any, prompt: torch.Tensor, continuation: torch.Tensor, coarse: bool = False
) -> list[Difference]:
    """Feeds `continuation` back through the plain model and returns every departure from greedy.

    One forward without a cache over `prompt + continuation`; end-of-text rules are not applied.

    Args:
        model: The target.
        prompt: `[P]` int64.
        continuation: `[N]` int64, the tokens to be judged.
        coarse: It was written over a cache of fewer bits than the model's dtype has.

    Returns:
        One `Difference` for each token that is not the most likely one given all before it.
    """
    ids = torch.cat([prompt, continuation]).to(model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = continuation.to(model.device)
    best = logits.argmax(-1)
    gap = logits.gather(1, best[:, None]) - logits.gather(1, chosen[:, None])
    step = _eps(model, coarse) * logits.abs().max(-1).values
    return [
        Difference(i, int(chosen[i]), int(best[i]), float(gap[i, 0]), float(step[i]) * _STEPS)
        for i in (chosen != best).nonzero()[:, 0].tolist()
    ]


def _eps(model: Any, coarse: bool) -> float:
    """Returns the relative size of a rounding step of a model.

    Quantized layers and caches count as bfloat16: some compute in it, and where activations are
    quantized a difference in their last bit can become one of a whole 8-bit step.
    """
    coarse = coarse or any(isinstance(module, QuantLinear) for module in model.modules())
    return torch.finfo(torch.bfloat16 if coarse else model.dtype).eps


def explain(
    model: Any,
    prompt: torch.Tensor,
    ours: torch.Tensor,
    other: torch.Tensor,
    coarse: bool = False,
) -> str:
    """Says in one sentence whether two continuations agree and, if not, whether a near-tie is why.

    Args:
        model: The target.
        prompt: `[P]` int64.
        ours: `[N]` int64.
        other: `[M]` int64.
        coarse: They were written over a cache of fewer bits than the model's dtype has.
    """
    shared = min(len(ours), len(other))
    differ = (ours[:shared] != other[:shared]).nonzero()
    if not len(differ):
        same = len(ours) == len(other)
        return "identical" if same else f"different lengths: {len(ours)} and {len(other)} tokens"
    at = int(differ[0])
    found = [
        d
        for text in (ours, other)
        for d in greedy_differences(model, prompt, text[: at + 1], coarse)
        if d.index == at
    ]
    if all(d.near_tie for d in found):
        gap = max((d.gap for d in found), default=0.0)
        return f"first difference at token {at}: a near-tie (top-2 gap {gap:.2g})"
    worst = max(found, key=lambda d: d.gap)
    return f"first difference at token {at}: NOT a near-tie (gap {worst.gap:.2g})"
