"""How a call of `generate` wants its tokens chosen: Transformers' options to ours."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from .errors import ConfigError, InputError
from .request import token_ids
from .sampling.noise import default_seed
from .sampling.options import Sampling

# Fields of a generation config. Those of drawing do not matter to who takes the best.
WARPERS = """temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff
    renormalize_logits""".split()
PROCESSORS = """sequence_bias encoder_repetition_penalty repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens""".split()
# Arguments that such a config has no field for.
ARGUMENTS = """presence_penalty frequency_penalty seed generator logits_processor
    prefix_allowed_tokens_fn""".split()

# What a value must be, and what fails where it is not.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a whole number": (
        operator.index,
        "max_new_tokens max_length min_new_tokens min_length num_return_sequences pad_token_id",
    ),
    "a number": (lambda value: value + 0.0, "max_time"),
    "a list": (
        iter,
        "stop_strings bad_words_ids suppress_tokens begin_suppress_tokens logits_processor",
    ),
    "callable": (lambda value: value.__call__, "prefix_allowed_tokens_fn"),
}


def check_kinds(options: Mapping[str, Any]) -> None:
    """Refuses by name what Transformers would stumble over.

    Raises:
        InputError: A value is of the wrong kind.
    """
    for kind, (attempt, names) in _KINDS.items():
        for name in names.split():
            value = options.get(name)
            try:
                value is None or attempt(value)
            except (TypeError, AttributeError):
                raise InputError(f"{name} must be {kind}, not {value!r}.") from None


def to_sampling(model: Any, config: GenerationConfig, arguments: dict[str, Any]) -> Sampling:
    """Returns how tokens are chosen.

    Args:
        model: The target.
        config: Merged from all sources.
        arguments: A value or None for each of `ARGUMENTS`.

    Raises:
        ConfigError: A value is out of range, or two of them contradict each other.
    """
    arguments = dict(arguments)
    generator = arguments.pop("generator")
    if config.do_sample and generator is not None:
        if arguments["seed"] is not None:
            raise ConfigError("seed and generator are both given: leave one out.")
        arguments["seed"] = default_seed(generator)
    names = [*PROCESSORS, *(WARPERS if config.do_sample else ())]
    values = {name: getattr(config, name, None) for name in names}
    processors = tuple(arguments.pop("logits_processor") or ())
    if not all(map(callable, processors)):
        raise ConfigError(f"logits_processor must hold callables, not {list(processors)!r}.")
    pad = token_ids(config.pad_token_id) or token_ids(config.eos_token_id)
    if processors:
        _refuse_doubles(model, config, processors)
    if processors or arguments["prefix_allowed_tokens_fn"] is not None:
        _tell_cost(processors)
    return Sampling(
        do_sample=bool(config.do_sample),
        logits_processor=processors,
        pad_token_id=pad[0] if pad else 0,
        **values,
        **arguments,
    )


def _refuse_doubles(model: Any, config: GenerationConfig, own: tuple) -> None:
    """Refuses a processor of which an option asks for one too: Transformers drops the option."""
    config = copy.deepcopy(config)
    model._prepare_special_tokens(config, True, device="cpu")
    ids = torch.zeros(1, 1, dtype=torch.long)
    for builtin in model._get_logits_processor(config, 1, ids, device="cpu"):
        if type(builtin) in map(type, own):
            raise ConfigError(
                f"logits_processor holds a {type(builtin).__name__}, and an option asks for one "
                "too: leave one out."
            )


def _tell_cost(own: tuple) -> None:
    names = ", ".join(type(processor).__name__ for processor in own) or "prefix_allowed_tokens_fn"
    warnings.warn(
        f"{names} runs on the host for every token, so every cycle waits for the host and blocks "
        "end for all rows where they end for one: the text is right, but slower.",
        stacklevel=5,
    )
