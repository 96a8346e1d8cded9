"""Logits processors over static shapes, in Transformers' meaning, for every position of a block.

The token at index i sees the tokens before i: prompt, committed text, and the earlier candidates of
its own block. Transformers' processors also see the padding of a batch as text; here a row is what
it is alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Text(NamedTuple):
    """What the processors of a block read.

    Attributes:
        tokens: `[B, W]` int64, each row's text with its candidates written in.
        index: `[B, T]` int64, where each predicted token would stand; consecutive.
        prompt: `[B]` int64, tokens of the prompt.
        limit: `[B]` int64, length at which the row is done.
        min_length: `[B]` int64, length below which no end of text may come.
        ends: `[V]` int32, 1 at end-of-text ids.
    """

    tokens: torch.Tensor
    index: torch.Tensor
    prompt: torch.Tensor
    limit: torch.Tensor
    min_length: torch.Tensor
    ends: torch.Tensor


def sequence_bias(
    logits: torch.Tensor,
    text: Text,
    prefix: torch.Tensor,
    size: torch.Tensor,
    last: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Adds a bias to the last token of each sequence whose other tokens stand right before it.

    Args:
        logits: `[B, T, V]`.
        text: The text.
        prefix: `[M, L]` int64, all but the last token of each sequence, at the right; -1 elsewhere.
        size: `[M]` int64, tokens in `prefix`.
        last: `[M]` int64.
        bias: `[M]` float32; minus infinity forbids.
    """
    match = (text.index[:, :, None] >= size).int()
    for back in range(1, prefix.shape[1] + 1):
        want = prefix[:, -back]
        match = match * ((_behind(text, back)[:, :, None] == want) | (want < 0)).int()
    added = torch.where(match > 0, bias, 0.0).to(logits.dtype)
    return logits + torch.zeros_like(logits).scatter_add(-1, last.expand(added.shape), added)


def repetition_penalty(logits: torch.Tensor, text: Text, value: torch.Tensor) -> torch.Tensor:
    """Makes every token of prompt and text less likely."""
    seen = _counts(text, torch.zeros_like(text.prompt), logits.shape[-1]) > 0
    return torch.where(seen, _scaled(logits, value), logits)


def encoder_repetition_penalty(
    logits: torch.Tensor, text: Text, value: torch.Tensor
) -> torch.Tensor:
    """Makes every token of the prompt more likely; `value` is 1 / penalty."""
    inside = torch.arange(text.tokens.shape[1], device=logits.device) < text.prompt[:, None]
    seen = _occurrences(text.tokens, inside, logits.shape[-1])[:, None] > 0
    return torch.where(seen, _scaled(logits, value), logits)


