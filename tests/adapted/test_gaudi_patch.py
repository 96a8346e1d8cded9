"""`model.generate(assistant_model=...)` of Optimum Habana, unpatched and patched."""

from __future__ import annotations

import copy
import inspect
import warnings

import gaudi_toys
import pytest
import torch
import toys
from optimum.habana.transformers.generation import GaudiGenerationConfig, GaudiGenerationMixin
from optimum.habana.utils import HabanaProfile
from transformers import AutoModelForCausalLM, GenerationMixin

import gaudi_spec
from gaudi_spec import gaudi_options
from gaudi_spec.config import FORWARD_OPTIONS
from gaudi_spec.device.emulated import EmulatedHpuDevice

NEW = 16
# Of the options below: a pair of models, and options of the call.
WORKS: dict[str, dict] = {
    "static": {"static_shapes": True},
    "dynamic": {"static_shapes": False},
    "reuse_cache": {"reuse_cache": True},
    "bucket": {"bucket_size": 16},
    "bucket_internal": {"bucket_size": 16, "bucket_internal": True},
    "reuse_cache and buckets": {"reuse_cache": True, "bucket_size": 16, "bucket_internal": True},
    "reduce_recompile": {"bucket_size": 16, "reduce_recompile": True},
    "trim_logits": {"trim_logits": True},
    "attn_softmax_bf16": {"attn_softmax_bf16": True},
    "flash": {"use_flash_attention": True},
    "flash recompute": {"use_flash_attention": True, "flash_attention_recompute": True},
    "flash fast": {"use_flash_attention": True, "flash_attention_fast_softmax": True},
    "clear": {"clear_hpu_graphs_cache": True},
    "eager mode": {"lazy_mode": False},
    "cache off": {"use_cache": False},
    "all together": {
        "static_shapes": True,
        "reuse_cache": True,
        "bucket_size": 16,
        "bucket_internal": True,
        "reduce_recompile": True,
        "trim_logits": True,
        "attn_softmax_bf16": True,
        "use_flash_attention": True,
        "flash_attention_recompute": True,
        "clear_hpu_graphs_cache": True,
        "hpu_graphs": True,
    },
}
WARNS = {
    "limit_hpu_graphs": {"limit_hpu_graphs": True},
    "flash_attention_causal_mask": {
        "use_flash_attention": True,
        "flash_attention_causal_mask": True,
    },
}
REFUSED: dict[str, dict] = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "num_return_sequences": {"num_return_sequences": 2},
    "use_flex_attention": {"use_flex_attention": True},
    "attn_batch_split": {"attn_batch_split": 2},
    "decode_attn_batch_split": {"decode_attn_batch_split": 2},
    "logits_bf16": {"logits_bf16": True},
    "valid_sequence_lengths": {"valid_sequence_lengths": torch.tensor([3])},
    "hpu_graphs": {"hpu_graphs": True, "lazy_mode": False},
    "synced_gpus": {"synced_gpus": True},
    "assistant_tokenizer": {"assistant_tokenizer": object()},
    "num_virtual_tokens": {"num_virtual_tokens": 4},
}


@pytest.fixture(autouse=True)
def _restored():
    yield
    gaudi_spec.unpatch_optimum_habana()


@pytest.fixture
def patched():
    """In effect during the test."""
    gaudi_spec.patch_optimum_habana()


def ask(model, draft, prompts=gaudi_toys.PROMPTS, new: int = NEW, **options):
    """Returns the new tokens of a call as their program makes it."""
    ids, mask = toys.left_pad(prompts)
    options = {"lazy_mode": True, "do_sample": False, "num_assistant_tokens": 3} | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "use_cache=False")
        out = model.generate(
            ids, attention_mask=mask, assistant_model=draft, max_new_tokens=new, **options
        )
    return list(out[:, ids.shape[1] :])


def want(family: str = "llama", rows: int = 3) -> list[torch.Tensor]:
    """Returns their text without a draft."""
    return [text[:NEW] for text in gaudi_toys.reference(family, rows)]


def pair(family: str = "llama"):
    """Returns a target and a partly right draft."""
    return gaudi_toys.target(family), gaudi_toys.drafts(family)["noisy"]


