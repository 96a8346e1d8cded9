"""Which of the classes that Optimum Habana puts in place of Transformers' can be served."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError

# Families whose cached, rolled-back forward is tested against their own greedy decoding.
GAUDI_FAMILIES = frozenset(
    """llama qwen2 qwen3 gemma gemma2 gpt2 opt falcon gpt_neox gptj bloom mistral mixtral phi
    starcoder2""".split()
)


def is_gaudi(model: Any) -> bool:
    """Returns whether the class of `model` is Optimum Habana's own."""
    return type(model).__module__.startswith("optimum.habana.")


def check_gaudi(model: Any, who: str) -> None:
    """Refuses, by name, a model of Optimum Habana whose cache cannot be ours.

    Args:
        model: A causal language model for which `is_gaudi` holds.
        who: The model, for the message.

    Raises:
        UnsupportedModelError: Its family is not tested, it was compiled, or its cache is
            quantized.
    """
    config = model.config
    if config.model_type not in GAUDI_FAMILIES:
        raise UnsupportedModelError(
            f"{who} is of a family whose Optimum Habana classes are not served yet "
            f"({', '.join(sorted(GAUDI_FAMILIES))} are); load it without "
            "adapt_transformers_to_gaudi()."
        )
    kinds = {type(module).__name__ for module in model.modules()}
    if "OptimizedModule" in kinds:
        raise UnsupportedModelError(
            f"{who} was given to torch.compile already, which hides the cache from us: pass it as "
            "it was before; what needs to be compiled is compiled here."
        )
    caches = {type(m.k_cache).__name__ for m in model.modules() if hasattr(m, "k_cache")}
    if caches - {"KVCache"}:
        raise UnsupportedModelError(
            f"{who} keeps its cache in {', '.join(sorted(caches))}, which a quantizer has put in "
            "place; quantized caches are not supported yet."
        )
