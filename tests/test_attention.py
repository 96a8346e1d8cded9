"""Attention that reads the cache once equals Transformers' own."""

from __future__ import annotations

import types

import pytest
import torch
import toys
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gaudi_spec.models.attention import NAME, grouped_attention
from gaudi_spec.models.hf import HFCausalLM

BATCH, SLOTS, DIM = 3, 20, 8


def inputs(heads: int, kv_heads: int, width: int):
    """Returns query, a window of a slot cache, and a mask with hidden slots."""
    torch.manual_seed(0)
    query = torch.randn(BATCH, heads, width, DIM)
    buffers = torch.randn(2, BATCH, SLOTS + 6, kv_heads, DIM)
    key, value = (buffer[:, :SLOTS].transpose(1, 2) for buffer in buffers)
    hidden = torch.rand(BATCH, 1, width, SLOTS) < 0.4
    return query, key, value, torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))


def reference(query, key, value, mask, **options):
    module = types.SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_it_equals_sdpa(heads, kv_heads, width, scaling):
    given = inputs(heads, kv_heads, width)
    got, weights = grouped_attention(None, *given, scaling=scaling)
    want = reference(*given, scaling=scaling)
    assert weights is None and got.shape == (BATCH, width, heads, DIM) and got.is_contiguous()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    if kv_heads < heads and kv_heads > 1:  # control: heads of another group
        wrong = reference(given[0].roll(1, 1), *given[1:], scaling=scaling)
        assert (got - wrong).abs().max() > 0.1


def test_the_callers_model_keeps_its_own_attention():
    model = toys.build("llama")
    adapter = HFCausalLM(model, 1, 16)
    assert adapter.model.config._attn_implementation == NAME
    assert adapter.model.model.layers[0].self_attn.config is adapter.model.config
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config is model.config


def test_models_with_attention_of_their_own_keep_it():
    for family in ("gemma2", "gptj"):  # eager: soft caps, and no attention interface
        adapter = HFCausalLM(toys.build(family), 1, 16)
        assert adapter.model.config._attn_implementation == "eager"
