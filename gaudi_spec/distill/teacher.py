"""The target as a teacher: samples batches of text over static shapes and notes what it thought.

The target's own text is what a draft has to guess, so it is the best text to train on
(Zhou et al. 2023, DistillSpec, arXiv:2310.08461).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..buckets import round_up
from ..device import Device
from ..models.hf import HFCausalLM

WINDOW = 64  # attention reads a multiple of this many slots


class Sample(NamedTuple):
    """Text of a batch, and the teacher's distribution before each of its tokens.

    Attributes:
        tokens: `[B, P + R]` int32, prompts left-justified, each followed by its continuation.
        prompt: `[B]` int32, prompt lengths.
        count: `[B]` int32, tokens of the continuation, end of text included.
        top_ids: `[B, R, C]` int32, the C likeliest ids.
        top_logprobs: `[B, R, C]` float16, their log-probabilities at temperature 1.
    """

    tokens: torch.Tensor
    prompt: torch.Tensor
    count: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class Teacher:
    """Generates with one model at fixed sizes.

    Args:
        model: The target, on the device.
        device: The device.
        batch: B.
        prompt: Longest prompt.
        new: R, new tokens of a row.
        candidates: C, candidates noted for each token.
    """

    def __init__(
        self, model: Any, device: Device, batch: int, prompt: int, new: int, candidates: int = 32
    ) -> None:
        self.batch, self.prompt, self.new, self.candidates = batch, prompt, new, candidates
        self.device = device.torch_device
        self._border = device.border
        self._model = HFCausalLM(model, batch, round_up(prompt + new, WINDOW))
        place = {"dtype": torch.long, "device": device.torch_device}
        self._tokens = torch.zeros(batch, self._model.slots + 1, **place)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        generator: torch.Generator,
        ends: Sequence[int],
        new: int | None = None,
    ) -> Sample:
        """Continues every prompt.

        Args:
            prompts: B rows of at most `prompt` token ids.
            temperature: 0 takes the likeliest token; otherwise one of the C likeliest is drawn.
            generator: Source of randomness, on the device.
            ends: Ids that end a row.
            new: New tokens, fewer than R if given.
        """
        new = new or self.new
        rows = [torch.tensor(row) for row in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self._tokens.zero_()
        self._tokens[:, : tokens.shape[1]] = tokens
        length = torch.tensor([len(row) for row in rows], device=self._tokens.device)
        longest = tokens.shape[1]
        self._prefill(longest - 1)
        stops = torch.tensor(list(ends), device=length.device)
        alive = torch.ones(len(rows), dtype=torch.bool, device=length.device)
        count, ids, logprobs = torch.zeros_like(length), [], []
        for step in range(new):
            logits = self._step(length + step, longest + step)
            top = torch.log_softmax(logits, -1).topk(self.candidates, -1)
            ids.append(top.indices.int().cpu())
            logprobs.append(top.values.half().cpu())
            choice = top.indices[:, :1]
            if temperature > 0:
                odds = (top.values / temperature).softmax(-1)
                choice = top.indices.gather(1, odds.multinomial(1, generator=generator))
            self._tokens.scatter_(1, (length + step)[:, None], choice)
            count += alive
            alive &= ~torch.isin(choice[:, 0], stops)
            if step % 16 == 15 and not bool(alive.any()):
                break
        absent = new - len(ids)
        stack = [
            torch.nn.functional.pad(torch.stack(x, 1), (0, 0, 0, absent)) for x in (ids, logprobs)
        ]
        text = self._tokens[:, : longest + new].int().cpu()
        return Sample(text, length.int().cpu(), count.int().cpu(), *stack)

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[int]]) -> Sample:
        """Reads given texts, of 2 to R + 1 tokens each, instead of writing its own."""
        rows = [torch.tensor(row) for row in texts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self._tokens.zero_()
        self._tokens[:, : tokens.shape[1]] = tokens
        positions = torch.arange(tokens.shape[1] - 1, device=self.device).expand(self.batch, -1)
        ids, logprobs = [], []
        for part in positions.split(16, 1):
            self._model.cache.window = min(
                round_up(int(part[0, -1]) + 1, WINDOW), self._model.slots
            )
            logits = self._model.forward(self._tokens.gather(1, part), part).float()
            top = torch.log_softmax(logits, -1).topk(self.candidates, -1)
            ids.append(top.indices.int().cpu())
            logprobs.append(top.values.half().cpu())
            self._border()
        count = torch.tensor([len(row) - 1 for row in rows], dtype=torch.int32)
        text, first = tokens.int(), torch.ones_like(count)
        return Sample(text, first, count, torch.cat(ids, 1), torch.cat(logprobs, 1))

    def _prefill(self, count: int) -> None:
        positions = torch.arange(self._tokens.shape[1], device=self._tokens.device)
        positions = positions.expand(self.batch, -1)
        for begin in range(0, count, WINDOW):
            self._model.cache.window = min(begin + WINDOW, self._model.slots)
            part = slice(begin, min(begin + WINDOW, self._model.slots))
            self._model.fill(self._tokens[:, part], positions[:, part])
            self._border()

    def _step(self, length: torch.Tensor, longest: int) -> torch.Tensor:
        """Returns the logits `[B, V]` float32 after each row's first `length` tokens."""
        self._model.cache.window = min(round_up(longest, WINDOW), self._model.slots)
        at = (length - 1)[:, None]
        logits = self._model.forward(self._tokens.gather(1, at), at)[:, 0].float()
        self._border()
        return logits
