"""The emulated card: what a graph cannot hold is refused, and a replay is what the card's would be.

Each planted fault is one that runs without complaint on a CPU.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gaudi_spec
from gaudi_spec.device import get_device, standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.errors import CaptureError, ConfigError


@pytest.fixture
def device():
    """A card that checks every replay."""
    return EmulatedHpuDevice()


@pytest.fixture
def hpu(device):
    """The stand-in's `habana_frameworks.torch.hpu`, imported as a program would."""
    return importlib.import_module("habana_frameworks.torch.hpu")


@pytest.fixture(autouse=True)
def _no_stand_in_left():
    yield
    standin.remove()


def run(device, work, times=1):
    """Captures `work` and returns the result of the last of its calls."""
    graph = device.capture(work)
    for _ in range(times):
        result = graph()
    return result


X = torch.arange(12.0).reshape(3, 4)
IDS = torch.tensor([2, 0, 1])
FLAGS = torch.tensor([True, False, True])
BUFFER = torch.zeros(3, 4)

REFUSED = {
    "item": (lambda: X * X.sum().item(), "_local_scalar_dense.*host"),
    "bool of a tensor": (lambda: X if FLAGS.sum() > 1 else -X, "_local_scalar_dense.*host"),
    "equal": (lambda: X * torch.equal(X, X), "aten.equal.*host"),
    "tolist": (lambda: X * X.tolist()[0][1], r"\.tolist\(\).*host"),
    "cpu": (lambda: X.cpu() + 1, r"\.cpu\(\).*host"),
    "to cpu": (lambda: X.to("cpu") + 1, r'\.to\("cpu"\).*host'),
    "nonzero": (lambda: FLAGS.nonzero(), "nonzero.*depends on data"),
    "one-argument where": (lambda: torch.where(FLAGS)[0], "nonzero.*depends on data"),
    "masked_select": (lambda: X.masked_select(X > 3), "masked_select.*depends on data"),
    "unique": (lambda: torch.unique(IDS), "_unique2.*depends on data"),
    "bincount": (lambda: IDS.bincount(), "bincount.*depends on data"),
    "repeats by data": (lambda: torch.repeat_interleave(IDS), "repeat_interleave.*depends on data"),
    "boolean mask read": (lambda: X[FLAGS], "index.Tensor indexes with a boolean mask"),
    "boolean mask write": (
        lambda: BUFFER.index_put_((FLAGS,), X[0]),
        "index_put_.*indexes with a boolean mask",
    ),
    "advanced indexing": (lambda: X[IDS], "index.Tensor falls back.*gather"),
    "index left out": (
        lambda: torch.ops.aten.index_put_(BUFFER, [None, IDS], X[:, :3]),
        "index_put_.*leaves out an index",
    ),
    "bool max": (lambda: FLAGS.max(0)[0], "max.dim has no boolean kernel"),
    "int64 transposition": (lambda: X.long().t() + 1, "aten.t.default of int64 falls back"),
    "addcmul": (lambda: torch.addcmul(X, X, X), "addcmul.*falls back"),
    "slice written": (lambda: BUFFER[:, :2].copy_(X[:, :2]), r"copy_.*view of shape \[3, 2\]"),
    "slice assigned": (lambda: BUFFER.__setitem__(0, 1.0), "view of shape"),
    "view written": (lambda: BUFFER.view(-1).add_(1), r"add_.*view of shape \[12\]"),
    "host list": (lambda: X + torch.tensor([1.0, 2, 3, 4]), r"shape \[4\] is made from host data"),
    "numpy": (lambda: X + torch.from_numpy(X.new_zeros(4).numpy()), "host"),
    "no device": (lambda: X + torch.arange(4), "arange names no device"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_by_name_and_line(device, fault):
    """The message has the operation, what to do, and this file."""
    work, message = REFUSED[fault]
    with torch.no_grad(), pytest.raises(CaptureError, match=message) as caught:
        run(device, work)
    assert "test_emulator.py:" in str(caught.value)
    assert "<lambda>" in str(caught.value)


def test_a_refused_capture_leaves_the_card_usable(device):
    """And is no recipe."""
    before = device.recipes()
    with pytest.raises(CaptureError):
        run(device, lambda: X.sum().item())
    assert device.recipes() == before
    assert torch.equal(run(device, lambda: X + 1, times=2), X + 1)


def test_slow_operations_are_counted_as_fallbacks(device):
    """As the bridge's own metric does."""
    before = device.fallbacks()
    with pytest.raises(CaptureError):
        run(device, lambda: X[IDS])
    assert device.fallbacks() == before + 1


def test_what_a_graph_can_hold_is_captured(device):
    """Whole buffers written, scalars of the host, views of intermediates written."""
    buffer, where, total = torch.zeros(6, 2), torch.tensor([1, 4]), torch.zeros(2)

    def work():
        buffer.index_copy_(0, where, torch.full((2, 2), 3.0, device=X.device))
        fresh = X * torch.tensor(2.0)
        fresh[:, :2].add_(1)
        total.add_(buffer.sum(0))
        return fresh

    want = X * 2
    want[:, :2] += 1
    assert torch.equal(run(device, work, times=3), want)
    assert total.tolist() == [18.0, 18.0]
    assert buffer[[1, 4]].eq(3).all()


class Drifting:
    """Work whose Python does something else at each call."""

    def __init__(self) -> None:
        self.calls = 0
        self.x = torch.arange(4.0)

    def position(self):
        """A position that is a Python int."""
        self.calls += 1
        return self.x + self.calls

    def slot(self):
        """A slice whose end is a Python int."""
        self.calls += 1
        return self.x.narrow(0, self.calls, 1) * 2

    def flag(self):
        """A branch of Python."""
        self.calls += 1
        return self.x * 2 if self.calls == 1 else self.x.neg()

    def more(self):
        """Work that grows."""
        self.calls += 1
        x = self.x
        for _ in range(self.calls):
            x = x.neg()
        return x

    def less(self):
        """Work that shrinks."""
        self.calls += 1
        return self.x.neg().neg() if self.calls == 1 else self.x.neg()

    def address(self):
        """A buffer that is allocated anew."""
        result = self.x.neg()
        self.calls += 1
        return result

    def scalar(self):
        """A scalar of the host."""
        self.calls += 1
        return self.x * torch.tensor(float(self.calls))

    def output(self):
        """Another of two buffers is returned."""
        self.calls += 1
        self.x.add_(1)
        return self.x if self.calls == 1 else X


DRIFTS = {
    "position": "argument 1 is 2, not 1: Python values are constants",
    "slot": "narrow|slice.*argument [12] is",
    "flag": "aten.neg.default is done where the graph does aten.mul.Tensor",
    "more": "aten.neg.default comes after the last of the 1 recorded",
    "less": "ends after 1 of 2 recorded operations; the next was aten.neg",
    "scalar": "lift_fresh.*argument 0 is",
    "output": "returns another tensor",
}


@pytest.mark.parametrize("fault", DRIFTS)
def test_what_changes_after_the_capture_is_caught_at_the_replay(device, fault):
    """A card would go on with the old value and say nothing."""
    work = getattr(Drifting(), fault)
    graph = device.capture(work)
    graph()
    with pytest.raises(CaptureError, match=DRIFTS[fault]):
        graph()


def test_a_new_address_is_caught(device):
    """A buffer that is replaced is not the captured one."""
    drifting = Drifting()
    graph = device.capture(drifting.address)
    graph()
    drifting.x.add_(1)
    assert torch.equal(graph(), -drifting.x)
    drifting.x = drifting.x.clone()
    with pytest.raises(CaptureError, match=r"argument 0 is a tensor of shape \[4\] at a new addr"):
        graph()


def test_a_grown_shape_is_caught(device):
    """As of a cache that is appended to."""
    drifting = Drifting()
    graph = device.capture(drifting.address)
    graph()
    drifting.x = torch.cat([drifting.x, drifting.x])
    with pytest.raises(CaptureError, match=r"has shape \[8\], not \[4\]"):
        graph()


def test_a_growing_cat_is_caught(device):
    """The new tensor stands in a list."""
    parts = [torch.ones(2)]
    graph = device.capture(lambda: torch.cat(parts) * 2)
    graph()
    parts.append(torch.ones(2))
    with pytest.raises(CaptureError, match=r"aten.cat.*argument 0 is"):
        graph()
    parts[:] = [torch.ones(2)]
    with pytest.raises(CaptureError, match="at a new address"):
        graph()


def test_unchecked_replays_are_silently_wrong_as_on_the_card():
    """Which is why the check is the default."""
    drifting = Drifting()
    graph = EmulatedHpuDevice(check=False).capture(drifting.position)
    assert torch.equal(graph(), graph())
    assert drifting.calls == 1


def test_replays_run_no_python_and_write_the_same_output(hpu):
    """Outputs must be cloned to survive, and side effects happen once."""
    x, total, calls = torch.ones(3), torch.zeros(3), []
    graph = hpu.HPUGraph()
    graph.capture_begin()
    calls.append(1)
    total.add_(x)
    output = (x * 2).view(3, 1)
    graph.capture_end()
    place = output.data_ptr()
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay(asynchronous=True)
        assert output.data_ptr() == place
        assert output.flatten().tolist() == [2 * value] * 3
    assert total.tolist() == [6.0] * 3
    assert calls == [1]


def test_a_dry_run_leaves_nothing_behind(hpu):
    """Until the first replay."""
    total = torch.zeros(2)
    graph = hpu.HPUGraph()
    with hpu.graph(graph, dry_run=True):
        total.add_(1)
    assert total.tolist() == [0, 0]
    graph.replay()
    assert total.tolist() == [1, 1]


def test_captures_do_not_nest(hpu):
    """Nor is anything replayed inside one."""
    outer, inner = hpu.HPUGraph(), hpu.HPUGraph()
    with hpu.graph(inner):
        X.neg()
    outer.capture_begin()
    with pytest.raises(RuntimeError, match="already under way"):
        hpu.HPUGraph().capture_begin()
    with pytest.raises(RuntimeError, match="while a capture"):
        inner.replay()
    outer.capture_end()
    inner.reset()
    with pytest.raises(RuntimeError, match="holds no capture"):
        inner.replay()


class Scale(torch.nn.Module):
    """Counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 3.0))
        self.calls = 0

    def forward(self, x, times=1):
        """Returns `x` scaled."""
        self.calls += 1
        return x * self.weight * times


def test_the_wrapper_keeps_one_graph_for_each_shape_and_value(hpu, device):
    """Tensors by shape and view, everything else by value; inputs are copied in."""
    module = hpu.wrap_in_hpu_graph(Scale())
    before = device.recipes()
    first = module(torch.ones(2))
    assert module(torch.full((2,), 5.0)) is first
    assert first.tolist() == [15, 15]
    assert (module.calls, device.recipes() - before) == (1, 1)
    module(torch.ones(3))
    assert module.calls == 2
    assert module(torch.ones(2), times=2).tolist() == [6, 6]
    assert module.calls == 3
    module(torch.ones(2, 2).t()[0])  # same shape, another view
    assert (module.calls, device.recipes() - before) == (4, 4)
    module.clear_cache()
    module(torch.ones(2))
    assert (module.calls, device.recipes() - before) == (5, 4)  # captured again, compiled before


def test_values_that_hash_alike_share_a_graph_as_in_the_bridge(hpu):
    """Its key is a hash alone, and Python's hash of -1 is that of -2."""
    wrapped = hpu.wrap_in_hpu_graph_func(lambda x, n: x * n)
    assert wrapped(torch.ones(1), -1).tolist() == [-1]
    assert wrapped(torch.ones(1), -2).tolist() == [-1]


def test_beyond_max_graphs_calls_run_without_a_graph(hpu, device):
    """Silently, and so do bypassed ones."""
    module = hpu.wrap_in_hpu_graph(Scale(), max_graphs=1)
    before = device.recipes()
    for _ in range(2):
        module(torch.ones(2))
        module(torch.ones(3))
    module(torch.ones(2), bypass_hpu_graphs=True)
    assert (module.calls, device.recipes() - before) == (4, 1)
    fallbacks = device.fallbacks()
    indexed = hpu.wrap_in_hpu_graph_func(lambda x: x[IDS], max_graphs=0)
    assert torch.equal(indexed(X), X[IDS])
    assert device.fallbacks() == fallbacks + 1


def test_warmup_mode_skips_the_replay(hpu):
    """After the capture."""
    wrapped = hpu.wrap_in_hpu_graph_func(lambda x: x * 2)
    wrapped(torch.ones(1))
    assert wrapped(torch.full((1,), 7.0), warmup_mode=True).tolist() == [2]
    assert wrapped(torch.full((1,), 7.0)).tolist() == [14]


@pytest.mark.parametrize("off", [True, False])
def test_without_the_tensor_cache_results_are_the_same(hpu, off):
    """In-place work is done once a call, though the capture is a dry run."""
    total = torch.zeros(1)
    wrapped = hpu.wrap_in_hpu_graph_func(lambda x: total.add_(x), disable_tensor_cache=off)
    for _ in range(3):
        wrapped(torch.ones(1))
    assert total.tolist() == [3]


def test_metrics_are_the_bridges(hpu, monkeypatch):
    """Names, tuples, None for unknown ones, and the switch of the recipe cache."""
    metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
    assert metrics.metric_global("recipe_cache") is None
    assert metrics.metric_global("nothing") is None
    monkeypatch.setenv("PT_HPU_ENABLE_CACHE_METRICS", "1")
    with metrics.metric_localcontext("graph_compilation") as local:
        for size in (2, 2, 5):
            with hpu.graph(hpu.HPUGraph()):
                torch.ones(size, device="cpu").neg()
    assert [name for name, _ in local.stats()] == ["TotalNumber", "TotalTime", "AvgTime"]
    assert dict(local.stats())["TotalNumber"] == 2
    found = metrics.metric_global("graph_compilation")
    assert dict(found.stats())["TotalNumber"] == 2
    cache = dict(metrics.metric_global("recipe_cache").stats())
    assert (cache["TotalHit"], cache["TotalMiss"]) == (1, 2)
    found.reset()
    assert dict(found.stats())["TotalNumber"] == 0
    names = [name for name, _ in metrics.metric_global("cpu_fallback").stats()]
    assert names == ["TotalNumber", "FallbackOps"]
    with (
        pytest.raises(metrics.MetricNotFound, match="nothing"),
        metrics.metric_localcontext("nothing"),
    ):
        pass


def test_memory_is_that_of_captured_tensors(device, hpu):
    """Freed with their graph; the peak stays."""
    x = torch.ones(1000)
    graph = hpu.HPUGraph()
    with hpu.graph(graph):
        x.neg()
    assert hpu.memory_stats() == {"Limit": 96 * 10**9, "InUse": 8000, "MaxInUse": 8000}
    assert device.memory() == {"allocated": 8e-6, "max_allocated": 8e-6, "total": 96.0}
    del graph
    assert (hpu.memory_allocated(), hpu.max_memory_allocated()) == (0, 8000)


@pytest.mark.parametrize("name, size", [("gaudi2", 96.0), ("gaudi3", 128.0)])
def test_the_environment_chooses_the_card(monkeypatch, name, size):
    """Gaudi 2 unless told otherwise; and one card in a process."""
    monkeypatch.setenv("GAUDI_SPEC_EMULATE", name)
    device = get_device("hpu-emulated")
    assert device.describe() == f"EMULATED HPU (not a measurement): {name.upper()}, lazy mode"
    assert device.memory()["total"] == size
    assert device.torch_device.type == "cpu"
    other = {"gaudi2": "gaudi3", "gaudi3": "gaudi2"}[name]
    with pytest.raises(ConfigError, match=f"emulates {name} already"):
        EmulatedHpuDevice(other)


def test_an_unknown_card_is_refused():
    """With the known ones."""
    with pytest.raises(ConfigError, match="gaudi2 or gaudi3"):
        EmulatedHpuDevice("gaudi9")


def test_the_stand_in_is_no_card(device):
    """`auto` and `hpu` do not mistake it for the bridge, installed or not."""
    assert device.bridge_lazy()
    assert get_device("auto").name != "hpu-emulated"
    with pytest.raises(ConfigError, match="not installed"):
        get_device("hpu")


def test_the_real_bridge_is_never_replaced(monkeypatch):
    """There is nothing to emulate where it is installed."""
    monkeypatch.setattr(standin, "installed_for_real", lambda: True)
    with pytest.raises(ConfigError, match="use device 'hpu'"):
        get_device("hpu-emulated")
    with pytest.raises(ConfigError, match="nothing to emulate"):
        EmulatedHpuDevice()


def test_the_stand_in_comes_with_the_emulator_only():
    """Not by importing this package, nor its devices."""
    code = (
        "import sys, gaudi_spec, gaudi_spec.engine, gaudi_spec.device.emulated\n"
        "print([n for n in sys.modules if n.startswith('habana')])\n"
        "gaudi_spec.device.get_device('hpu-emulated')\n"
        "import habana_frameworks.torch.core as core, habana_frameworks.torch as ht\n"
        "import habana_frameworks.torch.utils.experimental as htexp\n"
        "from habana_frameworks.torch.hpex.kernels import FusedSDPA\n"
        "from habana_frameworks.torch.hpu.random import manual_seed\n"
        "core.mark_step(); ht.hpu.synchronize(); ht.core.mark_step('', sync=True)\n"
        "print(htexp._get_device_type() == htexp.synDeviceType.synDeviceGaudi2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(gaudi_spec.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "True"]
