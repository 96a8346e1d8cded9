"""Tiny random models of Optimum Habana's classes, and their own greedy text."""

from __future__ import annotations

import functools

import torch
import toys

_FALCON_NEW = dict(hidden_size=64, num_attention_heads=16, num_kv_heads=8)
# name -> (name in toys.FAMILIES, changes, arguments that their `generate` needs to be right)
FAMILIES: dict[str, tuple[str, dict, dict]] = {
    **{
        name: (name, {}, {})
        for name in """llama llama-mha qwen2 qwen3 gemma gemma2 gpt2 falcon gpt-neox gptj bloom
        mistral mixtral phi""".split()
    },
    # Their keys are repeated for all heads, except where there are eight.
    "falcon-new": ("falcon-new", _FALCON_NEW, {}),
    # Cached, theirs gives generated tokens positions that are one too high, and counts padding.
    "opt": ("opt", {}, {"use_cache": False}),
    # Without it their attention fails: KeyError: 'input_shape'.
    "starcoder2": ("starcoder2", {}, {"use_flash_attention": True}),
}
toys.FAMILIES["bloom"] = ("bloom", dict(hidden_size=32, n_layer=2, n_head=4))
PROMPTS = toys.prompts(5, 17, 9)
NEW = 20


def build(family: str, seed: int = 0, **changes):
    """Returns a random model of Optimum Habana's class for `family`."""
    name, values, _ = FAMILIES[family]
    return toys.build(name, seed, **{"attn_implementation": "eager", **values, **changes})


def plain(model, prompts=PROMPTS, new: int = NEW, **options) -> list[torch.Tensor]:
    """Returns the text of their own code without a draft, for left-padded prompts."""
    ids, mask = toys.left_pad(prompts)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0) | options
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
    return list(out[:, ids.shape[1] :])


@functools.cache
def target(family: str):
    """Returns the first random model whose texts are varied."""
    for seed in range(40):
        model = build(family, seed)
        if all(len(set(text.tolist())) >= 8 for text in plain(model, **FAMILIES[family][2])):
            return model
    raise AssertionError(f"no sound toy found for {family}")


@functools.cache
def reference(family: str, rows: int) -> list[torch.Tensor]:
    """Returns their text for the first `rows` prompts."""
    return plain(target(family), PROMPTS[:rows], **FAMILIES[family][2])


@functools.cache
def drafts(family: str):
    """Returns the three drafts of a family."""
    model = target(family)
    return {"self": model, "noisy": toys.noisy(model), "unrelated": build(family, seed=77)}
