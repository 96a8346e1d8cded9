"""Transformers' generation options, read as `model.generate` reads them.

What cannot be honoured is refused by name: nothing is dropped in silence.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from .decoding import ARGUMENTS, PROCESSORS, WARPERS, check_kinds, to_sampling
from .drafting import Drafting
from .errors import ConfigError, InputError, UnsupportedOptionError
from .gaudi_options import GAUDI_FIELDS, NO_GAUDI_OPTIONS, GaudiOptions, gaudi_options
from .request import token_ids
from .sampling.options import Sampling
from .stopping import Criterion, gather_criteria

_HONOURED = frozenset(
    """max_new_tokens max_length min_new_tokens min_length eos_token_id pad_token_id use_cache
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size stop_strings max_time
    num_return_sequences return_dict_in_generate output_scores output_logits do_sample""".split()
    + WARPERS
    + PROCESSORS
)
# Without effect on a decoder-only model without beams, in Transformers too: options of beams, of
# other modes, of compilation, and identifiers.
_INERT = frozenset(
    """length_penalty early_stopping low_memory bos_token_id decoder_start_token_id
    transformers_version compile_config disable_compile assistant_lookbehind
    target_lookbehind return_legacy_cache prefill_chunk_size max_cache_len
    assistant_ensemble_weight""".split()
)
# Values, besides None, False and the default, that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "cache_implementation": ("static", "dynamic", "hybrid"),  # our caches are static already
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "diversity_penalty": (0, 0.0),
}


@dataclass(frozen=True)
class Options:
    """What one call of `generate` asks for.

    Attributes:
        max_new_tokens: Budget of new tokens.
        min_new_tokens: New tokens before which no end token may come.
        eos_token_ids: Any of them ends a row.
        pad_token_id: Fills finished rows; None if nothing can need it.
        drafting: What is said about drafts.
        sampling: How tokens are chosen.
        criteria: What else ends a row, called in this order.
        num_return_sequences: Texts for each prompt.
        return_dict: Return more than the tokens.
        output_scores: The processed logits too.
        output_logits: The unprocessed ones too.
        gaudi: What is asked for by Optimum Habana's fields.
    """

    max_new_tokens: int
    min_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    drafting: Drafting
    sampling: Sampling
    criteria: tuple[Criterion, ...] = ()
    num_return_sequences: int = 1
    return_dict: bool = False
    output_scores: bool = False
    output_logits: bool = False
    gaudi: GaudiOptions = NO_GAUDI_OPTIONS


def resolve_options(
    model: Any,
    assistant_model: Any,
    width: int,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    *,
    stopping_criteria: Any = None,
    tokenizer: Any = None,
) -> Options:
    """Merges a call's arguments with the model's defaults, as `model.generate` does.

    Args:
        model: The target; its `generation_config` supplies what the call leaves open.
        assistant_model: The draft or None; its generation config may say something about K.
        width: Width of `input_ids`, padding included, which `max_length` counts.
        generation_config: The caller's config or None; it is not changed.
        kwargs: The caller's other keyword arguments.
        stopping_criteria: The caller's own criteria.
        tokenizer: Needed for stop strings.

    Raises:
        UnsupportedOptionError: An option that would change the output is set.
        InputError: The budget is not positive.
    """
    if not isinstance(generation_config, (GenerationConfig, type(None))):
        raise ConfigError(f"generation_config must be a GenerationConfig: {generation_config!r}.")
    _check_budget(kwargs.get("max_new_tokens"))
    check_kinds(kwargs)
    given, kwargs = kwargs, dict(kwargs)
    kwargs.pop("num_assistant_tokens_schedule", None)  # Transformers has not all of ours
    ours = {name: kwargs.pop(name, None) for name in ARGUMENTS}
    try:
        config, rest = _detached(model)._prepare_generation_config(
            copy.deepcopy(generation_config), **kwargs
        )
    except (TypeError, ValueError) as error:  # Transformers' own checks, which name the option
        raise UnsupportedOptionError(" ".join(str(error).split())) from error
    for name, value in rest.items():
        empty = value is None or value is False or (isinstance(value, (list, dict)) and not value)
        if not empty:
            raise unsupported(name, value, "leave it out")
    _refuse_unsupported(config)
    gaudi = gaudi_options(model, config)
    draft_config = getattr(assistant_model, "generation_config", None)
    if config.use_cache is False or getattr(draft_config, "use_cache", None) is False:
        warnings.warn("use_cache=False is ignored: decoding is always cached.", stacklevel=3)
    eos = token_ids(config.eos_token_id)
    pad = token_ids(config.pad_token_id) or eos
    criteria = gather_criteria(config.stop_strings, config.max_time, tokenizer, stopping_criteria)
    budget = _budget(model, width, config, generation_config, kwargs)
    if gaudi.ignore_eos:
        eos = ()
    for criterion in criteria:  # the caller's take the place of Transformers' own
        if isinstance(criterion, MaxLengthCriteria):
            budget = max(1, criterion.max_length - width)
        if isinstance(criterion, EosTokenCriteria):
            eos = token_ids(criterion.eos_token_id)
    least = config.min_new_tokens
    if least is None:
        least = max((config.min_length or 0) - width, 0)
    several = 1 if config.num_return_sequences is None else config.num_return_sequences
    if several < 1:
        raise InputError(f"num_return_sequences must be at least 1, not {several}.")
    if several > 1 and not config.do_sample:
        raise unsupported("num_return_sequences", several, "greedy decoding has one text")
    return Options(
        max_new_tokens=budget,
        min_new_tokens=min(least, budget),
        eos_token_ids=eos,
        pad_token_id=pad[0] if pad else None,
        drafting=Drafting.read(config, given, assistant_model),
        sampling=to_sampling(model, config, ours),
        criteria=criteria,
        num_return_sequences=several,
        return_dict=bool(config.return_dict_in_generate),
        output_scores=bool(config.output_scores),
        output_logits=bool(config.output_logits),
        gaudi=gaudi,
    )


def _detached(model: Any) -> Any:
    """Returns `model` with a generation config of its own, which Optimum Habana writes to."""
    detached = copy.copy(model)
    detached.generation_config = copy.deepcopy(model.generation_config)
    return detached


def infer_attention_mask(input_ids: torch.Tensor, options: Options) -> torch.Tensor:
    """Returns the mask that Transformers infers when none is given: pads, unless pad ends text."""
    pad = options.pad_token_id
    if pad is None or pad in options.eos_token_ids:
        return torch.ones_like(input_ids)
    return (input_ids != pad).long()


def _refuse_unsupported(config: GenerationConfig) -> None:
    defaults = vars(GenerationConfig())
    if hasattr(config, "_get_default_generation_params"):  # Transformers 5 keeps them apart
        defaults = defaults | config._get_default_generation_params()
    for name, value in vars(config).items():
        if name.startswith("_") or name in _HONOURED or name in _INERT or name in GAUDI_FIELDS:
            continue
        if value is None or value is False or value in _NEUTRAL.get(name, ()):
            continue
        if name not in defaults or value != defaults[name]:
            raise unsupported(
                name,
                value,
                "leave it out (if the call does not set it, the checkpoint's "
                "generation_config.json does: remove it there)",
            )


def unsupported(name: str, value: Any, remedy: str) -> UnsupportedOptionError:
    """Returns the refusal of an option by its name."""
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 60 else f"{type(value).__name__}(...)"
    return UnsupportedOptionError(
        f"{name}={shown} is not supported by gaudi_spec.generate; {remedy}, or call "
        "model.generate for this request."
    )


def _budget(model, width, config, given, kwargs) -> int:
    """Returns new tokens by Transformers' rules for `max_new_tokens` and `max_length`."""
    if config.max_new_tokens is not None:
        budget = config.max_new_tokens
    else:
        unset = GenerationConfig().max_length
        default = (
            kwargs.get("max_length") is None
            and (given is None or given.max_length == unset)
            and model.generation_config.max_length == unset
        )
        most = config.max_length if config.max_length is not None else 20
        if default:
            positions = getattr(model.config, "max_position_embeddings", None)
            most = min(most + width, positions or most + width)
        budget = most - width
        if budget < 1:
            raise InputError(
                f"The input is {width} tokens wide, which leaves nothing of max_length={most}: "
                "raise max_length or set max_new_tokens."
            )
    _check_budget(budget)
    return budget


def _check_budget(budget: Any) -> None:
    if isinstance(budget, (bool, str)) or (isinstance(budget, (int, float)) and budget < 1):
        raise InputError(f"max_new_tokens must be a whole number of at least 1, not {budget!r}.")
