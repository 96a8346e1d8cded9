"""Text of tokens that come one at a time, for one row or for a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from queue import Queue
from typing import Any

from transformers import TextStreamer

from .errors import ConfigError, InputError
from .ledger import TokenEvent


class TextDecoder:
    """Turns one row's tokens into text that is final: the pieces concatenate to the whole text.

    A piece is held back while it ends inside a character, and is decoded together with the piece
    before it, because tokenizers treat the start of a text differently.

    Args:
        tokenizer: Has `decode`.
        **options: Arguments of `decode`.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._ids: list[int] = []
        self._begin = self._end = 0  # of the last piece

    def add(self, token: int) -> str:
        """Returns the text that this token makes final, which may be empty."""
        self._ids.append(token)
        text = self._rest()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return text

    def flush(self) -> str:
        """Returns what was held back, and begins a new text."""
        text = self._rest()
        self._ids, self._begin, self._end = [], 0, 0
        return text

    def _rest(self) -> str:
        known = self._decode(self._ids[self._begin : self._end])
        return self._decode(self._ids[self._begin :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._options) if ids else ""


class BatchStreamer:
    """The texts of all rows of a batch while they are generated.

    Give it to `gaudi_spec.generate(streamer=...)` in one thread and iterate over it in another: it
    yields `(row, text)` until all rows have ended. An error of the call is raised there too. Or
    override `on_text`.

    Args:
        tokenizer: Has `decode`.
        timeout: Seconds to wait for the next text; None waits for ever.
        skip_special_tokens: As in `decode`.
        **options: Other arguments of `decode`.
    """

    def __init__(
        self,
        tokenizer: Any,
        timeout: float | None = None,
        skip_special_tokens: bool = True,
        **options: Any,
    ) -> None:
        self._make = lambda: TextDecoder(
            tokenizer, skip_special_tokens=skip_special_tokens, **options
        )
        self._decoders: dict[int, TextDecoder] = {}
        self._queue: Queue[tuple[int, str] | BaseException | None] = Queue()
        self._timeout = timeout

    def put(self, value: Any) -> None:
        """Takes the prompts `[B, W]`, of which nothing is shown."""
        if value.dim() < 2:
            raise ConfigError("A BatchStreamer cannot follow model.generate: use custom_generate.")

    def add(self, event: TokenEvent) -> None:
        """Takes the next token of a row."""
        decoder = self._decoders.setdefault(event.row, self._make())
        text = decoder.add(event.token)
        if event.finish_reason is not None:
            text += decoder.flush()
        if text:
            self.on_text(event.row, text)

    def on_text(self, row: int, text: str) -> None:
        """Is called with every piece of text; hands it to the iterator."""
        self._queue.put((row, text))

    def end(self, error: BaseException | None = None) -> None:
        """Ends the iteration, by raising `error` if there was one."""
        self._decoders.clear()
        self._queue.put(error)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Hands an error inside the block on to the iterator, too."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        item = self._queue.get(timeout=self._timeout)
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item


def check_streamer(streamer: Any, rows: int) -> None:
    """Refuses, before any compute, what cannot stream these rows.

    Raises:
        ConfigError: It is no streamer.
        InputError: Transformers' text streamers take one row.
    """
    if streamer is None or isinstance(streamer, BatchStreamer):
        return
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ConfigError(f"streamer must have put() and end(), which {streamer!r} has not.")
    if isinstance(streamer, TextStreamer) and rows > 1:
        raise InputError(
            f"{type(streamer).__name__} only supports batch size 1, and there are {rows} rows: use "
            "gaudi_spec.BatchStreamer."
        )
