"""Every call that the Gaudi device makes is one that Intel published, with arguments it has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import habana_api
import pytest
from habana_api import API, BACKEND, MEMORY_KEYS, METRICS, MODULES, OPTIONS

from gaudi_spec.device import hpu

SOURCE = Path(hpu.__file__).read_text(encoding="utf-8")
LOADER = "_habana"  # the one function that imports, by the name below habana_frameworks


class Reader(ast.NodeVisitor):
    """Follows Intel's modules and objects through a module and notes what is done with them.

    Attributes:
        used: Dotted names that were called or read.
        faults: What the table does not have.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.faults: list[str] = []
        self._kinds: dict[tuple[str, str], str] = {}  # (scope, expression) -> what it holds
        self._parameters: dict[str, list[str]] = {}  # class -> parameters of its __init__
        self._class = self._scope = ""

    @classmethod
    def read(cls, source: str) -> Reader:
        """Returns the reader after a module; what is held where is settled first."""
        tree, reader = ast.parse(source), cls()
        size = -1
        while size != len(reader._kinds):
            size, reader.used, reader.faults = len(reader._kinds), set(), []
            reader.visit(tree)
        return reader

    def kind(self, node: ast.expr) -> str | None:
        """Returns what an expression holds, if that is Intel's."""
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == LOADER and node.args:
                name = node.args[0]
                return name.value if isinstance(name, ast.Constant) else None
            entry = API.get(self.dotted(node.func) or "")
            return entry.returns if entry else None
        if isinstance(node, ast.Attribute) and self.dotted(node) in API:
            return API[self.dotted(node)].returns
        return self._kinds.get(self._place(node))

    def dotted(self, node: ast.expr) -> str | None:
        """Returns "kind.name" of an attribute of something of Intel's."""
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.kind(node.value)
        return None if owner is None else f"{owner}.{node.attr}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._scope = self._scope, f"{self._class}.{node.name}"
        if node.name == "__init__":
            self._parameters[self._class] = [a.arg for a in node.args.args[1:]]
        self.generic_visit(node)
        self._scope = outer

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        if "habana_frameworks" in ast.unparse(node):
            self.faults.append(f"line {node.lineno}: imports past {LOADER}()")

    visit_ImportFrom = visit_Import

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for left, right in pairs:
                self._hold(self._place(left), self.kind(right))

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._hold(self._place(item.optional_vars), self.kind(item.context_expr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == LOADER and self.kind(node) not in MODULES:
            self.faults.append(f"line {node.lineno}: module {ast.unparse(node)}")
        if called in self._parameters:
            for parameter, argument in zip(self._parameters[called], node.args):
                self._hold((f"{called}.__init__", parameter), self.kind(argument))
        entry = API.get(self.dotted(node.func) or "")
        if entry is not None:
            self._bind(node, entry.signature)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        name = self.dotted(node)
        if name is None or name in MODULES:
            return
        self.used.add(name)
        if name not in API:
            self.faults.append(f"line {node.lineno}: {name} is not in the table")

    def _bind(self, node: ast.Call, signature: str) -> None:
        names = {keyword.arg for keyword in node.keywords}
        if None in names or any(isinstance(arg, ast.Starred) for arg in node.args):
            self.faults.append(f"line {node.lineno}: arguments that cannot be read")
            return
        space: dict = {}
        exec(f"def call({signature}): pass", space)
        try:
            inspect.signature(space["call"]).bind(*node.args, **dict.fromkeys(names))
        except TypeError as error:
            self.faults.append(f"line {node.lineno}: {ast.unparse(node)}: {error}")

    def _place(self, node: ast.expr) -> tuple[str, str]:
        """Attributes of self belong to the class, other names to the function."""
        text = ast.unparse(node)
        return (self._class if text.startswith("self.") else self._scope, text)

    def _hold(self, place: tuple[str, str], kind: str | None) -> None:
        if kind is not None:
            self._kinds[place] = kind


class Fake:
    """Answers `memory_stats` and `metric_global` with everything that is published."""

    def memory_stats(self, device=None):
        return dict.fromkeys(MEMORY_KEYS, 2 * 10**9)

    def metric_global(self, name):
        metric = Fake()
        metric.stats = lambda: [(key, 3) for key in METRICS[name]]
        return metric


def test_every_call_is_in_the_table_with_arguments_it_has():
    assert Reader.read(SOURCE).faults == []


def test_the_reader_finds_the_calls_and_the_table_has_no_others():
    """A reader that found nothing would let everything pass."""
    used = Reader.read(SOURCE).used
    assert {"torch.core.mark_step", "HPUGraph.replay", "Metric.stats"} <= used
    assert set(API) - used == set()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (".mark_step()", ".flush_step()", "torch.core.flush_step is not in the table"),
        ("replay(asynchronous=True)", "replay(wait=False)", "unexpected keyword argument 'wait'"),
        ("replay(asynchronous=True)", "replay(**options)", "cannot be read"),
        (".capture_begin()", ".capture_begin(False, 1)", "too many positional arguments"),
        (".stream(self._hpu.default_stream())", ".stream()", "missing a required argument"),
        (".HPUGraph()", ".HPUGraph(pool=1)", "unexpected keyword argument 'pool'"),
        ("capture_end()", "finish()", "HPUGraph.finish is not in the table"),
        (".stats()", ".totals()", "Metric.totals is not in the table"),
        ('_habana("torch.core")', '_habana("torch.kernel")', "torch.kernel"),
        ("import os", "import habana_frameworks.torch.core", "imports past"),
    ],
)
def test_what_intel_does_not_have_is_found(old, new, fault):
    """Negative controls: the device's own source with one made-up call each."""
    assert old in SOURCE
    faults = Reader.read(SOURCE.replace(old, new)).faults
    assert faults and any(fault in line for line in faults), faults


def test_a_method_that_is_passed_on_is_found_too():
    source = 'def f():\n    card = _habana("torch.hpu")\n    return map(card.made_up, [])\n'
    assert Reader.read(source).faults == ["line 3: torch.hpu.made_up is not in the table"]


@pytest.mark.parametrize("name", sorted(API))
def test_the_table_itself_is_well_formed(name):
    entry = API[name]
    exec(f"def call({entry.signature}): pass", {})
    owners = {*MODULES, *(e.returns for e in API.values() if e.returns)}
    assert name.rpartition(".")[0] in owners
    assert entry.source.endswith(".py") and entry.modes in ("lazy", "lazy, eager")
    assert entry.since is None or entry.until is None or entry.since <= entry.until
    assert habana_api.__doc__


def test_memory_and_metrics_use_published_keys():
    """With what the published API returns, and nothing more."""
    device = object.__new__(hpu.HpuDevice)
    device._hpu = device._metrics = Fake()
    assert device.memory() == {"allocated": 2.0, "max_allocated": 2.0, "total": 2.0}
    assert device.recipes() == device.fallbacks() == 3


def test_compile_options_are_published_and_the_backend_is_named():
    assert set(hpu._OPTIONS) <= set(OPTIONS)
    assert f'backend="{BACKEND}"' in SOURCE
