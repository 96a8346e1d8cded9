"""The slot cache: where it lies, what it holds, and that nothing reads what is stale."""

from __future__ import annotations

import inspect

import pytest
import torch
import toys
from transformers import DynamicCache

from gaudi_spec import NumericalError, SpecConfig, SpeculativeEngine
from gaudi_spec.cache import SlotCache
from gaudi_spec.models.hf import HFCausalLM
from gaudi_spec.quant.kv import KvFormat

FAMILIES = ["llama", "gpt2", "opt", "falcon", "gpt-bigcode", "mistral-window", "gemma3"]
NEW = 24


def engine_for(family, draft="noisy", k=3, **config):
    """Returns an engine with a partly right draft."""
    model, drafter = toys.drafted(draft, family)
    config = SpecConfig(num_assistant_tokens=k, drafter=drafter, **config)
    return SpeculativeEngine(toys.target(family), model, config)


def buffers(engine):
    """Returns every K and V buffer, and every state tensor, of an engine."""
    caches = (engine.runtime.target.cache, engine.runtime.drafter.model.cache)
    state = [t for t in vars(engine.runtime.state).values() if isinstance(t, torch.Tensor)]
    return [t for cache in caches for t in (*cache.keys, *cache.values)] + state


def addresses(engine):
    """Returns where each buffer lies and how large it is."""
    return [(t.data_ptr(), tuple(t.shape)) for t in buffers(engine)]


def slots_of(adapter, row):
    """Returns each layer's `(keys, values)`, both `[S, H_kv, D]`, of one row."""
    view = lambda t: t.view(adapter.cache.batch, adapter.slots, *t.shape[1:])[row]  # noqa: E731
    return [(view(k), view(v)) for k, v in zip(adapter.cache.keys, adapter.cache.values)]


def fresh_prefill(model, tokens):
    """Returns the same from one forward of the plain model with Transformers' own cache."""
    cache = DynamicCache()
    accepted = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in accepted else "cache"
    with torch.no_grad():
        model(input_ids=tokens[None], use_cache=True, **{name: cache})
    return [
        (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers
    ]


def assert_holds(adapter, row, tokens):
    """Asserts that a row's first slots are what a fresh prefill of `tokens` would write."""
    for ours, want in zip(slots_of(adapter, row), fresh_prefill(adapter.model, tokens)):
        for got, fresh in zip(ours, want):
            torch.testing.assert_close(got[: len(tokens)], fresh, atol=1e-5, rtol=1e-4)


def spoil_stale_slots(engine, lengths, value=1e4):
    """Overwrites every slot and token that no later cycle may see."""
    for row in range(engine.runtime.state.batch):
        length = lengths[row] if row < len(lengths) else 1
        for adapter, covered in (
            (engine.runtime.target, length - 1),
            (engine.runtime.drafter.model, length - 2),
        ):
            for pair in slots_of(adapter, row):
                for slots in pair:
                    slots[max(covered, 0) :] = value
        engine.runtime.state.tokens[row, length:] = 5


def decode(engine, after_cycle, prompts=toys.PROMPTS, new=NEW):
    """Returns the output, after calling `after_cycle(lengths, outcome, texts)` each cycle."""
    texts = [prompt.tolist() for prompt in prompts]
    for outcome in engine.cycles(prompts, new):
        for text, row in zip(texts, outcome):
            text.extend(row.tokens)
        after_cycle([len(text) for text in texts], outcome, texts)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts)]


def expected(family):
    """Returns the references cut to NEW tokens."""
    return [text[:NEW] for text in toys.references(family)]


