"""Graphs on disk: found by the same work in another process, and by no other work."""

import copy
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from torch._dynamo.utils import counters
from transformers.models.llama import modeling_llama

from gaudi_spec import SpecConfig
from gaudi_spec.device import get_device
from gaudi_spec.device.identity import identity
from gaudi_spec.device.kept import kept
from gaudi_spec.runtime import Runtime

CPU = get_device("cpu")


def origin(target=None, draft=None, config=None) -> str:
    config = config or SpecConfig()
    draft = toys.drafts()["noisy"] if draft is None else draft
    return identity(Runtime(target or toys.build("llama"), draft, config, CPU, 1, 64, 3))


def scaled(model):
    model.model.layers[1].self_attn.scaling *= 2


def configured(model):
    model.config.rms_norm_eps *= 2


def cast(model):
    model.bfloat16()


def exchanged(model):
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def hooked(model):
    model.model.norm.register_forward_hook(lambda module, given, result: result * 2)


@pytest.mark.parametrize("change", [scaled, configured, cast, exchanged, hooked])
def test_a_changed_model_is_another(change):
    model = toys.build("llama")
    change(model)
    assert origin(model) != origin()


class Slotted:
    __slots__ = ("value",)


class Listed(list):
    pass


def in_slot(value):
    held = Slotted()
    held.value = value
    return held


def beside_items(value):
    held = Listed([1])
    held.value = value
    return held


def in_class(value):
    return type("Held", (), {"slopes": [value]})()


def by_keyword(value):
    def function(*, scale=value):
        return scale

    return function


def in_array(value):
    held = np.zeros(3000)
    held[1500] = value
    return held


@pytest.mark.parametrize("hold", [in_slot, beside_items, in_class, by_keyword, in_array])
def test_values_count_wherever_they_are_held(hold):
    found = []
    for value in (1.0, 1.0, 2.0):
        model = toys.build("llama")
        model.held = hold(value)
        found.append(origin(model))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "place, name",
    [(modeling_llama, "apply_rotary_pos_emb"), (modeling_llama.LlamaMLP, "forward")],
)
def test_changed_code_is_another(monkeypatch, place, name):
    """A function of the model's module, and a method of a class."""
    before, function = origin(), getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given, **named: function(*given, **named))
    assert origin() != before


def test_settings_and_shared_weights_count_and_the_weights_do_not():
    model = toys.build("llama")
    assert origin(config=SpecConfig(keep_logits=True)) != origin()
    assert origin(model, model) != origin(model, copy.deepcopy(model))
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert origin(model) == origin()


def test_every_process_finds_the_same():
    """Whatever order its sets have."""
    code = "import test_kept; print(test_kept.origin())"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    found = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "12"
    ]
    one, other = (process.communicate()[0] for process in found)
    assert one == other and len(one.strip()) == 64


class Counter:
    """Buffers, and work over them that writes one of them."""

    def __init__(self, size: int = 3) -> None:
        self.total = torch.zeros(size)
        self.step = torch.ones(size)

    def work(self):
        box = self

        def add() -> torch.Tensor:
            box.total.add_(box.step)
            return box.total * 2

        return add


@pytest.fixture
def graphs(tmp_path, monkeypatch):
    """An empty place for graphs; machine code stays where it is."""
    monkeypatch.setattr("gaudi_spec.device.kept.cache", lambda: tmp_path)
    return tmp_path / "graphs"


def run(name: str, size: int = 3) -> int:
    """Runs work as a new process would; returns how many graphs were traced for it."""
    torch._dynamo.reset()
    counters.clear()
    counter = Counter(size)
    with torch.no_grad():
        graph = kept(counter.work(), name)
        assert [graph()[0].item() for _ in range(3)] == [2, 4, 6]
        counter.step.fill_(5)
        assert graph().tolist() == [16] * size and counter.total.tolist() == [8] * size
    return counters["stats"]["unique_graphs"]


def test_the_second_start_traces_nothing(graphs):
    assert run("a") == 1 and run("a") == 0
    assert run("b") == 1 and run("b") == 0
    assert run("a", size=4) == 1  # the same name, other tensors


def truncate(graphs):
    path = next(graphs.glob("*.bin"))
    path.write_bytes(path.read_bytes()[:1000])


def exchange(graphs):
    next(graphs.glob("*.bin")).write_bytes(b"something else")


def forge(graphs):
    """A graph that is what its digest says, and none of torch's."""
    exchange(graphs)
    path = next(graphs.glob("*.json"))
    about = json.loads(path.read_text())
    about["sha256"] = hashlib.sha256(b"something else").hexdigest()
    path.write_text(json.dumps(about))


def scribble(graphs):
    next(graphs.glob("*.json")).write_text("{")


def lose(graphs):
    next(graphs.glob("*.bin")).unlink()


@pytest.mark.parametrize("damage", [truncate, exchange, forge, scribble, lose])
def test_a_damaged_file_is_made_anew(graphs, damage):
    assert run("a") == 1
    damage(graphs)
    assert run("a") == 1 and run("a") == 0


def test_what_cannot_be_kept_runs_all_the_same(graphs, monkeypatch):
    """Where torch has no such interface, and where an input is not among the work's own."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", None)
    assert run("a") == 1 and run("a") == 1
    monkeypatch.undo()
    assert not list(graphs.glob("*.json"))
    work = kept(lambda: FOREIGN + 1, "foreign")
    assert work().tolist() == [1, 1] == work().tolist()


FOREIGN = torch.zeros(2)
