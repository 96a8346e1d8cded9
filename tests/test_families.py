"""Every tested family, every kind of draft, every K: the output is the target's own."""

from __future__ import annotations

import functools

import pytest
import torch
import toys
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from gaudi_spec import SpecConfig, SpeculativeEngine, UnsupportedModelError
from gaudi_spec.models.support import TESTED_FAMILIES

SIZES = (1, 2, 3, 5, 8, 16)
# Fewer tokens where most cycles emit one and so cost K + 1 forwards.
NEW = {
    "self": dict.fromkeys(SIZES, 24) | {5: toys.NEW, 16: toys.NEW},
    "noisy": dict.fromkeys(SIZES, 24) | {2: toys.NEW, 8: 16, 16: 16},
    "unrelated": dict.fromkeys(SIZES, 24) | {5: 12, 8: 12, 16: 8},
}


def decode(target, draft, k, new, prompts=toys.PROMPTS, **config):
    """Returns the engine's new tokens for `prompts`."""
    engine = SpeculativeEngine(target, draft, SpecConfig(num_assistant_tokens=k, **config))
    return engine.generate(prompts, new)


@functools.cache
def eager(family):
    """Returns an eager-attention target and its own greedy text."""
    if family == "gemma2":  # that toy is eager as it is
        return toys.target(family), toys.references(family)
    model = toys.build(family, seed=2, attn_implementation="eager")
    return model, [toys.greedy(model, prompt, toys.NEW) for prompt in toys.PROMPTS]


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_references_are_varied_and_free_of_near_ties(family):
    """Otherwise the equalities below would mean nothing."""
    for prompt, text in zip(toys.PROMPTS, toys.references(family)):
        toys.assert_sound(text)
        assert toys.gaps(toys.target(family), prompt, text).min() > 1e-3


def test_every_tested_family_has_a_toy():
    """The list of families that are served without a self-check is the list tested here."""
    assert {kind for kind, _ in toys.FAMILIES.values()} == TESTED_FAMILIES


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated"])
@pytest.mark.parametrize("family", toys.FAMILIES)
def test_ragged_batch_equals_greedy(family, draft, k):
    """Five prompts of 1 to 30 tokens, beyond every sliding window of 8."""
    new = NEW[draft][k]
    got = decode(toys.target(family), toys.drafts(family)[draft], k, new)
    toys.assert_equal_rows(got, [text[:new] for text in toys.references(family)])


@pytest.mark.parametrize("rows", [[4], [0], [3, 0, 2]], ids=["long", "one-token", "three"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "falcon", "gemma3", "mistral-window"])
def test_other_batches_equal_greedy(family, rows):
    """Batch 1 and batch 3, the whole reference, a partly right draft."""
    draft = toys.drafts(family)["noisy"]
    got = decode(toys.target(family), draft, 3, toys.NEW, [toys.PROMPTS[r] for r in rows])
    toys.assert_equal_rows(got, [toys.references(family)[r] for r in rows])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral-window"])
def test_plain_decoding_through_the_static_path_equals_greedy(family):
    """No draft at all."""
    toys.assert_equal_rows(decode(toys.target(family), None, 5, toys.NEW), toys.references(family))


