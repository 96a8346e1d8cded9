"""The engine on the emulated card: every graph can be captured, replays are exact, nothing is new.

Mixture-of-experts models cannot be captured as Transformers writes them: the experts that run
depend on the router's choice. Until 4.57 the loop over experts reads it on the host; from 5 on
tokens are sorted by expert with advanced indexing.
"""

from __future__ import annotations

import random

import pytest
import torch
import toys

from gaudi_spec.config import SpecConfig
from gaudi_spec.device import standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.engine import SpeculativeEngine
from gaudi_spec.errors import CaptureError, ShapeError
from gaudi_spec.schedule import Constant

FAMILIES = "llama llama-mha qwen2 gemma2 gemma3 gpt2 opt falcon mistral-window phi3".split()
REPLACED = ["gptj", "falcon-new"]  # a method of theirs is replaced, see models/capturable.py
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe"]
# Each draft with another of the four ways to run; all of them with llama.
WAYS = {"self": (True, 1), "noisy": (False, 3), "unrelated": (True, 3), "ngram": (True, 1)}
WAYS["combined-noisy"] = (True, 1)
ALL = [(draft, fuse, sync) for draft in WAYS for fuse in (True, False) for sync in (1, 3)]
NEW = 24


@pytest.fixture(autouse=True)
def _no_stand_in_left():
    yield
    standin.remove()


def build(family: str, draft: str | None, check: bool = True, **settings) -> SpeculativeEngine:
    """Returns an engine for `PROMPTS` on the emulated card, warmed up and strict."""
    model, drafter = toys.drafted(draft, family)
    settings |= {"drafter": drafter}
    settings = dict(num_assistant_tokens=3, bucket_size=32, strict_shapes=True) | settings
    device = EmulatedHpuDevice(check=check)
    engine = SpeculativeEngine(toys.target(family), model, SpecConfig(**settings), device)
    engine.warm_up(5, 80, quiet=True)
    return engine


def assert_exact(engine: SpeculativeEngine, family: str) -> None:
    """Asserts that the target's own text comes out, and that nothing was compiled for it."""
    recipes, fallbacks = engine.device.recipes(), engine.device.fallbacks()
    got = engine.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references(family)])
    assert engine.device.recipes() == recipes
    assert engine.device.fallbacks() == fallbacks == 0
    assert engine.report.graphs.after_warmup == 0