def test_their_assisted_command_fails_without_the_patch_and_works_with_it(tmp_path):
    """GPT-2 and a smaller one, from checkpoints, with what `run_generation.py` makes of flags."""
    models = []
    for name, model in zip(("gpt2", "distilgpt2"), pair("gpt2")):
        model.save_pretrained(tmp_path / name)
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).eval())
    assert [type(model).__name__ for model in models] == ["GaudiGPT2LMHeadModel"] * 2
    config = copy.deepcopy(models[0].generation_config)
    config.max_new_tokens, config.do_sample, config.num_beams = NEW, False, 1
    config.use_cache, config.static_shapes, config.bucket_size = True, False, -1
    config.bucket_internal = config.reuse_cache = config.trim_logits = False
    config.attn_softmax_bf16 = config.limit_hpu_graphs = config.reduce_recompile = False
    config.use_flash_attention = config.flash_attention_recompute = False
    config.ignore_eos = True
    ids = gaudi_toys.PROMPTS[0][None]
    options = dict(attention_mask=torch.ones_like(ids), generation_config=config, lazy_mode=True)
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'crop'"):
        models[0].generate(ids, assistant_model=models[1], **options)
    gaudi_spec.patch_optimum_habana()
    out = models[0].generate(ids, assistant_model=models[1], hpu_graphs=True, **options)
    toys.assert_equal_rows(out[:, ids.shape[1] :], want("gpt2", 1))


def test_the_patch_can_be_put_on_twice_and_taken_off():
    """`generate` is theirs again afterwards."""
    theirs = GenerationMixin.generate
    assert theirs is GaudiGenerationMixin.generate
    gaudi_spec.unpatch_optimum_habana()
    assert GenerationMixin.generate is theirs
    gaudi_spec.patch_optimum_habana()
    ours = GenerationMixin.generate
    gaudi_spec.patch_optimum_habana()
    assert GenerationMixin.generate is ours and ours is not theirs
    gaudi_spec.unpatch_optimum_habana()
    assert GenerationMixin.generate is theirs


def test_calls_without_an_assistant_are_theirs(patched, monkeypatch):
    """Argument for argument."""
    monkeypatch.setattr("gaudi_spec.habana.hf.generate", None)
    model, _ = pair()
    toys.assert_equal_rows(gaudi_toys.plain(model), gaudi_toys.reference("llama", 3))


