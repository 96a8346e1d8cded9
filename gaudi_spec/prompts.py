"""Where prompts come from: the command line, a book, or a data set."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError, InputError
from .flags import DEFAULT_PROMPTS

_DATASET_TOKENS = 16  # of a data set's prompts are used by default, as in Optimum Habana
_READERS = {
    ".jsonl": lambda file: [json.loads(line) for line in file if line.strip()],
    ".json": json.load,
    ".csv": lambda file: list(csv.DictReader(file)),
    ".txt": lambda file: [{"text": line.rstrip("\n")} for line in file if line.strip()],
}


class Batch(NamedTuple):
    """Prompts of one iteration.

    Attributes:
        sentences: One a row.
        length: Tokens that every prompt is cut or stretched to, or None.
        number: Added to the seed: parts of a data set draw differently.
    """

    sentences: list[str]
    length: int | None = None
    number: int = 0


class Work(NamedTuple):
    """What a run consists of: untimed batches, then timed ones, of at most `rows` rows."""

    warm_up: list[Batch]
    timed: list[Batch]


def check(args: argparse.Namespace) -> None:
    """Checks the flags that say where prompts come from, before anything is loaded."""
    for prompt in args.prompt or ():
        if not prompt:
            raise InputError("A prompt is empty: give at least one character.")
    if args.prompt is not None and not args.prompt:
        raise InputError("--prompt was given without any text.")
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch_size must be at least 1, not {args.batch_size}.")
    sources = ("prompt", "book_source", "dataset_name")
    given = [f"--{name}" for name in sources if getattr(args, name)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} contradict each other: give one of them.")
    if args.book_source is True:
        raise ConfigError(
            "--book_source downloads nothing: name a local text file, as in --book_source FILE."
        )
    if args.book_source and args.max_input_tokens < 1:
        raise ConfigError("--book_source needs --max_input_tokens, the length of its prompts.")
    if args.dataset_name and args.simulate_dyn_prompt:
        raise ConfigError("--simulate_dyn_prompt is for fixed prompts: leave out --dataset_name.")
    for name, unset in (("column_name", None), ("dataset_max_samples", -1)):
        if getattr(args, name) != unset and not args.dataset_name:
            raise ConfigError(f"--{name} is for data sets: add --dataset_name.")
    if args.dataset_max_samples == 0:
        raise ConfigError("--dataset_max_samples=0 leaves no prompt: give more, or -1 for all.")
    if min(args.simulate_dyn_prompt or [1]) < 1:
        raise ConfigError("--simulate_dyn_prompt takes prompt lengths of at least 1.")


def work(args: argparse.Namespace) -> Work:
    """Returns the batches of a run; a data set sets `args.max_input_tokens` if nothing else does.

    Raises:
        InputError: A file cannot be read, or holds no prompt.
    """
    if args.dataset_name:
        if args.max_input_tokens == 0:
            args.max_input_tokens = _DATASET_TOKENS
        rows, size = _dataset(args), args.batch_size or 1
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        batches = [Batch(part, number=i) for i, part in enumerate(parts)]
        timed = batches[: args.n_iterations] if args.run_partial_dataset else batches
        return Work([batches[i % len(batches)] for i in range(args.warmup)], timed)
    sentences = _book(args) if args.book_source else _sentences(args)
    lengths = args.simulate_dyn_prompt or [None]
    distinct = sorted(set(lengths), key=lengths.index)
    return Work(
        [Batch(sentences, length) for _ in range(args.warmup) for length in distinct],
        [Batch(sentences, lengths[i % len(lengths)]) for i in range(args.n_iterations)],
    )


def _sentences(args: argparse.Namespace) -> list[str]:
    """Returns the prompts, repeated or cut to the batch size as in Optimum Habana."""
    prompts = list(args.prompt or DEFAULT_PROMPTS)
    size = args.batch_size or (len(prompts) if args.prompt else 1)
    if args.prompt and size < len(prompts):
        print(
            f"Only the first {size} of {len(prompts)} prompts are used: --batch_size {size}.",
            file=sys.stderr,
        )
    return [prompts[i % len(prompts)] for i in range(size)]


def _book(args: argparse.Namespace) -> list[str]:
    words = _read(args.book_source, lambda file: file.read().split())
    if len(words) < args.max_input_tokens:
        raise InputError(
            f"{args.book_source} has {len(words)} words, --max_input_tokens asks for "
            f"{args.max_input_tokens}: take a longer text or fewer tokens."
        )
    return [" ".join(words[: args.max_input_tokens])] * (args.batch_size or 1)


def _dataset(args: argparse.Namespace) -> list[str]:
    name, column, most = args.dataset_name, args.column_name, args.dataset_max_samples
    reader = _READERS.get(Path(name).suffix)
    rows = _read(name, reader) if reader else _installed(name)
    if isinstance(rows, list):
        rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    listed = isinstance(rows, list) or not reader
    if not listed or not len(rows) or not isinstance(rows[0], dict):
        raise InputError(f"{name} is not a list of rows: give one object, or text, a prompt.")
    if column is None:
        column = next((key for key, value in rows[0].items() if isinstance(value, str)), None)
        print(f"The prompts are the column {column!r} (--column_name).", file=sys.stderr)
    texts = []
    for i in range(len(rows) if most < 0 else min(most, len(rows))):
        text = rows[i].get(column) if isinstance(rows[i], dict) else None
        if not isinstance(text, str) or not text:
            raise InputError(
                f"Row {i + 1} of {name} has no text in the column {column!r}: choose one of "
                f"{', '.join(map(str, rows[0]))} with --column_name."
            )
        texts.append(text)
    return texts


def _installed(name: str) -> Any:
    """Returns the rows of a data set of the package datasets: test, validation or train."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"--dataset_name={name} is not a .jsonl, .json, .csv or .txt file: give one, or "
            "install the package datasets."
        ) from error
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"Cannot load the data set {name}: {reason[:300]}") from error
    names = ["test", "validation", "train", *splits]
    return splits[next(name for name in names if name in splits)]


def _read(path: str, reader: Any) -> Any:
    try:
        with open(os.path.expanduser(path), encoding="utf-8", newline="") as file:
            return reader(file)
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise InputError(f"Cannot read {path}: {reason}.") from error
