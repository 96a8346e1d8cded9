"""Which Hugging Face decoders can be served, decided from the config, before any compute."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError
from .gaudi import check_gaudi, is_gaudi

# Decoder families whose cached, rolled-back forward is tested against `generate`.
TESTED_FAMILIES = frozenset(
    """llama qwen2 qwen3 qwen2_moe qwen3_moe mistral mixtral gemma gemma2 gemma3_text phi phi3
    gpt2 gpt_neox gptj opt falcon starcoder2 gpt_bigcode stablelm cohere granite olmo olmo2
    smollm3 compact_llama""".split()
)
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")
ATTENTION = frozenset({"sdpa", "eager"})
# Their eager attention adds a causal mask of its own that assumes a cache without spare slots.
SDPA_ONLY = frozenset({"gpt2", "gpt_bigcode"})
# RoPE whose frequencies depend on the longest sequence of the batch beyond this many positions.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_supported(model: Any, role: str, allow_untested: bool = False) -> None:
    """Refuses, by name, a model that cannot be kept in slots and rolled back by position.

    Args:
        model: A Transformers model object.
        role: "target" or "draft", for the message.
        allow_untested: Accept families outside `TESTED_FAMILIES`.

    Raises:
        UnsupportedModelError: The model is not a causal LM, keeps recurrent or convolutional
            state, has an unknown layer type or ALiBi positions, uses an attention implementation
            that takes no ready mask, or is of an untested family.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise UnsupportedModelError(
            f"The {role} must be a Transformers causal language model, not {type(model).__name__}."
        )
    who = f"The {role} {type(model).__name__} ({config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{who} is an encoder-decoder; only decoder-only causal language models are served."
        )
    if model.get_output_embeddings() is None or not type(model).__name__.endswith(CAUSAL_CLASSES):
        raise UnsupportedModelError(
            f"{who} is not a causal language model; load it with AutoModelForCausalLM."
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{who} keeps a recurrent or convolutional state, which cannot be rolled back when "
            "drafted tokens are rejected; choose a model with attention layers only."
        )
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    unknown = set(kinds or ()) - LAYER_TYPES
    if unknown:
        raise UnsupportedModelError(
            f"{who} has layers of type {', '.join(sorted(unknown))}, whose state cannot be rolled "
            "back by position; choose a model with attention layers only."
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{who} uses ALiBi positions, which are not supported yet.")
    if is_gaudi(model):
        return check_gaudi(model, who)
    _check_attention(config, who)
    if not is_tested(model) and not allow_untested:
        raise UnsupportedModelError(
            f"{who} is of a family that is not tested yet; to try it behind a self-check, set "
            "SpecConfig(allow_untested_models=True) or --allow_untested_models."
        )


def is_tested(model: Any) -> bool:
    """Returns whether a model that `check_supported` accepts needs no self-check."""
    return is_gaudi(model) or model.config.model_type in TESTED_FAMILIES


def _check_attention(config: Any, who: str) -> None:
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if attention not in ATTENTION or (attention == "eager" and config.model_type in SDPA_ONLY):
        raise UnsupportedModelError(
            f"{who} was loaded with attn_implementation={attention!r}, which does not take a ready "
            "mask over a preallocated cache; load it with attn_implementation='sdpa'."
        )


def vocabulary(model: Any) -> tuple[int, int]:
    """Returns how many ids `model` reads, and the width V of its logits."""
    if model.config.model_type == "compact_llama":  # its tables are smaller
        return model.config.vocab_size, model.config.vocab_size
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None) or head.weight.shape[0]  # quantized: no weight
    return model.get_input_embeddings().weight.shape[0], width


def max_positions(config: Any) -> int | None:
    """Returns the positions a model was built for, or None if its config names no limit.

    RoPE types whose frequencies change with the longest sequence in the batch count only up to
    the length where they change, because rows of one batch must not influence each other.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    if (rope.get("rope_type") or rope.get("type")) in LENGTH_DEPENDENT_ROPE:
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = min(x for x in (original, limit) if x is not None)
    return limit


def layer_windows(config: Any) -> dict[str, int | None]:
    """Returns the attention window of each layer type, None meaning full attention.

    A model with one kind of layer has one entry; its name does not matter then.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    types = getattr(config, "layer_types", None)
    if not types:
        return {"sliding_attention": window} if window else {"full_attention": None}
    return {kind: window if kind == "sliding_attention" else None for kind in set(types)}
