"""Transformers' own ways in: `model.generate(custom_generate=...)` and `pipeline`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM

from .errors import ConfigError
from .streaming import BatchStreamer


def custom_generate_path() -> str:
    """Returns the directory for `model.generate(custom_generate=..., trust_remote_code=True)`.

    It works with every version of Transformers that is supported; callables only from 4.56 on.
    """
    return str(Path(__file__).parent)


def pipeline(
    task: str = "text-generation", model: Any = None, *, assistant_model: Any = None, **kwargs: Any
) -> Any:
    """Returns Transformers' text-generation pipeline, which generates through this package.

    Args:
        task: Only "text-generation".
        model: Model object, or directory or hub name.
        assistant_model: The draft, likewise; it may have a padded vocabulary.
        **kwargs: As for `transformers.pipeline`.
    """
    if task != "text-generation":
        raise ConfigError(f"gaudi_spec.pipeline serves text-generation, not {task!r}.")
    pipe = transformers.pipeline(task, model, **kwargs)
    if isinstance(assistant_model, str):
        assistant_model = AutoModelForCausalLM.from_pretrained(assistant_model)
        assistant_model = assistant_model.to(pipe.model.device, pipe.model.dtype)
    pipe._forward_params |= {
        "assistant_model": assistant_model,
        "custom_generate": custom_generate_path(),
        "trust_remote_code": True,
    }
    return pipe


class _AfterPrompt:
    """A streamer whose prompt was put already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._seen = streamer, False

    def put(self, value: Any) -> None:
        if self._seen:
            self._streamer.put(value)
        self._seen = True

    def end(self) -> None:
        self._streamer.end()


def asked_of_transformers() -> dict[str, Any] | None:
    """Returns what `model.generate(custom_generate=f)` was asked for, called from f, else None.

    Transformers 5 calls f without the draft and the streamer, and with its own processors and
    criteria merged into the caller's, so that nobody could tell what the call had been. Its frame
    still has the arguments.
    """
    frame = sys._getframe(2)
    asked = frame.f_locals
    if frame.f_globals.get("__name__") != "transformers.generation.utils":
        return None
    if frame.f_code.co_name != "generate" or not callable(asked.get("custom_generate")):
        return None
    names = """assistant_model logits_processor stopping_criteria prefix_allowed_tokens_fn
    negative_prompt_ids negative_prompt_attention_mask""".split()
    streamer = asked.get("streamer")
    if streamer is not None and not isinstance(streamer, BatchStreamer):
        streamer = _AfterPrompt(streamer)
    return {"streamer": streamer, **{name: asked.get(name) for name in names}}
