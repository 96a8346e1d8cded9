"""What is generated: built-in prompts by kind, a file of prompts, or random tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..distill import prompts
from ..errors import ConfigError, InputError


@dataclass(frozen=True)
class Workload:
    """Prompts under one name.

    Attributes:
        name: Such as "chat" or "random 128".
        rows: Token ids of each prompt.
    """

    name: str
    rows: list[list[int]]

    def batches(self, size: int) -> list[list[list[int]]]:
        """Returns the prompts, `size` at a time; the first ones again where a batch is short."""
        count = -(-len(self.rows) // size) * size
        rows = [self.rows[i % len(self.rows)] for i in range(count)]
        return [rows[i : i + size] for i in range(0, count, size)]

    def take(self, count: int) -> Workload:
        """Returns a workload of exactly `count` prompts, repeating them if there are fewer."""
        return Workload(self.name, [self.rows[i % len(self.rows)] for i in range(count)])


def kinds() -> dict[str, list[str]]:
    """Returns built-in prompts by kind: those that `distill` holds out, and some of our own."""
    return prompts.held_out() | prompts.section("bench")


def by_kind(tokenizer: Any, names: Sequence[str]) -> list[Workload]:
    """Returns one workload for each kind, as chat messages.

    Raises:
        ConfigError: There is no such kind.
    """
    known = kinds()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"There is no kind {unknown[0]!r} of prompts: choose of {list(known)}.")
    return [
        Workload(name, [prompts.as_chat(tokenizer, text) for text in known[name]]) for name in names
    ]


def mixed(workloads: Sequence[Workload]) -> Workload:
    """Returns all prompts under one name, kind after kind in turn."""
    if len(workloads) == 1:
        return workloads[0]
    longest = max(len(w.rows) for w in workloads)
    rows = [w.rows[i] for i in range(longest) for w in workloads if i < len(w.rows)]
    return Workload("+".join(w.name for w in workloads), rows)


def from_file(path: str, tokenizer: Any) -> list[Workload]:
    """Reads JSON lines: a string, or `{"prompt": TEXT, "kind": NAME}`; the kind may be missing.

    Raises:
        ConfigError: It cannot be read.
        InputError: A line is something else, or there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot read {path}: {reason}.") from error
    found: dict[str, list[list[int]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        value = {"prompt": value} if isinstance(value, str) else value
        text = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(text, str) or not text:
            raise InputError(
                f'Line {number} of {path} is neither a JSON string nor {{"prompt": "..."}}.'
            )
        name = str(value.get("kind", Path(path).stem))
        found.setdefault(name, []).append(prompts.as_chat(tokenizer, text))
    if not found:
        raise InputError(f"{path} holds no prompt: give JSON lines.")
    return [Workload(name, rows) for name, rows in found.items()]


def random_tokens(length: int, count: int, vocab_size: int, seed: int) -> Workload:
    """Returns prompts of `length` random ids each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (count, length), generator=generator)
    return Workload(f"random {length}", ids.tolist())