def new_token_penalties(
    logits: torch.Tensor, text: Text, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtracts `frequency` for each time a token was generated, and `presence` if it was."""
    counts = _counts(text, text.prompt, logits.shape[-1])
    return logits - frequency * counts - presence * (counts > 0)


def no_repeat_ngram(
    logits: torch.Tensor, text: Text, n: int, of_prompt: bool = False
) -> torch.Tensor:
    """Forbids the token that would complete an n-gram of the text, or of the prompt alone."""
    width = text.tokens.shape[1]
    if n > width:
        return logits
    starts = torch.arange(width - n + 1, device=logits.device)
    end = text.prompt[:, None] if of_prompt else text.index
    match = (starts + n - 1 < end[:, :, None]).int().expand(*text.index.shape, -1)
    for back in range(1, n):
        there = text.tokens[:, n - 1 - back : width - back]
        match = match * (_behind(text, back)[:, :, None] == there[:, None]).int()
    match = match * (text.index[:, :, None] >= n - 1).int()
    completing = text.tokens[:, n - 1 :].clamp(max=logits.shape[-1] - 1)
    banned = torch.zeros_like(logits, dtype=torch.int32)
    banned = banned.scatter_add(-1, completing[:, None].expand(match.shape), match)
    return _forbid(logits, banned > 0)


def min_length(logits: torch.Tensor, text: Text) -> torch.Tensor:
    """Forbids end of text below `min_length`."""
    early = (text.index < text.min_length[:, None])[:, :, None]
    return _forbid(logits, early & (text.ends[: logits.shape[-1]] > 0))


def forced_bos(logits: torch.Tensor, text: Text, ids: torch.Tensor) -> torch.Tensor:
    """Makes one of the marked ids `[V]` the second token of the row."""
    return _force(logits, text.index == 1, ids)


def forced_eos(logits: torch.Tensor, text: Text, ids: torch.Tensor) -> torch.Tensor:
    """Makes one of the marked ids `[V]` the last token of the budget."""
    return _force(logits, text.index == text.limit[:, None] - 1, ids)


def remove_invalid(logits: torch.Tensor, text: Text) -> torch.Tensor:
    """Replaces NaN by 0 and infinities by the largest numbers."""
    most = torch.finfo(logits.dtype)
    logits = torch.where(torch.isnan(logits), 0.0, logits)
    return logits.clamp(most.min, most.max)


def length_decay(
    logits: torch.Tensor, text: Text, start: torch.Tensor, log_factor: torch.Tensor
) -> torch.Tensor:
    """Raises end of text exponentially from `start` `[1]` new tokens on.

    An end that is forbidden stays so (in Transformers it becomes NaN).
    """
    over = (text.index - text.prompt[:, None] - start).clamp(min=0)
    growth = torch.expm1(over * log_factor)[:, :, None]
    raised = logits + logits.abs() * growth
    open_end = (text.ends[: logits.shape[-1]] > 0) & (logits > float("-inf"))
    return torch.where(open_end, raised, logits)


def suppress(logits: torch.Tensor, text: Text, ids: torch.Tensor) -> torch.Tensor:
    """Forbids the marked ids `[V]`."""
    return _forbid(logits, ids > 0)


def begin_suppress(
    logits: torch.Tensor, text: Text, ids: torch.Tensor, late: torch.Tensor
) -> torch.Tensor:
    """Forbids the marked ids `[V]` as first new token; as second, if `late` `[1]` is 1.

    It is, where a first token behind a prompt of one is forced.
    """
    begin = text.prompt + late * (text.prompt == 1)
    return _forbid(logits, (text.index == begin[:, None])[:, :, None] & (ids > 0))


def _behind(text: Text, back: int) -> torch.Tensor:
    """Returns the tokens `back` places before each index, `[B, T]`.

    Before the text there is some token of it, so a caller checks the index.
    """
    return text.tokens.gather(1, (text.index - back).clamp(min=0))


def _counts(text: Text, begin: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns how often each token stands from `begin` `[B]` up to each index, `[B, T, V]` int32.

    What all positions see is counted once; a candidate adds one for those behind it.
    """
    at = torch.arange(text.tokens.shape[1], device=begin.device)
    common = (at >= begin[:, None]) & (at < text.index[:, :1])
    counts = _occurrences(text.tokens, common, vocab_size)[:, None]
    candidates = text.tokens.gather(1, text.index[:, :-1])[:, :, None]
    ids = torch.arange(vocab_size, device=begin.device)
    new = (candidates == ids).int().cumsum(1, dtype=torch.int32)
    return counts + torch.cat([torch.zeros_like(counts), new], 1)


def _occurrences(tokens: torch.Tensor, where: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns how often each token stands where `where` `[B, W]` is set, `[B, V]` int32."""
    where = (where & (tokens < vocab_size)).int()
    zero = torch.zeros(len(tokens), vocab_size, dtype=torch.int32, device=tokens.device)
    return zero.scatter_add(1, tokens.clamp(max=vocab_size - 1), where)


def _scaled(logits: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def _force(logits: torch.Tensor, where: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    forced = torch.where(ids > 0, 0.0, float("-inf"))
    return torch.where(where[:, :, None], forced, logits)


def _forbid(logits: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where, float("-inf"), logits)
