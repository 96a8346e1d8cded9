"""How a call wants its tokens chosen: plain values, checked."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ConfigError, InputError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of one call; names and meanings are those of Transformers' `GenerationConfig`.

    The default is greedy decoding without processors. Two have vLLM's meaning, since Transformers
    has none: `presence_penalty` and `frequency_penalty` count new tokens only.

    Attributes:
        do_sample: Draw tokens; otherwise the most likely one is taken.
        seed: Fixes the noise: one for all rows (each has its own noise still), or one for each row,
            whose text is then the same alone and in any batch. None: drawn from torch's CPU
            generator, so that `torch.manual_seed` fixes it and the next call differs.
        prefix_allowed_tokens_fn: As in Transformers; called on the host for every token.
        logits_processor: Callables `(input_ids [B, W], scores [B, V]) -> scores`, likewise.
        pad_token_id: What they see as padding.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    do_sample: bool = False
    seed: int | Sequence[int] | None = None
    temperature: float = 1.0
    top_h: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    renormalize_logits: bool = False
    sequence_bias: Any = None
    encoder_repetition_penalty: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: Sequence[Sequence[int]] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    prefix_allowed_tokens_fn: Any = None
    logits_processor: Sequence[Any] = ()
    pad_token_id: int = 0

    @property
    def on_host(self) -> bool:
        """Whether Python decides about every token."""
        return self.prefix_allowed_tokens_fn is not None or len(self.logits_processor) > 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # an unset option of Transformers may be None
            if getattr(self, field.name) is None:
                object.__setattr__(self, field.name, field.default)
        for name in ("temperature", "repetition_penalty", "encoder_repetition_penalty"):
            self._check(name, lambda x: 0 < x < math.inf, "a number above 0")
        for name in ("top_p", "min_p"):
            self._check(name, lambda x: 0 <= x <= 1, "from 0 to 1")
        for name in ("typical_p", "top_h"):
            self._check(name, lambda x: 0 < x <= 1, "above 0 and at most 1")
        for name in ("epsilon_cutoff", "eta_cutoff"):
            self._check(name, lambda x: 0 <= x < 1, "from 0 to below 1")
        for name in ("frequency_penalty", "presence_penalty"):
            self._check(name, math.isfinite, "a number")
        for name in ("top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
            self._check(name, lambda x: type(x) is int and x >= 0, "a whole number of at least 0")
        decay = self.exponential_decay_length_penalty
        pair = isinstance(decay, (tuple, list)) and len(decay) == 2
        if decay is not None and not (pair and decay[1] > 0):
            raise ConfigError(
                "exponential_decay_length_penalty must be a start and a factor above 0, not "
                f"{decay!r}."
            )
        self._check_seed()

    def _check(self, name: str, fits: Any, wanted: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not fits(value):
            hint = "; do_sample=False is greedy" if name == "temperature" and value == 0 else ""
            raise ConfigError(f"{name} must be {wanted}, not {value!r}{hint}.")

    def _check_seed(self) -> None:
        seed = self.seed
        if seed is None:
            return
        seeds: Any = seed.tolist() if hasattr(seed, "tolist") else seed
        try:
            one = not isinstance(seeds, (list, tuple))
            if isinstance(seeds, bool):
                raise TypeError
            seeds = operator.index(seeds) if one else tuple(map(operator.index, seeds))
        except TypeError:
            raise ConfigError(f"seed must be a whole number, or one a row, not {seed!r}.") from None
        object.__setattr__(self, "seed", seeds)

    def biases(self, vocab_size: int) -> dict[tuple[int, ...], float]:
        """Returns `sequence_bias`, which may be a mapping or a list of pairs, as a mapping."""
        given = self.sequence_bias or {}
        pairs = given.items() if isinstance(given, dict) else given
        try:
            found = {_ids("sequence_bias", ids, vocab_size): float(bias) for ids, bias in pairs}
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"sequence_bias must map tuples of ids to numbers, not {given!r}."
            ) from None
        return found

    def bad_words(self, vocab_size: int, eos_token_ids: Iterable[int]) -> list[tuple[int, ...]]:
        """Returns the forbidden sequences but an end of text alone, as Transformers does."""
        words = [_ids("bad_words_ids", word, vocab_size) for word in self.bad_words_ids or ()]
        return [word for word in dict.fromkeys(words) if word not in {(i,) for i in eos_token_ids}]

    def marked(self, name: str, vocab_size: int) -> list[int]:
        """Returns the ids of an option that is one id or several; ids beyond V cannot come up."""
        value = getattr(self, name)
        ids = (value,) if isinstance(value, int) else value
        limit = vocab_size if name.startswith("forced") else None
        return [i for i in _ids(name, ids, limit) if i < vocab_size]


def _ids(name: str, ids: Any, vocab_size: int | None) -> tuple[int, ...]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    try:
        found = tuple(operator.index(i) for i in ids)
    except TypeError:
        raise InputError(f"{name} must hold token ids, not {ids!r}.") from None
    if not found or min(found) < 0 or (vocab_size is not None and max(found) >= vocab_size):
        raise InputError(
            f"{name} holds {ids!r}; ids must be given and be at least 0"
            + (f" and below {vocab_size}." if vocab_size is not None else ".")
        )
    return found
