"""Prompts to distil with: a built-in list by kind, a file, and chat templates around either."""

from __future__ import annotations

import importlib.resources
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, InputError


def built_in() -> dict[str, list[str]]:
    """Returns the packaged lists by section: "topic" ..., then "kind", "held out", "bench" NAME."""
    text = importlib.resources.files(__package__).joinpath("prompts.txt").read_text("utf-8")
    sections = re.findall(r"^\[(.+)\]\n((?:[^\[\n].*\n)+)", text, re.MULTILINE)
    return {name: body.splitlines() for name, body in sections}


def held_out() -> dict[str, list[str]]:
    """Returns the prompts that are never trained on, by kind."""
    return section("held out")


def section(prefix: str) -> dict[str, list[str]]:
    """Returns the lists "PREFIX NAME" by NAME."""
    return {
        name.removeprefix(f"{prefix} "): texts
        for name, texts in built_in().items()
        if name.startswith(f"{prefix} ")
    }


def endless(seed: int) -> Iterator[str]:
    """Yields built-in prompts, kind after kind, each a template filled at random."""
    lists, draw = built_in(), random.Random(seed)
    kinds = list(section("kind").values())
    while True:
        for templates in kinds:
            yield re.sub(r"\{(\w+)\}", lambda m: draw.choice(lists[m[1]]), draw.choice(templates))


def read(path: str) -> list[str]:
    """Reads a file of prompts or texts: one a line, or a YAML/JSON list of strings.

    Raises:
        ConfigError: It cannot be read.
        InputError: It holds none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        items: Any = [line for line in text.splitlines() if line.strip()]
        if Path(path).suffix in (".yaml", ".yml", ".json"):
            items = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"Cannot read {path}: {reason}") from error
    if not isinstance(items, list) or not items or not all(isinstance(i, str) for i in items):
        raise InputError(f"{path} must hold texts, one a line or as a YAML list of strings.")
    return items


def as_chat(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of `text` as a user's message, or as it is without a template."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    message = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def opening(tokenizer: Any) -> tuple[list[int], int] | None:
    """Returns what comes before a user's words in a chat, and the token that ends them.

    A model asked to go on from there writes prompts of its own (Xu et al. 2024, Magpie,
    arXiv:2406.08464). None without a chat template.
    """
    if not tokenizer.chat_template:
        return None
    mark = "\N{SNOWMAN}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, _, after = chat.partition(mark)
    start, end = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (before, after))
    return (start, end[0]) if start and end else None
