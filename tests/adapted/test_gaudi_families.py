"""Each family of Optimum Habana's classes: drafted text is their own code's without a draft."""

from __future__ import annotations

import gaudi_toys
import pytest
import torch
import toys
from gaudi_toys import FAMILIES, NEW, PROMPTS

from gaudi_spec import SpecConfig, SpeculativeEngine, UnsupportedModelError
from gaudi_spec.cache import SlotCache
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.models.gaudi import GAUDI_FAMILIES
from gaudi_spec.models.habana import HabanaCausalLM
from gaudi_spec.models.shadow import fingerprint

CAPTURED = ["llama", "gpt2", "gpt-neox"]
SLOWLY = [family for family in FAMILIES if family not in CAPTURED]


def engine(family: str, draft: str, k: int, device="cpu", **settings) -> SpeculativeEngine:
    """Returns an engine with the switches that a family needs."""
    needed = tuple(name for name in FAMILIES[family][2] if name != "use_cache")
    settings = dict(bucket_size=16, forward_options=needed) | settings
    config = SpecConfig(num_assistant_tokens=k, **settings)
    model = gaudi_toys.drafts(family)[draft]
    return SpeculativeEngine(gaudi_toys.target(family), model, config, device)


def test_every_served_family_is_tested():
    """What is not refused is below."""
    kinds = {toys.FAMILIES[name][0] for name, _, _ in FAMILIES.values()}
    assert kinds == GAUDI_FAMILIES


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_their_own(family, draft, k):
    """A left-padded batch of three and a batch of one, over windows that grow."""
    run = engine(family, draft, k)
    new = 10 if draft == "unrelated" else NEW
    for rows in (3, 1):
        got = run.generate(PROMPTS[:rows], new)
        want = gaudi_toys.reference(family, rows)
        toys.assert_equal_rows(got, [text[:new] for text in want])
    assert isinstance(run.runtime.target, HabanaCausalLM)
    assert draft != "self" or run.report.acceptance_rate == 1


def assert_captured(family: str) -> None:
    """Asserts that whole cycles can be captured, and that no recipe is built after the warm-up."""
    settings = dict(bucket_size=None, prefill_chunks=(16,), strict_shapes=True)
    run = engine(family, "noisy", 3, EmulatedHpuDevice(), **settings)
    run.warm_up(3, 60, quiet=True)
    recipes = run.device.recipes()
    got = run.generate(PROMPTS, NEW)
    toys.assert_equal_rows(got, gaudi_toys.reference(family, 3))
    assert (run.device.recipes(), run.device.fallbacks()) == (recipes, 0)
    assert run.report.graphs.after_warmup == 0


@pytest.mark.parametrize("family", CAPTURED)
def test_cycles_are_captured(family):
    """With cache modules, and with lists of past keys and values."""
    assert_captured(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOWLY)
def test_cycles_of_the_other_families_are_captured(family):
    """Mixtral too: the experts are one operation of the card."""
    assert_captured(family)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_shifted_slots_change_the_text(family, monkeypatch):
    """The equality above is not vacuous."""
    at = SlotCache.at
    monkeypatch.setattr(SlotCache, "at", lambda self, p: at(self, (p - 1).clamp(min=0)))
    got = engine(family, "self", 3).generate(PROMPTS, NEW)
    want = gaudi_toys.reference(family, 3)
    assert not all(torch.equal(ours, other) for ours, other in zip(got, want))


def test_a_corrupted_draft_cache_costs_acceptance_only():
    """The target checks every token."""
    run = engine("llama", "self", 3)
    got = [[] for _ in PROMPTS]
    for event in run.stream(PROMPTS, NEW):
        got[event.row].append(event.token)
        for values in run.runtime.models["draft"].cache.values:
            values.normal_()
    toys.assert_equal_rows(got, gaudi_toys.reference("llama", 3))
    assert run.report.acceptance_rate < 0.8


def test_opt_is_not_their_cached_text():
    """Their cached decoding gives OPT's tokens other positions than their uncached one."""
    cached = gaudi_toys.plain(gaudi_toys.target("opt"))
    right = gaudi_toys.reference("opt", 3)
    assert not all(torch.equal(*pair) for pair in zip(cached, right))


def test_mistral_keeps_its_window_where_theirs_does_not_end():
    """Their decoding masks everything once the text is longer than the sliding window."""
    model = toys.build("mistral-window", attn_implementation="eager", sliding_window=40)
    want = gaudi_toys.plain(model)
    run = SpeculativeEngine(model, model, SpecConfig(num_assistant_tokens=3), "cpu")
    toys.assert_equal_rows(run.generate(PROMPTS, NEW), want)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_callers_model_is_left_alone(family):
    """Their own code gives the same text from it afterwards."""
    model = gaudi_toys.target(family)
    before = fingerprint(model)
    engine(family, "self", 3).generate(PROMPTS, 8)
    assert fingerprint(model) == before
    toys.assert_equal_rows(gaudi_toys.plain(model), gaudi_toys.reference(family, 3))


def test_a_model_in_their_graph_wrapper_is_served():
    """What their program hands to `generate` with --use_hpu_graphs."""
    from habana_frameworks.torch.hpu import wrap_in_hpu_graph

    model = gaudi_toys.build("llama")
    want = gaudi_toys.plain(model)
    wrapped = wrap_in_hpu_graph(model)
    run = SpeculativeEngine(wrapped, wrapped, SpecConfig(num_assistant_tokens=3), "cpu")
    toys.assert_equal_rows(run.generate(PROMPTS, NEW), want)


def test_other_families_are_refused_by_name():
    """With what to do instead."""
    model = toys.build("cohere", attn_implementation="eager")
    with pytest.raises(UnsupportedModelError, match=r"GaudiCohereForCausalLM.*not served yet"):
        SpeculativeEngine(model, None, SpecConfig(), "cpu")


def test_compiled_and_quantized_models_are_refused():
    """Both would run code that does not see our cache."""
    model = gaudi_toys.build("llama")
    model.model = torch.compile(model.model)
    with pytest.raises(UnsupportedModelError, match=r"torch\.compile"):
        SpeculativeEngine(model, None, SpecConfig(), "cpu")
    model = gaudi_toys.build("llama")
    model.model.layers[0].self_attn.k_cache = type("PatchedKVCache", (torch.nn.Module,), {})()
    with pytest.raises(UnsupportedModelError, match="PatchedKVCache"):
        SpeculativeEngine(model, None, SpecConfig(), "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_runs(family):
    """Keys and values may have dtypes of their own; a text may leave theirs at a near-tie only."""
    model = gaudi_toys.build(family).to(torch.bfloat16)
    needed = tuple(name for name in FAMILIES[family][2] if name != "use_cache")
    config = SpecConfig(num_assistant_tokens=2, forward_options=needed)
    run = SpeculativeEngine(model, model, config, "cpu")
    assert [len(text) for text in run.generate(PROMPTS, 4)] == [4, 4, 4]