def test_slots_are_finite_before_the_first_use():
    """0 x NaN would pass through a mask, so nothing is left uninitialised."""
    form = KvFormat("float32", torch.float32, torch.float32)
    cache = SlotCache([(2, 8), (1, 4)], 3, 16, form, torch.device("cpu"))
    adapter = HFCausalLM(toys.target(), 2, 16)
    every = [*cache.keys, *cache.values, *adapter.cache.keys, *adapter.cache.values]
    assert len(every) == 4 + 2 * len(adapter.cache) and all(not t.any() for t in every)
    assert [tuple(t.shape) for t in cache.keys] == [(48, 2, 8), (48, 1, 4)]


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_stay_where_they_are(family):
    """For a whole run, across calls of other batches and budgets, and after an interruption."""
    engine = engine_for(family)
    engine.generate(toys.PROMPTS, 30)
    before, held = addresses(engine), buffers(engine)
    decode(engine, lambda *_: pytest.fail("moved") if addresses(engine) != before else None)
    engine.generate(toys.PROMPTS[:2], [1, 7], eos_token_ids=[3, 4])
    next(engine.cycles(toys.PROMPTS, 9))
    engine.generate([toys.PROMPTS[4]], 30)
    assert addresses(engine) == before
    assert all(now is then for now, then in zip(buffers(engine), held))


@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated", "combined-noisy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_hold_what_a_fresh_prefill_would_write(family, draft):
    """After every cycle: the target's up to length - 1, the draft's up to length - 2."""
    engine = engine_for(family, draft)
    checked = []

    def check(lengths, outcome, texts):
        drafted = any(row.n_proposed for row in outcome)
        for row, text in enumerate(texts):
            assert_holds(engine.runtime.target, row, torch.tensor(text[:-1]))
            if drafted and len(text) > 2:
                assert_holds(engine.runtime.drafter.model, row, torch.tensor(text[:-2]))
                checked.append(row)

    prompts = toys.PROMPTS[1:4]
    decode(engine, check, prompts, 9)
    assert set(checked) == {0, 1, 2}


def test_a_wrong_slot_is_noticed_by_the_comparison():
    """Control of the test above."""
    engine = engine_for("llama")
    engine.generate(toys.PROMPTS[2:3], 4)
    tokens = engine.runtime.state.tokens[0, : int(engine.runtime.state.length[0]) - 1].clone()
    assert_holds(engine.runtime.target, 0, tokens)
    engine.runtime.target.cache.values[1][5] += 1e-2
    with pytest.raises(AssertionError):
        assert_holds(engine.runtime.target, 0, tokens)


@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated", "combined-noisy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stale_slots_are_never_seen(family, draft):
    """Spoiling them after every cycle changes neither the output nor what is accepted."""
    clean = engine_for(family, draft)
    clean.generate(toys.PROMPTS, NEW)
    engine = engine_for(family, draft, batch_size=7)
    got = decode(engine, lambda lengths, *_: spoil_stale_slots(engine, lengths))
    toys.assert_equal_rows(got, expected(family))
    assert engine.report.accepted_at == clean.report.accepted_at
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, NEW), expected(family))


def test_a_spoilt_visible_slot_changes_the_output():
    """Control of the test above: the slot just before the stale ones is read."""
    engine = engine_for("llama")

    def spoil(lengths, *_):
        for row, length in enumerate(lengths):
            for _, values in slots_of(engine.runtime.target, row):
                values[length - 2] = 1e4

    with pytest.raises(AssertionError, match="row"):
        toys.assert_equal_rows(decode(engine, spoil, toys.PROMPTS[2:]), expected("llama")[2:])


def test_a_spoilt_draft_slot_costs_acceptance_only():
    """The draft's own cache never decides what is returned."""
    engine = engine_for("llama", "self")

    def spoil(lengths, *_):
        for row, length in enumerate(lengths):
            for _, values in slots_of(engine.runtime.drafter.model, row):
                values[: max(length - 2, 0)] = 1e4

    toys.assert_equal_rows(decode(engine, spoil), expected("llama"))
    assert engine.report.acceptance_rate < 0.9


def test_a_call_that_failed_leaves_nothing_unsound_behind():
    """A prompt with a broken token fails; the next prompt without it is served as before."""
    broken = toys.build("llama", 0)
    broken.model.embed_tokens.weight.data[5] = float("nan")
    engine = SpeculativeEngine(broken, toys.target("llama"))
    want = engine.generate(toys.PROMPTS[2:3], 12)
    assert 5 not in toys.PROMPTS[2]
    with pytest.raises(NumericalError):
        engine.generate([torch.cat([toys.PROMPTS[4], torch.tensor([5, 6])])], 12)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS[2:3], 12), want)
