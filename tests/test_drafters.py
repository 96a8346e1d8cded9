"""Drafters by name: built-in ones, and plug-ins that are made as docs/drafters.md says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import toys

import gaudi_spec
from gaudi_spec import ConfigError, SpecConfig, SpeculativeEngine
from gaudi_spec.device import standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.drafters.registry import BUILT_IN, GROUP, pick

PAGE = (Path(__file__).parents[1] / "docs" / "drafters.md").read_text(encoding="utf-8")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a fake distribution: a module and its entry points."""

    def run(module: str, source: str, **points: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    return run


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return found


@pytest.fixture
def echo(install):
    """Installs the drafter of docs/drafters.md, registered as the page says."""
    name, value = re.search(r'^(\w+) = "(.*)"$', block("toml"), re.M).groups()
    assert f'entry-points."{GROUP}"' in block("toml")
    install("echo_drafter", block("python"), **{name: value})


def test_the_plug_in_of_the_page_is_exact(echo):
    """Proposals are made, some are right, and the text is the target's own."""
    config = SpecConfig(drafter="echo", num_assistant_tokens=3)
    model = toys.build("llama-tied", 0, scale=0.3)  # likes to repeat itself
    want = [toys.greedy(model, prompt, 24) for prompt in toys.PROMPTS]
    engine = SpeculativeEngine(model, None, config)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 24), want)
    report = engine.report
    assert report.drafter == "echo" and report.draft_forwards == 0
    assert report.proposed > 0 and report.accepted > 0


def test_the_plug_in_of_the_page_is_captured(echo):
    """In one graph with the verification, with nothing built later."""
    try:
        config = SpecConfig(drafter="echo", num_assistant_tokens=3, strict_shapes=True)
        engine = SpeculativeEngine(toys.target(), None, config, EmulatedHpuDevice(check=True))
        engine.warm_up(5, 80, quiet=True)
        recipes = engine.device.recipes()
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
        assert engine.device.recipes() == recipes and engine.device.fallbacks() == 0
    finally:
        standin.remove()


def test_generate_takes_a_plug_in_too(echo):
    ids = toys.PROMPTS[3][None]
    got = gaudi_spec.generate(
        toys.target(), ids, max_new_tokens=12, spec_config=SpecConfig(drafter="echo")
    )
    toys.assert_equal_rows(got[:, 17:], [toys.references()[3][:12]])
    assert gaudi_spec.last_report().drafter == "echo"


def test_a_plug_in_may_host_two_models(install):
    """Each with a cache of its own, prefilled by graphs of its own."""
    source = """
from gaudi_spec.drafters.model import ModelDrafter

class Two(ModelDrafter):
    def __init__(self, context):
        super().__init__(context)
        self.other = ModelDrafter(context)

    def reset(self, kept=()):
        super().reset(kept)
        self.other.reset(kept)

    def catch_up(self, state, lengths, live):
        super().catch_up(state, lengths, live)
        self.other.catch_up(state, lengths, live)

    def propose(self, state, k):
        self.other.window = self.window
        self.other.propose(state, k)
        return super().propose(state, k)

    def committed(self, lengths, k):
        super().committed(lengths, k)
        self.other.committed(lengths, k)
"""
    install("two_drafters", source, two="two_drafters:Two")
    config = SpecConfig(num_assistant_tokens=5, drafter="two")
    engine = SpeculativeEngine(toys.target(), toys.target(), config)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    assert engine.report.acceptance_rate == 1.0
    assert list(engine.runtime.models) == ["target", "draft", "draft 1"]
    caches = [model.cache for model in engine.runtime.models.values()]
    assert len({cache.keys[0].data_ptr() for cache in caches}) == 3
    engine.runtime.clean()
    assert not any(buffer.any() for cache in caches for buffer in (*cache.keys, *cache.values))


# Refusals, all before anything is allocated ----------------------------------------------------


def refused(match, draft=None, **config):
    with pytest.raises(ConfigError, match=match):
        SpeculativeEngine(toys.target(), draft, SpecConfig(**config))


def test_an_unknown_name_is_refused_with_the_known_ones(echo):
    refused(
        "no drafter 'medusa'; installed are: auto, combined, echo, model, ngram", drafter="medusa"
    )


@pytest.mark.parametrize("name", ["model", "combined"])
def test_a_missing_draft_model_is_refused(name):
    refused(f"{name!r} needs a draft model", drafter=name)


def test_a_draft_model_that_would_be_left_unused_is_refused():
    refused("'ngram' uses no draft model", draft=toys.target(), drafter="ngram")


@pytest.mark.parametrize(
    ("source", "value", "match"),
    [
        ("import nothing_of_the_kind", "broken:D", "cannot be loaded: No module named 'nothing"),
        ("", "broken:D", "cannot be loaded: .*has no attribute 'D'"),
        ("D = 3", "broken:D", "is not a drafter"),
        ("class D: pass", "broken:D", "is not a drafter"),
    ],
)
def test_a_broken_plug_in_is_refused(install, source, value, match):
    install("broken", source, broken=value)
    refused(match, drafter="broken")


def test_two_plug_ins_of_one_name_are_refused(install):
    install("one", "class D: needs_draft = False", same="one:D")
    install("other", "class D: needs_draft = False", same="other:D")
    refused(r"'same' \((one:D and other:D|other:D and one:D)\)", drafter="same")


def test_built_in_names_cannot_be_replaced(install):
    install("thief", "class D: needs_draft = True", ngram="thief:D")
    assert pick("ngram", False) is BUILT_IN["ngram"]


@pytest.mark.parametrize("value", [None, "", 3, ["ngram"]])
def test_a_drafter_that_is_no_name_is_refused(value):
    with pytest.raises(ConfigError, match="drafter must be"):
        SpecConfig(drafter=value)


@pytest.mark.parametrize("value", [0, 33, -1, 2.0, True, None])
def test_an_ngram_size_out_of_range_is_refused(value):
    with pytest.raises(ConfigError, match="max_matching_ngram_size must be"):
        SpecConfig(max_matching_ngram_size=value)


def test_auto_is_the_draft_model_if_there_is_one():
    assert pick("auto", True) is BUILT_IN["model"] and pick("auto", False) is None
    assert not {name for name, kind in BUILT_IN.items() if not isinstance(kind.needs_draft, bool)}