@pytest.mark.parametrize("draft", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_graphs_give_the_targets_own_text(family, draft):
    """Each replay being compared with the work it stands for."""
    fuse, sync = WAYS[draft]
    assert_exact(build(family, draft, fuse_cycle=fuse, sync_every=sync), family)


@pytest.mark.parametrize("family", REPLACED)
def test_families_with_replaced_methods_are_exact(family):
    """With one draft."""
    assert_exact(build(family, "noisy"), family)


@pytest.mark.parametrize("draft, fuse, sync", ALL)
def test_every_way_to_run_a_cycle_gives_the_same_text(draft, fuse, sync):
    """One graph or two, read at each cycle or seldom; without the check no Python runs at all."""
    assert_exact(build("llama", draft, check=False, fuse_cycle=fuse, sync_every=sync), "llama")


def test_plain_decoding_is_captured_too():
    """Without a draft."""
    assert_exact(build("llama", None), "llama")


@pytest.mark.parametrize("draft", ["noisy", "ngram", "combined-noisy"])
@pytest.mark.parametrize("check", [True, False])
def test_nothing_is_compiled_over_twenty_mixed_calls(check, draft):
    """Whatever the number of prompts, their lengths, budgets and ends."""
    engine = build("llama", draft, check=check)
    recipes = engine.device.recipes()
    draw = random.Random(0)
    for call in range(20):
        rows = draw.randint(1, 5)
        lengths = [draw.randint(1, 50) for _ in range(rows)]
        prompts = toys.prompts(*lengths, seed=call)
        budgets = [draw.randint(1, 80 - length if call % 4 == 0 else 12) for length in lengths]
        ends = draw.sample(range(toys.VOCAB), draw.choice([0, 1, 8]))
        schedule = Constant(draw.choice([0, 3]))
        got = engine.generate(prompts, budgets, eos_token_ids=ends, schedule=schedule)
        for prompt, text, budget in zip(prompts, got, budgets):
            want = toys.greedy(toys.target(), prompt, budget).tolist()
            stop = next((i + 1 for i, token in enumerate(want) if token in ends), budget)
            assert text.tolist() == want[:stop]
    assert engine.device.recipes() == recipes
    assert engine.device.fallbacks() == 0
    assert engine.report.graphs.after_warmup == 0


def test_a_shape_that_was_not_built_is_an_error():
    """In strict mode, with nothing captured."""
    engine = build("llama", "noisy")
    recipes = engine.device.recipes()
    with pytest.raises(ShapeError, match="strict_shapes"):
        engine.generate(toys.PROMPTS, 8, schedule=Constant(2))
    assert engine.device.recipes() == recipes


def test_the_same_shapes_are_the_same_recipes():
    """A second model of the same sizes compiles nothing, as recipes know no weights."""
    build("llama", "noisy")
    device = EmulatedHpuDevice()
    recipes = device.recipes()
    build("llama", "unrelated")
    assert device.recipes() == recipes


def test_a_replaced_buffer_is_caught():
    """Graphs go on reading the old one."""
    engine = build("llama", "noisy")
    engine.generate(toys.PROMPTS, 4)
    state = engine.runtime.state
    state.length = state.length.clone()
    with pytest.raises(CaptureError, match=r"new address.*At drafters/model.py:"):
        engine.generate(toys.PROMPTS, 4)


def test_more_ends_of_text_than_fit_build_the_graphs_anew():
    """Their tensor is replaced then, and the old graphs would read the old one."""
    engine = build("llama", "noisy", strict_shapes=False)
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    late = text.index(next(token for token in text[5:] if token not in text[:5]))
    unused = [token for token in range(toys.VOCAB) if token not in text]
    ends = [*unused[:20], text[late]]
    for count in (0, 20, 21, 0):
        got = engine.generate([prompt], NEW, eos_token_ids=ends[21 - count :])
        want = text[:NEW] if not count else text[: late + 1]
        toys.assert_equal_rows(got, [want])


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_captured(family):
    """With experts over static shapes."""
    assert_exact(build(family, "noisy"), family)


def test_mixtures_of_experts_as_they_are_cannot_be_captured(monkeypatch):
    """Their experts are chosen on the host, or by advanced indexing; the message has the line."""
    monkeypatch.setattr("gaudi_spec.adapt.use_static_experts", lambda model: model)
    with pytest.raises(CaptureError, match=r"_local_scalar_dense|nonzero|index\.Tensor") as caught:
        build("mixtral", None)
    assert "models/hf.py:" in str(caught.value)
    assert "transformers" not in str(caught.value).split("(in ")[0]
    assert "compile='eager'" in str(caught.value)


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_run_without_graphs(family):
    """By their own routing."""
    engine = build(family, None, compile="eager")
    got = engine.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references(family)])


def test_eager_work_on_the_card_is_exact():
    """The same device without graphs."""
    engine = build("llama", "noisy", compile="eager")
    with torch.no_grad():
        got = engine.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references()])
    assert engine.device.recipes() == 0


def test_no_more_graphs_than_asked_for_and_the_text_is_the_same():
    """As with `max_graphs` of Intel's wrapper, which falls back without a word."""
    with pytest.warns(UserWarning, match="max_graphs=3"):
        engine = build("llama", "noisy", max_graphs=3)
    got = engine.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references()])
    facts = engine.report.graphs
    assert facts.ungraphed == facts.warmup - 3 > 0
