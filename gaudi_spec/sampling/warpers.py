"""Temperature, top-k, top-p and their kin: Transformers' warpers for `[B, T, V]` logits.

Every value is a tensor `[1]`, so that another one needs no other graph.
"""

from __future__ import annotations

import torch


def temperature(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Divides by the temperature."""
    return logits / value


def top_h(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keeps the likeliest of the 100 first tokens that hold the given share of their entropy."""
    best, ids = logits.topk(min(100, logits.shape[-1]))
    entropy, p = _entropy(best)
    terms = torch.where(p > 0, -p * p.log(), float("inf"))
    kept = terms.cumsum(-1) <= entropy * value
    kept = _but_first(kept.int(), first=1)
    return _forbid(logits, torch.zeros_like(logits, dtype=torch.int32).scatter(-1, ids, kept) == 0)


def top_k(logits: torch.Tensor, most: int, value: torch.Tensor) -> torch.Tensor:
    """Keeps the k best and what equals the last of them.

    Args:
        logits: `[B, T, V]`.
        most: Largest k that this graph serves.
        value: `[1]` int64, k.
    """
    best = logits.topk(min(most, logits.shape[-1])).values
    last = (value - 1).clamp(max=best.shape[-1] - 1)
    return _forbid(logits, logits < best.index_select(-1, last))


def top_p(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches p; `value` is 1 - p."""
    ascending, ids = logits.sort(descending=False)
    dropped = (ascending.softmax(-1).cumsum(-1) <= value).int()
    return _forbid(logits, _unsort(_but_last(dropped), ids))


def min_p(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keeps what is at least p times as likely as the likeliest token."""
    p = logits.softmax(-1)
    return _forbid(logits, p < value * p.amax(-1, keepdim=True))


def typical_p(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keeps the tokens whose surprise is nearest to the entropy, up to this mass."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, log_p * p, 0.0).sum(-1, keepdim=True)
    away, ids = (-log_p - entropy).abs().sort(descending=False)
    reached = logits.gather(-1, ids).softmax(-1).cumsum(-1) < value
    last = reached.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return _forbid(logits, _unsort(_but_first((away > away.gather(-1, last)).int(), 0), ids))


def epsilon_cutoff(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Drops what is less likely than epsilon, but never the best."""
    return _forbid(logits, (logits.softmax(-1) < value) & (logits < _best(logits)))


def eta_cutoff(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Drops what is less likely than a threshold that falls with the entropy."""
    entropy, _ = _entropy(logits)
    least = torch.minimum(value, value.sqrt() * torch.exp(-entropy))
    return _forbid(logits, (logits.softmax(-1) < least) & (logits < _best(logits)))


def renormalize(logits: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities."""
    return logits.log_softmax(-1)


def _entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns entropy `[B, T, 1]` and probabilities, in the arithmetic of `Categorical`."""
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    p = log_p.softmax(-1)
    surprise = log_p.clamp(min=torch.finfo(log_p.dtype).min) * p
    return -surprise.sum(-1, keepdim=True), p


def _forbid(logits: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(where, float("-inf"))


def _best(logits: torch.Tensor) -> torch.Tensor:
    return logits.amax(-1, keepdim=True)


def _unsort(dropped: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns, in the order of the vocabulary, what is dropped in a sorted order."""
    return torch.zeros_like(dropped).scatter(-1, ids, dropped) > 0


def _but_first(flags: torch.Tensor, first: int) -> torch.Tensor:
    """Returns int32 flags with the first one replaced."""
    at = torch.arange(flags.shape[-1], device=flags.device)
    return torch.where(at == 0, first, flags)


def _but_last(flags: torch.Tensor) -> torch.Tensor:
    """Returns int32 flags with the last one cleared."""
    at = torch.arange(flags.shape[-1], device=flags.device)
    return torch.where(at == flags.shape[-1] - 1, 0, flags)
