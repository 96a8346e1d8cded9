"""The `generate`-shaped face: Transformers' argument names in, Transformers' result out."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from .config import SpecConfig
from .device import Device
from .doors import asked_of_transformers
from .drafters.registry import pick
from .engine import SpeculativeEngine
from .errors import ConfigError, InputError
from .metrics import Report
from .models.support import check_supported
from .options import Options, infer_attention_mask, resolve_options, unsupported
from .outputs import Collected, KeptCaches, result
from .stopping import Steps
from .streaming import BatchStreamer, check_streamer

_KEPT_ENGINES = 4
_engines: OrderedDict[tuple, SpeculativeEngine] = OrderedDict()
_engines_lock = threading.Lock()
_local = threading.local()


def generate(
    model: Any,
    input_ids: torch.Tensor | None = None,
    *,
    assistant_model: Any = None,
    num_assistant_tokens: int | None = None,
    generation_config: Any = None,
    streamer: Any = None,
    stopping_criteria: Any = None,
    tokenizer: Any = None,
    past_key_values: KeptCaches | None = None,
    spec_config: SpecConfig | None = None,
    device: str | Device | None = None,
    each_cycle: Callable[[], None] | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Generates with a draft model; the result is the target's own.

    A greedy text is, token for token, that of `model.generate`; a sampled one follows the target's
    distribution exactly, from noise of our own. Takes what `model.generate` takes and returns what
    it would return without a draft. Buffers are kept for the next call with the same models and
    batch; `release` frees them. Models, configs and tensors of the caller are not modified. Calls
    of several threads run one after another. It may also be called by
    `model.generate(..., custom_generate=gaudi_spec.generate)`.

    Args:
        model: The target, a Transformers causal LM.
        input_ids: `[B, W]` integer token ids, padded on either side.
        assistant_model: The draft, over the same tokenizer; None decodes plainly through the same
            static path, or by prompt lookup. May be `model` itself.
        num_assistant_tokens: K of every cycle, 1 to 32. None, also in `generation_config` and
            `spec_config`: K is chosen for every cycle, see `SpecConfig.schedule`.
        generation_config: A `GenerationConfig`; its fields count as in Transformers.
        streamer: A `BatchStreamer`, or a streamer of Transformers: it gets the prompt, then every
            step's tokens. `end` is called once, and as in Transformers not after an error.
        stopping_criteria: A `StoppingCriteriaList`, called as if tokens came one at a time.
        tokenizer: The model's, for `stop_strings`.
        past_key_values: What the call before returned in its result object: the prefix that its
            rows share with these is not fed again. No weight may have changed in between.
        spec_config: Settings that Transformers has no name for.
        device: A device or its name; None: the target's.
        each_cycle: Called after the first cycle, which includes the prefill, and each one after.
        **generate_kwargs: Any other argument of `model.generate`: `attention_mask` (`[B, W]`, 0 at
            padding; without it pads are inferred by Transformers' rule), `max_new_tokens`,
            `max_length`, `eos_token_id`, `do_sample`, `stop_strings`, `output_scores`, ...
            `num_assistant_tokens_schedule` names another schedule, then `num_assistant_tokens` is
            the largest K. `prompt_lookup_num_tokens` (the largest K) drafts by it, and beside an
            `assistant_model` by both: look-up first, the model where nothing matches;
            `max_matching_ngram_size` is its longest n-gram. And some that it has not: `seed` (one,
            or one a row) or `generator` (gives one number) fix the noise, else `torch.manual_seed`
            does; `presence_penalty` and `frequency_penalty` mean what they do in vLLM.

    Returns:
        `[B, W + new]` int64 on the device of `input_ids`, rows that end early being filled with
        the pad token; with `return_dict_in_generate` a `GenerateDecoderOnlyOutput`.

    Raises:
        UnsupportedOptionError: An option is set that would change the output and is not
            supported; the message names it.
        UnsupportedModelError: A model cannot be served; the message says why.
        InputError: A prompt, mask or budget cannot be served.
        NumericalError: The target's logits are NaN or infinite.
    """
    # Not among the named arguments: Transformers would hand it to a custom_generate twice.
    attention_mask = generate_kwargs.pop("attention_mask", None)
    asked = asked_of_transformers()
    if asked is not None:
        if attention_mask is None:  # Transformers leaves out one that masks nothing
            attention_mask = torch.ones_like(input_ids)
        config = {"generation_config": generation_config, "spec_config": spec_config}
        config["num_assistant_tokens"] = num_assistant_tokens
        return generate(model, input_ids, attention_mask=attention_mask, **config, **asked)
    if input_ids is None:
        input_ids = generate_kwargs.pop("inputs", None)
    if past_key_values is None:  # renamed in Transformers 5
        past_key_values = generate_kwargs.pop("cache", None)
    if past_key_values is not None and not isinstance(past_key_values, KeptCaches):
        raise unsupported("past_key_values", past_key_values, "leave it out")
    batched = streamer if isinstance(streamer, BatchStreamer) else None
    with contextlib.nullcontext() if batched is None else batched.raising():
        options = _options(
            model,
            input_ids,
            assistant_model,
            num_assistant_tokens,
            generation_config,
            generate_kwargs,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
            untested=getattr(spec_config, "allow_untested_models", False),
        )
        config = _config(spec_config, options, assistant_model, num_assistant_tokens)
        if attention_mask is None:
            attention_mask = infer_attention_mask(input_ids, options)
        prompts = _unpad(input_ids, attention_mask)
        if options.num_return_sequences > 1:
            input_ids = input_ids.repeat_interleave(options.num_return_sequences, 0)
            prompts = [prompt for prompt in prompts for _ in range(options.num_return_sequences)]
        check_streamer(streamer, len(prompts))
        kept = _engine(model, assistant_model, config, len(prompts), device, past_key_values)
        with kept.engine.lock:  # another thread's call must not come between text and report
            rows = _collect(
                kept.engine, prompts, input_ids, options, streamer, past_key_values, each_cycle
            )
            _local.report = kept.engine.report
        if options.gaudi.release:
            with _engines_lock:
                _engines.pop(kept.key, None)
    new = rows.tokens(options.pad_token_id or 0)
    sequences = torch.cat([input_ids.long(), new.to(input_ids.device)], 1)
    if not options.return_dict:
        return sequences
    return result(sequences, rows, kept, options.output_scores, options.output_logits)