@pytest.mark.parametrize("draft", ["noisy", "other-family"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window"])
def test_eager_attention_equals_greedy(family, draft):
    """Also with a draft of another family."""
    model, want = eager(family)
    drafts = {"noisy": toys.noisy(model), "other-family": toys.target("gpt2")}
    assert model.config._attn_implementation == "eager"
    for text in want:
        toys.assert_sound(text)
    toys.assert_equal_rows(decode(model, drafts[draft], 3, toys.NEW), want)


def test_draft_accepted_share_orders_the_drafts():
    """The three kinds of draft really exercise full, partial and almost no acceptance."""
    rates = []
    for draft in toys.drafts().values():
        engine = SpeculativeEngine(toys.target(), draft, SpecConfig(num_assistant_tokens=5))
        engine.generate(toys.PROMPTS, 24)
        rates.append(engine.report.acceptance_rate)
    assert rates[0] == 1.0 and 0.1 < rates[1] < 0.9 and rates[2] < 0.1, rates


# Refusals ------------------------------------------------------------------------------------

_BASE = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, pad_token_id=0, eos_token_id=None)
_HEADS = dict(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
# model type -> config values, and words of the message
REFUSED = {
    "mamba": (dict(state_size=8), "recurrent or convolutional state"),
    "mamba2": (dict(head_dim=8, num_heads=8, state_size=8, n_groups=2), "recurrent"),
    "falcon_mamba": (dict(state_size=8), "recurrent"),
    "rwkv": (dict(attention_hidden_size=32), "recurrent"),
    "jamba": (
        dict(_HEADS, num_experts=2, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
        "recurrent",
    ),
    "lfm2": (dict(_HEADS, layer_types=["conv", "full_attention"]), "conv"),
    "falcon": (dict(num_attention_heads=4, alibi=True), "ALiBi"),
    "t5": (dict(d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4), "encoder-decoder"),
    "bert": (dict(num_attention_heads=4, intermediate_size=64), "causal language model"),
    "gpt2": (dict(n_embd=32, n_layer=1, n_head=4, attn_implementation="eager"), "eager"),
}
UNTESTED = {
    "bloom": dict(n_head=4),
    "recurrent_gemma": dict(_HEADS, lru_width=32, block_types=["recurrent", "attention"]),
    "codegen": dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=256),
    "xglm": dict(d_model=32, ffn_dim=64, num_layers=2, attention_heads=4),
}


def random_model(kind, values):
    """Returns a tiny random model of any type, or skips where this version lacks it."""
    values = dict(values)
    attention = values.pop("attn_implementation", None)
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {kind}")
    config = AutoConfig.for_model(kind, **dict(_BASE, **values))
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}
    torch.manual_seed(0)
    return (
        auto.get(kind, AutoModelForCausalLM)
        .from_config(config, attn_implementation=attention)
        .eval()
    )


def fail_when_called(model, monkeypatch):
    """Makes every forward of `model` and its modules an error."""

    def fail(*_, **__):
        raise AssertionError("the model was run")

    for module in model.modules():
        monkeypatch.setattr(module, "forward", fail)


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("kind", REFUSED)
def test_unservable_model_is_refused_by_name_before_any_compute(kind, role, allow, monkeypatch):
    """Whatever its role, and also when untested families are allowed."""
    values, words = REFUSED[kind]
    model = random_model(kind, values)
    fail_when_called(model, monkeypatch)
    pair = (model, None) if role == "target" else (toys.target(), model)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        SpeculativeEngine(*pair, SpecConfig(allow_untested_models=allow))
    assert type(model).__name__ in str(caught.value) and role in str(caught.value)


@pytest.mark.parametrize("kind", UNTESTED)
def test_untested_family_is_refused_by_name_before_any_compute(kind, monkeypatch):
    """Recurrent, ALiBi or merely unknown to us."""
    model = random_model(kind, UNTESTED[kind])
    fail_when_called(model, monkeypatch)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} \({kind}\)"):
        SpeculativeEngine(model)


def test_base_model_without_a_head_is_refused():
    """A model that cannot produce logits."""
    with pytest.raises(UnsupportedModelError, match="causal"):
        SpeculativeEngine(toys.target().model)


def test_something_else_than_a_model_is_refused():
    """A plain torch module."""
    with pytest.raises(UnsupportedModelError, match="Linear"):
        SpeculativeEngine(torch.nn.Linear(2, 2))


def untested_toy():
    """Returns a varied model of a family outside the tested list."""
    model = random_model("glm", dict(_HEADS, head_dim=8, max_position_embeddings=256))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else 0.4)
    return model


def test_good_untested_model_passes_its_self_check_and_equals_greedy():
    """Allowed by the setting only."""
    model = untested_toy()
    with pytest.raises(UnsupportedModelError, match="glm"):
        SpeculativeEngine(model)
    got = decode(model, toys.noisy(model), 3, 24, allow_untested_models=True)
    want = [toys.greedy(model, prompt, 24) for prompt in toys.PROMPTS]
    toys.assert_sound(torch.cat(want), 20)
    toys.assert_equal_rows(got, want)


def test_untested_model_that_ignores_positions_fails_its_self_check(monkeypatch):
    """It would be wrong in silence."""
    model = untested_toy()
    body = model.model.forward

    @functools.wraps(body)
    def ignoring(*args, position_ids=None, input_ids=None, **kwargs):
        counted = torch.arange(input_ids.shape[1])[None]
        return body(*args, input_ids=input_ids, position_ids=counted, **kwargs)

    monkeypatch.setattr(model.model, "forward", ignoring)
    with pytest.raises(UnsupportedModelError, match="positions"):
        SpeculativeEngine(model, None, SpecConfig(allow_untested_models=True))


def test_untested_model_that_ignores_the_mask_fails_its_self_check(monkeypatch):
    """A stale slot must not be seen."""
    model = untested_toy()
    body = model.model.forward

    @functools.wraps(body)
    def ignoring(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = torch.zeros_like(attention_mask)
        return body(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(model.model, "forward", ignoring)
    with pytest.raises(UnsupportedModelError, match="mask"):
        SpeculativeEngine(model, None, SpecConfig(allow_untested_models=True))


def test_untested_model_with_a_mask_of_its_own_fails_its_self_check():
    """GPT-Neo's local layers cut by slot, not by position."""
    values = dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])
    model = random_model("gpt_neo", dict(values, window_size=40, max_position_embeddings=256))
    with pytest.raises(UnsupportedModelError, match="GPTNeo"):
        SpeculativeEngine(model, None, SpecConfig(allow_untested_models=True))


def test_untested_model_that_cannot_be_called_fails_its_self_check_by_name():
    """BLOOM takes no ready mask."""
    model = random_model("bloom", UNTESTED["bloom"])
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        SpeculativeEngine(model, None, SpecConfig(allow_untested_models=True))
