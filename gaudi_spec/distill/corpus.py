"""The training text: shards of the target's own answers, and of given texts, on disk.

Every shard follows from the seed and its number alone, so a stopped run goes on where it was.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import prompts
from .teacher import Sample, Teacher

OWN_PROMPT = 48  # tokens of a prompt that the target writes itself


@dataclass(frozen=True)
class Recipe:
    """What the corpus is made of.

    Attributes:
        seed: Seed of everything random.
        temperatures: One after the other, shard by shard; 0 is greedy.
        prompts: Prompts of the caller. None: half built-in ones, half written by the target.
        texts: Texts to learn besides the target's own, every third shard.
    """

    seed: int
    temperatures: tuple[float, ...]
    prompts: list[str] | None = None
    texts: list[str] | None = None


class Corpus:
    """Makes and reads shards in a directory.

    Args:
        directory: Where the shards are.
        teacher: Samples text.
        tokenizer: The target's.
        ends: Ids that end a text.
        recipe: What to make.
    """

    def __init__(
        self, directory: Path, teacher: Teacher, tokenizer: Any, ends: Sequence[int], recipe: Recipe
    ) -> None:
        self.directory, self.recipe = directory, recipe
        self._teacher, self._tokenizer, self._ends = teacher, tokenizer, list(ends)
        directory.mkdir(parents=True, exist_ok=True)

    def collect(self, tokens: int, deadline: float, progress: Callable[[int], Any]) -> list[Path]:
        """Makes shards until they hold `tokens` tokens of continuation, or time is up.

        Args:
            tokens: Tokens wanted.
            deadline: `time.monotonic()` after which no further shard is begun; at least one is.
            progress: Told how many tokens each shard holds.

        Returns:
            The shards, in order.
        """
        made: list[Path] = []
        held = 0
        for index in itertools.count():
            path = self.directory / f"{index:05d}.safetensors"
            if not path.exists() and made and (held >= tokens or time.monotonic() > deadline):
                return made
            if not path.exists():
                _save(self._make(index), path)
            made.append(path)
            count = int(load(path).count.sum())
            held += count
            progress(count)

    def _make(self, index: int) -> Sample:
        generator = torch.Generator(self._teacher.device)
        generator.manual_seed(self.recipe.seed * 1_000_003 + index)
        if self.recipe.texts and index % 3 == 2:
            return self._teacher.score(self._texts(index))
        temperatures = self.recipe.temperatures
        return self._teacher.sample(
            self._prompts(index, generator),
            temperatures[index // 2 % len(temperatures)],
            generator,
            self._ends,
        )

    def _prompts(self, index: int, generator: torch.Generator) -> list[list[int]]:
        """Returns a shard's prompts, those of similar length not sorted: shards are the batch."""
        if self.recipe.prompts:
            source = _cycle(self.recipe.prompts, self.recipe.seed, index * self._teacher.batch)
        else:
            source = prompts.endless(self.recipe.seed * 1_000_003 + index)
        opening = prompts.opening(self._tokenizer)
        if self.recipe.prompts is None and opening is not None and index % 2:
            source = itertools.chain(self._own(*opening, generator), source)
        chats = (prompts.as_chat(self._tokenizer, text) for text in source)
        fitting = (chat for chat in chats if len(chat) <= self._teacher.prompt)
        return list(itertools.islice(fitting, self._teacher.batch))

    def _own(self, start: list[int], end: int, generator: torch.Generator) -> list[str]:
        """Returns prompts that the target wrote, those that it finished."""
        batch = self._teacher.batch
        sample = self._teacher.sample([start] * batch, 1.0, generator, [end], OWN_PROMPT)
        written = [
            row[p : p + n].tolist()
            for row, p, n in zip(sample.tokens, sample.prompt.tolist(), sample.count.tolist())
        ]
        done = [ids[:-1] for ids in written if ids[-1] == end and len(ids) > 3]
        return self._tokenizer.batch_decode(done, skip_special_tokens=True)

    def _texts(self, index: int) -> list[list[int]]:
        batch, most = self._teacher.batch, self._teacher.new + 1
        source = _cycle(self.recipe.texts, self.recipe.seed, index // 3 * batch)
        rows = (self._tokenizer(text)["input_ids"][:most] for text in source)
        return list(itertools.islice((row for row in rows if len(row) > 1), batch))


def load(path: Path) -> Sample:
    """Reads a shard."""
    return Sample(**load_file(path))


def _save(sample: Sample, path: Path) -> None:
    part = path.with_suffix(".tmp")
    save_file({name: value.contiguous() for name, value in sample._asdict().items()}, part)
    os.replace(part, path)


def _cycle(items: list[str], seed: int, start: int):
    """Yields items from `start` on, in an order shuffled anew in each pass."""
    for n in itertools.count(start):
        order = list(range(len(items)))
        random.Random(f"{seed} {n // len(items)}").shuffle(order)
        yield items[order[n % len(items)]]
