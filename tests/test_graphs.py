"""Captured graphs: what torch.compile builds equals eager and Transformers, and is built once."""

import copy
import os

import pytest
import torch
import toys
from torch._dynamo.utils import counters

from gaudi_spec import SpecConfig, SpeculativeEngine
from gaudi_spec.buckets import windows
from gaudi_spec.device import get_device, keep_compiled
from gaudi_spec.errors import ShapeError
from gaudi_spec.graphs import GraphRunner, Key
from gaudi_spec.models.shadow import fingerprint, shadow

GRAPH = SpecConfig(
    num_assistant_tokens=3, compile="graph", bucket_size=48, prefill_chunks=(16,), batch_size=5
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "qwen3", "phi3-window"])
def test_compiled_equals_generate(family, fuse):
    """Whole cycles and split ones; sliding and full layers."""
    config = GRAPH.replace(fuse_cycle=fuse, strict_shapes=True)
    engine = SpeculativeEngine(toys.target(family), toys.drafts(family)["noisy"], config)
    engine.warm_up(5, 80, quiet=True)
    for _ in range(2):
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references(family))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "combined-noisy"])
def test_compiled_look_up_equals_generate(draft):
    """Alone and before a draft model."""
    draft, drafter = toys.drafted(draft)
    config = GRAPH.replace(strict_shapes=True, drafter=drafter)
    engine = SpeculativeEngine(toys.target(), draft, config)
    engine.warm_up(5, 80, quiet=True)
    for _ in range(2):
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    assert engine.report.accepted > 0 and not counters["graph_break"]


def test_nothing_is_compiled_after_the_warm_up(tmp_path, monkeypatch):
    """Over 200 calls of mixed lengths, budgets and ends, by torch's own counters.

    Nor in the warm-up of a second start; a changed model is compiled anew.
    """
    monkeypatch.setattr("gaudi_spec.device.kept.cache", lambda: tmp_path)
    model = toys.target()
    config = GRAPH.replace(strict_shapes=True)
    engine = SpeculativeEngine(model, toys.drafts()["noisy"], config)
    engine.warm_up(5, 96, quiet=True)
    built, stats = engine.runtime.graphs.facts.warmup, dict(counters["stats"])
    assert stats["unique_graphs"] == built and not counters["graph_break"]
    for call in range(200):
        rows = toys.prompts(*range(1 + call % 3, 40, 9 + call % 5), seed=call)[:5]
        ends = [toys.references()[call % 5][call % 7].item()] if call % 2 else []
        engine.generate(rows, 1 + call % 50, eos_token_ids=ends)
    facts = engine.runtime.graphs.facts
    assert dict(counters["stats"]) == stats and not counters["graph_break"]
    assert facts.after_warmup == 0 and facts.warmup == built
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    torch._dynamo.reset()
    counters.clear()
    engine = SpeculativeEngine(model, toys.drafts()["noisy"], config)
    engine.warm_up(5, 96, quiet=True)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    assert engine.report.accepted > 0 and not counters["stats"]
    model = copy.deepcopy(model)
    model.model.layers[0].self_attn.scaling *= 2
    engine = SpeculativeEngine(model, None, GRAPH)
    got = engine.generate(toys.PROMPTS, toys.NEW)
    assert counters["stats"]["unique_graphs"] == engine.runtime.graphs.facts.built
    assert [row.tolist() for row in got] != [row.tolist() for row in toys.references()]


