"""Optimum Habana's own `model.generate(assistant_model=...)`, served by this package.

`docs/optimum_habana.md` says what becomes of each of its arguments and options.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin

from . import hf
from .config import SpecConfig
from .device import emulating
from .errors import ConfigError, UnsupportedOptionError

_THEIRS = "optimum.habana.transformers.generation.utils"
_ORIGINAL = "_gaudi_spec_original"
_LOOKUP = "prompt_lookup_num_tokens"
_MISSING = "optimum-habana is not installed: pip install optimum-habana==1.21.2."


def adapt_transformers() -> None:
    """Puts Optimum Habana's classes in place of Transformers', in this process and for good.

    Raises:
        ConfigError: Optimum Habana is not installed, or cannot be imported without a card.
    """
    if GenerationMixin.generate.__module__ == _THEIRS:
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints which kernels it does without
            from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

            adapt_transformers_to_gaudi()
    except (ImportError, IndexError) as error:
        if not _installed():
            raise ConfigError(_MISSING) from None
        raise ConfigError(
            f"Optimum Habana cannot be imported here ({type(error).__name__}: {error}); it needs a "
            "card, or the device hpu-emulated."
        ) from error


def patch_optimum_habana() -> None:
    """Makes `model.generate` of Optimum Habana use this package where it is given an assistant.

    So do calls with `prompt_lookup_num_tokens`; all others go to Optimum Habana's code as before.
    Call it after `adapt_transformers_to_gaudi()`; a second call changes nothing.
    `unpatch_optimum_habana` undoes it.

    Raises:
        ConfigError: Optimum Habana is not installed, or has not adapted Transformers yet.
    """
    if is_patched():
        return
    theirs = GenerationMixin.generate
    if theirs.__module__ != _THEIRS:
        raise ConfigError(
            "Transformers is not adapted to Gaudi: call "
            "optimum.habana.transformers.modeling_utils.adapt_transformers_to_gaudi() first."
            if _installed()
            else _MISSING
        )
    GenerationMixin.generate = _with_assistant(theirs)  # type: ignore[method-assign]


def unpatch_optimum_habana() -> None:
    """Undoes `patch_optimum_habana`; nothing where it was not called."""
    if is_patched():
        theirs = getattr(GenerationMixin.generate, _ORIGINAL)
        GenerationMixin.generate = theirs  # type: ignore[method-assign]


def is_patched() -> bool:
    """Returns whether `patch_optimum_habana` is in effect."""
    return hasattr(GenerationMixin.generate, _ORIGINAL)


def _installed() -> bool:
    found = importlib.util.find_spec("optimum")
    return found is not None and importlib.util.find_spec("optimum.habana") is not None


def _with_assistant(theirs: Callable) -> Callable:
    """Returns `theirs` with another way for calls that draft."""
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def generate(self, *args, **kwargs):
        asked = signature.bind(self, *args, **kwargs).arguments
        if asked.get("custom_generate") is not None or not _drafts(asked):
            return theirs(self, *args, **kwargs)
        model, options = asked.pop("self"), asked.pop("kwargs", {})
        return _generate(model, **asked, **options)

    setattr(generate, _ORIGINAL, theirs)
    return generate


def _drafts(asked: Mapping[str, Any]) -> bool:
    """Returns whether a call has an assistant, or asks for prompt lookup."""
    configs = (asked.get("generation_config"), asked["self"].generation_config)
    lookups = [getattr(config, _LOOKUP, None) for config in configs]
    lookups.append(asked.get("kwargs", {}).get(_LOOKUP))
    return asked.get("assistant_model") is not None or any(lookups)


def _generate(
    model: Any,
    *,
    inputs: Any = None,
    lazy_mode: bool = False,
    hpu_graphs: bool = False,
    iteration_times: list[float] | None = None,
    profiler: Any = None,
    **options: Any,
) -> Any:
    """Takes the arguments of their `generate`, and returns what it would return."""
    if hpu_graphs and not lazy_mode:
        raise ConfigError("hpu_graphs=True needs lazy_mode=True, as in Optimum Habana.")
    for name in ("synced_gpus", "use_model_defaults"):
        if options.pop(name, None):
            raise UnsupportedOptionError(f"{name} is not supported with an assistant model.")
    if inputs is not None:
        options["input_ids"] = inputs
    if model.config.model_type == "falcon":  # its tokenizer makes them, its model takes none
        options.pop("token_type_ids", None)
    # Without graphs, lazy mode runs what it collects; eager mode has no graphs but the compiler's.
    how = "graph" if hpu_graphs else "eager" if lazy_mode else "auto"
    device = "hpu-emulated" if emulating() and model.device.type == "cpu" else None
    if profiler is not None:
        profiler.start()
    config = SpecConfig(compile=how)
    meter = _meter([] if iteration_times is None else iteration_times, profiler)
    out = hf.generate(model, spec_config=config, device=device, each_cycle=meter, **options)
    if profiler is not None:
        profiler.stop()
    return out


def _meter(iteration_times: list[float], profiler: Any) -> Callable[[], None]:
    """Returns what notes the seconds of each cycle, and tells the profiler of it.

    The first entry includes the prefill, as in Optimum Habana.
    """
    begin = time.perf_counter()

    def step() -> None:
        nonlocal begin
        now = time.perf_counter()
        iteration_times.append(now - begin)
        begin = now
        if profiler is not None:
            profiler.step()

    return step