@pytest.mark.parametrize("where", ["call", "config"])
def test_prompt_lookup_needs_no_assistant(where):
    """It ends unpatched as an assistant does; patched, in a batch too."""
    model, _ = pair()
    lookup = {"prompt_lookup_num_tokens": 3}
    if where == "config":
        lookup = {"generation_config": GaudiGenerationConfig(**lookup)}
    lookup |= {"num_assistant_tokens": None, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'crop'"):
        ask(model, None, gaudi_toys.PROMPTS[:1], static_shapes=False, **lookup)
    gaudi_spec.patch_optimum_habana()
    toys.assert_equal_rows(ask(model, None, **lookup), want())
    assert gaudi_spec.last_report().drafter == "ngram"


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_a_batch_is_theirs_without_a_draft(patched, family):
    """Where unpatched generation takes one row."""
    toys.assert_equal_rows(ask(*pair(family)), want(family))


@pytest.mark.parametrize("name", WORKS)
def test_options_that_work(patched, name):
    """Each gives their text; switches of attention change nothing in float32."""
    toys.assert_equal_rows(ask(*pair(), **WORKS[name]), want())


def test_switches_reach_the_forward(patched):
    """And buckets the engine."""
    seen = {}
    model, draft = pair()
    with pytest.MonkeyPatch.context() as patch:
        forward = type(model).forward

        def spy(self, *args, **kwargs):
            seen.update(kwargs)
            return forward(self, *args, **kwargs)

        spy.__signature__ = inspect.signature(forward)
        patch.setattr(type(model), "forward", spy)
        ask(model, draft, **dict.fromkeys(FORWARD_OPTIONS, True), bucket_size=16)
    assert all(seen[name] is True for name in FORWARD_OPTIONS)


@pytest.mark.parametrize("name", WARNS)
def test_options_without_effect_say_so_once(patched, name):
    """One warning in a process."""
    gaudi_options._told.clear()
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        got = ask(*pair(), **WARNS[name])
    toys.assert_equal_rows(got, want())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(*pair(), **WARNS[name])


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused_by_name(patched, name):
    """Before anything is computed."""
    with pytest.raises(gaudi_spec.ConfigError, match=name):
        ask(*pair(), **REFUSED[name])


def test_every_field_of_theirs_is_known():
    """A field that is neither honoured nor refused would be dropped in silence."""
    stock = GaudiGenerationConfig.__mro__[1]
    theirs = vars(GaudiGenerationConfig()).keys() - vars(stock()).keys()
    assert len(theirs) > 15 and theirs <= gaudi_options.GAUDI_FIELDS


@pytest.mark.parametrize("name", ["target_quant", "draft_quant"])
def test_quantization_is_for_the_other_classes(name):
    """One sentence names the setting."""
    model, draft = pair()
    config = gaudi_spec.SpecConfig(num_assistant_tokens=3, **{name: "fp8"})
    with pytest.raises(gaudi_spec.UnsupportedOptionError, match=f"{name} .* Optimum Habana's"):
        gaudi_spec.generate(
            model,
            gaudi_toys.PROMPTS[0][None],
            assistant_model=draft,
            max_new_tokens=4,
            spec_config=config,
            device="hpu-emulated",
        )


def test_switches_need_their_classes():
    """A stock class would ignore them."""
    model = toys.build("granite")
    config = GaudiGenerationConfig(use_flash_attention=True, max_new_tokens=2)
    ids = gaudi_toys.PROMPTS[0][None]
    with pytest.raises(gaudi_spec.UnsupportedOptionError, match="use_flash_attention is a switch"):
        gaudi_spec.generate(model, ids, assistant_model=model, generation_config=config)


def test_models_of_other_libraries_are_served_too(patched):
    """Granite has no class of theirs: it runs as any Transformers model does."""
    model = toys.build("granite")
    prompts = gaudi_toys.PROMPTS
    texts = [toys.greedy(model, prompt, NEW) for prompt in prompts]
    toys.assert_equal_rows(ask(model, model, prompts), texts)


def test_several_samples_of_each_prompt(patched):
    """Drawn, and the same again with the same seed; a draft does not change a coupled text."""
    model, draft = pair()
    options = dict(do_sample=True, num_return_sequences=2, temperature=1.5, reuse_cache=True)
    first = ask(model, draft, seed=5, **options)
    assert len(first) == 6 and not torch.equal(first[0], first[1])
    toys.assert_equal_rows(ask(model, draft, seed=5, **options), first)


def test_configs_of_the_caller_stay_as_they_were(patched):
    """That of the call, and those of both models."""
    model, draft = pair()
    config = GaudiGenerationConfig(max_new_tokens=4, do_sample=False, bucket_size=16)
    held = [config, model.generation_config, draft.generation_config]
    before = [copy.deepcopy(vars(each)) for each in held]
    ids = gaudi_toys.PROMPTS[0][None]
    model.generate(ids, assistant_model=draft, generation_config=config, ignore_eos=True)
    assert [vars(each) for each in held] == before
    assert model.generation_config is held[1]


def test_an_end_token_ends_a_row_unless_it_is_ignored(patched):
    """Then rows go on after it, also in a batch, where their code blanks them afterwards."""
    model, draft = pair()
    end = int(want()[0][4])
    cut = ask(model, draft, eos_token_id=end, ignore_eos=False)
    at = want()[0].tolist().index(end)
    assert cut[0][: at + 1].tolist() == want()[0][: at + 1].tolist()
    assert set(cut[0][at + 1 :].tolist()) <= {0}
    toys.assert_equal_rows(ask(model, draft, eos_token_id=end, ignore_eos=True), want())


def test_times_and_profiler_are_told_of_every_round(patched):
    """As in their assisted decoding: the first round includes the prefill."""

    class Profiler:
        def __getattr__(self, name):
            return lambda: calls.append(name)

    calls: list[str] = []
    times: list[float] = []
    ask(*pair(), iteration_times=times, profiler=Profiler())
    rounds = gaudi_spec.last_report().cycles
    assert len(times) == rounds and min(times) > 0
    ask(*pair(), profiler=HabanaProfile())  # theirs, which does nothing unless it is told to
    assert calls == ["start", *["step"] * rounds, "stop"]


def test_graphs_are_captured_where_they_are_asked_for(patched):
    """On the emulated card, and kept for the next call."""
    card = EmulatedHpuDevice()
    before = card.recipes()
    two = gaudi_toys.PROMPTS[:2]  # in no other test
    ask(*pair(), two)
    assert card.recipes() == before
    toys.assert_equal_rows(ask(*pair(), two, hpu_graphs=True), want()[:2])
    captured = card.recipes()
    assert captured > before
    toys.assert_equal_rows(ask(*pair(), two, hpu_graphs=True), want()[:2])
    assert card.recipes() == captured