@pytest.mark.parametrize("sync_every", [2, 3, 7])
@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated", "ngram", "combined-noisy"])
def test_reading_every_few_cycles_changes_nothing(sync_every, draft):
    """The host reads late; lengths and acceptance are on the device anyway."""
    draft, drafter = toys.drafted(draft)
    config = SpecConfig(num_assistant_tokens=3, bucket_size=16, drafter=drafter)
    every = SpeculativeEngine(toys.target(), draft, config)
    few = SpeculativeEngine(toys.target(), draft, config.replace(sync_every=sync_every))
    ends = [int(toys.references()[2][9])]
    for budget in (1, 2, 9, 40):
        want = every.generate(toys.PROMPTS, budget, eos_token_ids=ends)
        toys.assert_equal_rows(few.generate(toys.PROMPTS, budget, eos_token_ids=ends), want)
        assert few.report.emitted == every.report.emitted
        assert few.report.accepted == every.report.accepted
        assert every.report.host_reads == every.report.cycles == few.report.cycles
    assert few.report.host_reads < few.report.cycles


@pytest.mark.parametrize("bucket", [4, 16, 50, None])
@pytest.mark.parametrize("draft", ["noisy", "ngram", "combined-noisy"])
def test_windows_change_nothing(draft, bucket):
    """Attention, or a look-up, over a part of the slots sees the same tokens."""
    draft, drafter = toys.drafted(draft)
    accepted = []
    for size in (bucket, None):
        config = SpecConfig(num_assistant_tokens=5, bucket_size=size, drafter=drafter)
        engine = SpeculativeEngine(toys.target(), draft, config)
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
        accepted.append((engine.report.accepted_at, engine.report.proposed_at))
    assert accepted[0] == accepted[1] and sum(accepted[0][0]) > 0


def test_windows_double_up_to_the_slots():
    assert windows(512, 64) == [64, 128, 256, 512]
    assert windows(100, 64) == [64, 100]
    assert windows(64, 64) == windows(64, None) == windows(64, 500) == [64]


def test_a_new_shape_is_an_error_in_strict_mode_and_else_one_warning():
    """And the error names the shape."""

    def work():
        return torch.zeros(1)

    known, new = Key("cycle", 1, 3, 64), Key("cycle", 1, 4, 64)
    strict = GraphRunner(get_device("cpu"), capture=False, strict=True)
    strict.warm_up([(known, work)], quiet=True)
    strict.run(known, work)
    with pytest.raises(ShapeError, match="width=4"):
        strict.run(new, work)
    lenient = GraphRunner(get_device("cpu"), capture=False, strict=False)
    lenient.warm_up([(known, work)], quiet=True)
    with pytest.warns(UserWarning, match="width=4"):
        lenient.run(new, work)
    lenient.run(new, work)
    assert (lenient.facts.warmup, lenient.facts.after_warmup, lenient.facts.hits) == (1, 1, 1)


def test_a_shadow_shares_tensors_and_leaves_the_model_alone():
    """Eval mode and marked layers are the shadow's own."""
    model = toys.build("llama").train()
    before = fingerprint(model)
    copy = shadow(model, regions=True)
    assert model.training and not any(m.training for m in copy.modules())
    assert all(a is b for a, b in zip(model.parameters(), copy.parameters()))
    assert type(copy.model.layers[0]) is not type(model.model.layers[0])
    assert type(shadow(model).model.layers[0]) is type(model.model.layers[0])
    assert fingerprint(model) == before
    model.model.layers[0].mlp = torch.nn.Identity()
    assert fingerprint(model) != before


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_running_a_model_is_no_change_to_it(family):
    """So buffers and graphs are kept whatever the caller does with the model between calls."""
    model = toys.target(family)
    before = fingerprint(model)
    toys.greedy(model, toys.PROMPTS[4], 9)
    SpeculativeEngine(model, model).generate(toys.PROMPTS[2:3], 9)
    model.eval()
    assert fingerprint(model) == before


def test_compiled_code_is_kept_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", "")
    keep_compiled(tmp_path / "here")
    work = get_device("cpu").capture(lambda: torch.ones(3) + torch.arange(3.0))
    assert work().tolist() == [1.0, 2.0, 3.0]
    assert any((tmp_path / "here").iterdir())
    assert os.environ["PT_HPU_RECIPE_CACHE_CONFIG"] == f"{tmp_path}/here/recipes,false,8192"