def _options(
    model, input_ids, assistant_model, k, generation_config, kwargs, untested: bool, **others
) -> Options:
    """Checks models and prompts, and reads the options."""
    check_supported(model, "target", untested)
    if assistant_model is not None:
        check_supported(assistant_model, "draft", untested)
    if k is not None:
        kwargs["num_assistant_tokens"] = k
    width = input_ids.shape[-1] if isinstance(input_ids, torch.Tensor) and input_ids.dim() else 0
    options = resolve_options(model, assistant_model, width, generation_config, kwargs, **others)
    _check_ids(input_ids)
    return options


def _collect(engine, prompts, input_ids, options: Options, streamer, past, each_cycle) -> Collected:
    """Runs the engine, shows its tokens to streamer and criteria, and collects them."""
    batched = streamer if isinstance(streamer, BatchStreamer) else None
    watching = None if batched else streamer
    step = None
    if watching is not None or options.criteria:
        scored = options.return_dict and options.output_scores
        pad = options.pad_token_id or 0
        step = Steps(input_ids, pad, options.criteria, watching, scored)
    if watching is not None:
        watching.put(input_ids.cpu())
    rows = Collected(len(prompts))
    for event in engine.stream(
        prompts,
        options.max_new_tokens,
        eos_token_ids=options.eos_token_ids,
        min_new_tokens=options.min_new_tokens,
        sampling=options.sampling,
        step=step,
        reuse=past is not None,
        each_cycle=each_cycle,
    ):
        rows.add(event)
        if batched is not None:
            batched.add(event)
    if streamer is not None:
        streamer.end()
    return rows


def last_report() -> Report | None:
    """Returns the counted facts of this thread's last `generate`, or None before the first."""
    return getattr(_local, "report", None)


def release() -> None:
    """Frees the engines, and so the caches, that `generate` keeps for its next calls."""
    with _engines_lock:
        _engines.clear()


def _config(
    given: Any, options: Options, draft: Any, num_assistant_tokens: int | None
) -> SpecConfig:
    """Returns the settings of the engine that a call needs."""
    config = SpecConfig() if given is None else given
    if not isinstance(config, SpecConfig):
        raise ConfigError(f"spec_config must be a gaudi_spec.SpecConfig, not {config!r}.")
    config = options.gaudi.into(config)
    if options.return_dict and (options.output_scores or options.output_logits):
        config = config.replace(keep_logits=True)
    config = options.drafting.apply(config, draft is not None)
    if num_assistant_tokens is not None and pick(config.drafter, draft is not None) is None:
        warnings.warn(
            "num_assistant_tokens has no effect here: there is no assistant_model.",
            stacklevel=3,
        )
    return config


def _engine(
    model: Any,
    draft: Any,
    config: SpecConfig,
    batch: int,
    device: str | Device | None,
    past: KeptCaches | None,
) -> KeptCaches:
    """Returns the kept engine for these models, settings and rows, or builds it."""
    key = (id(model), id(draft), config, config.batch_size or batch, device)
    if past is not None and past.key[:2] != key[:2]:
        raise ConfigError(
            "past_key_values comes from a call with other models: pass those, or leave it out."
        )
    with _engines_lock:
        if past is not None and past.key == key:
            _engines[key] = past.engine
        if key not in _engines:
            _engines[key] = SpeculativeEngine(model, draft, config, device)
        _engines.move_to_end(key)
        while len(_engines) > _KEPT_ENGINES:
            _engines.popitem(last=False)
        return KeptCaches(key, _engines[key])


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
