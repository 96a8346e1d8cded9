"""The `generate`-shaped face: Transformers' argument names in, Transformers' result out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch

from .config import SpecConfig
from .engine import SpeculativeEngine
from .errors import ConfigError, InputError
from .metrics import Report
from .models.support import check_supported
from .options import infer_attention_mask, resolve_options, with_drafts

_KEPT_ENGINES = 4
_engines: OrderedDict[tuple, SpeculativeEngine] = OrderedDict()
_engines_lock = threading.Lock()
_local = threading.local()


def generate(
    model: Any,
    input_ids: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    assistant_model: Any = None,
    num_assistant_tokens: int | None = None,
    generation_config: Any = None,
    spec_config: SpecConfig | None = None,
    **generate_kwargs: Any,
) -> torch.Tensor:
    """Generates with a draft model; the result is the target's own.

    A greedy text is, token for token, that of `model.generate`; a sampled one follows the target's
    distribution exactly, from noise of our own. Takes what `model.generate` takes and returns what
    it would return without a draft. Buffers are kept for the next call with the same models and
    batch; `release` frees them. Models, configs and tensors of the caller are not modified.

    Args:
        model: The target, a Transformers causal LM.
        input_ids: `[B, W]` integer token ids, padded on either side.
        attention_mask: `[B, W]`, 0 at padding. None: inferred from the pad token by Transformers'
            rule.
        assistant_model: The draft, over the same tokenizer; None decodes plainly through the same
            static path, or by prompt lookup. May be `model` itself.
        num_assistant_tokens: K, 1 to 32. None: from `generation_config`, the draft's generation
            config, or `spec_config`.
        generation_config: A `GenerationConfig`; its fields count as in Transformers.
        spec_config: Settings that Transformers has no name for.
        **generate_kwargs: Any other argument of `model.generate`: `max_new_tokens`, `max_length`,
            `min_new_tokens`, `eos_token_id`, `pad_token_id`, `do_sample`, `repetition_penalty`, ...
            `prompt_lookup_num_tokens` (which is K then) drafts by prompt lookup, and beside an
            `assistant_model` by both: look-up first, the model where nothing matches;
            `max_matching_ngram_size` is its longest n-gram. And some that it has not: `seed` (one,
            or one a row) or `generator` (gives one number) fix the noise, else `torch.manual_seed`
            does; `presence_penalty` and `frequency_penalty` mean what they do in vLLM.

    Returns:
        `[B, W + new]` int64 on the device of `input_ids`; finished rows are filled with the pad
        token.

    Raises:
        UnsupportedOptionError: An option is set that would change the output and is not
            supported; the message names it.
        UnsupportedModelError: A model cannot be served; the message says why.
        InputError: A prompt, mask or budget cannot be served.
        NumericalError: The target's logits are NaN or infinite.
    """
    if input_ids is None:
        input_ids = generate_kwargs.pop("inputs", None)
    untested = getattr(spec_config, "allow_untested_models", False)
    check_supported(model, "target", untested)
    if assistant_model is not None:
        check_supported(assistant_model, "draft", untested)
    if num_assistant_tokens is not None:
        generate_kwargs["num_assistant_tokens"] = num_assistant_tokens
    width = input_ids.shape[-1] if isinstance(input_ids, torch.Tensor) and input_ids.dim() else 0
    options = resolve_options(model, assistant_model, width, generation_config, generate_kwargs)
    _check_ids(input_ids)
    config = SpecConfig() if spec_config is None else spec_config
    if not isinstance(config, SpecConfig):
        raise ConfigError(f"spec_config must be a gaudi_spec.SpecConfig, not {config!r}.")
    config = with_drafts(
        config,
        assistant_model is not None,
        options.num_assistant_tokens if num_assistant_tokens is None else num_assistant_tokens,
        options.prompt_lookup_num_tokens,
        options.max_matching_ngram_size,
    )
    if attention_mask is None:
        attention_mask = infer_attention_mask(input_ids, options)
    prompts = _unpad(input_ids, attention_mask)
    engine = _engine(model, assistant_model, config, len(prompts))
    with engine.lock:  # another thread's call must not come between text and report
        rows = engine.generate(
            prompts,
            options.max_new_tokens,
            eos_token_ids=options.eos_token_ids,
            min_new_tokens=options.min_new_tokens,
            sampling=options.sampling,
        )
        _local.report = engine.report
    width = max(len(row) for row in rows)
    new = torch.full((len(rows), width), options.pad_token_id or 0, dtype=torch.long)
    for i, row in enumerate(rows):
        new[i, : len(row)] = row
    return torch.cat([input_ids.long(), new.to(input_ids.device)], 1)


def last_report() -> Report | None:
    """Returns the counted facts of this thread's last `generate`, or None before the first."""
    return getattr(_local, "report", None)


def release() -> None:
    """Frees the engines, and so the caches, that `generate` keeps for its next calls."""
    with _engines_lock:
        _engines.clear()


def _engine(model: Any, draft: Any, config: SpecConfig, batch: int) -> SpeculativeEngine:
    """Returns the kept engine for these models, settings and rows, or builds it."""
    key = (id(model), id(draft), config, config.batch_size or batch)
    with _engines_lock:
        if key not in _engines:
            _engines[key] = SpeculativeEngine(model, draft, config)
            while len(_engines) > _KEPT_ENGINES:
                _engines.popitem(last=False)
        _engines.move_to_end(key)
        return _engines[key]


def _check_ids(input_ids: Any) -> None:
    if input_ids is None:
        raise InputError("No prompt was given: pass input_ids of shape [batch, width].")
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        raise InputError("input_ids must be a tensor of shape [batch, width].")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InputError(f"input_ids must hold integer token ids, not {input_ids.dtype}.")
    if input_ids.numel() == 0:
        raise InputError("The prompt is empty: give at least one token in every row.")


def _unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[torch.Tensor]:
    """Returns each row's tokens where the mask is set: padding never enters a cache."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}; masks of "
            "other shapes are not supported."
        )
    return [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask)]
