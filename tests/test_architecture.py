"""The layer table of docs/ARCHITECTURE.md is true, and the rules of the package hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gaudi_spec

PACKAGE = Path(gaudi_spec.__file__).parent
DOCUMENT = Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
MAX_LINES = 300


def layer_table() -> dict[str, int]:
    """Returns the layer of each module and folder named in the table."""
    table: dict[str, int] = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\|\s*(\d+)\s*\|([^|]*)\|", line)
        for name in re.findall(r"`([^`]+)`", row[2]) if row else ():
            assert name not in table, f"{name} stands in the table twice"
            table[name] = int(row[1])
    return table


def layer(module: str, table: dict[str, int]) -> int | None:
    """Returns the layer of a module: its own row, or that of the nearest folder."""
    folders = [f"{parent}/" for parent in Path(module).parents if str(parent) != "."]
    return next((table[name] for name in (module, *folders) if name in table), None)


def nodes(module: str):
    """Returns every syntax node of a module, those inside functions included."""
    return ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8")))


def resolve(parts: list[str]) -> str | None:
    """Returns the file of a dotted name inside the package, or None if there is none."""
    base = PACKAGE.joinpath(*parts)
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if parts and file.is_file():
            return str(file.relative_to(PACKAGE))
    return None


def imports(module: str) -> set[str]:
    """Returns the modules of the package that a module imports, at any depth of its code."""
    found: set[str | None] = set()
    folder = list(Path(module).parent.parts)
    for node in nodes(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "gaudi_spec":
                    found.add(resolve(alias.name.split(".")[1:]) or "__init__.py")
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = folder[: len(folder) - node.level + 1] + parts
            elif parts[:1] == ["gaudi_spec"]:
                parts = parts[1:]
            else:
                continue
            inner = {resolve([*parts, alias.name]) for alias in node.names}
            found |= inner if None not in inner else inner | {resolve(parts) or "__init__.py"}
    return {name for name in found if name and name != module}


def outside(module: str) -> set[str]:
    """Returns the top names of everything else a module imports, by statement or by function."""
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__", "find_spec"):
                found.add(str(node.args[0].value).split(".")[0])
    return found


def test_imports_are_found():
    """A parser that found nothing would let everything pass."""
    assert {"cycle.py", "models/hf.py", "device/__init__.py"} <= imports("engine.py")
    assert "state.py" in imports("drafters/base.py")
    assert "habana_frameworks" in outside("device/hpu.py")


@pytest.mark.parametrize("module", MODULES)
def test_module_stands_in_the_layer_table(module):
    """Alone or by its folder."""
    assert layer(module, layer_table()) is not None, f"{module} is in no row"


def test_layer_table_names_only_what_exists():
    """No row outlives its module."""
    table = layer_table()
    assert len(table) > 10
    assert [name for name in table if not (PACKAGE / name).exists()] == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward_or_sideways(module):
    """A module knows nothing of the layers above it."""
    table = layer_table()
    own = layer(module, table)
    upward = [name for name in imports(module) if layer(name, table) > own]
    assert upward == [], f"{module} (layer {own}) imports {upward}"


def test_imports_have_no_circles():
    """Sideways imports within a layer do not close a ring."""
    graph = {module: imports(module) for module in MODULES}
    while graph:
        leaves = [module for module, used in graph.items() if not used & graph.keys()]
        assert leaves, f"a circle among {sorted(graph)}"
        for module in leaves:
            del graph[module]


@pytest.mark.parametrize("module", MODULES)
def test_only_device_imports_habana(module):
    """By statement or through importlib."""
    if not module.startswith("device/"):
        assert not {"habana_frameworks"} & outside(module)


@pytest.mark.parametrize("module", MODULES)
def test_module_is_short(module):
    """One home per idea."""
    lines = len((PACKAGE / module).read_text(encoding="utf-8").splitlines())
    assert lines < MAX_LINES, f"{module} has {lines} lines"


def test_import_is_cheap():
    """`import gaudi_spec` loads no heavy library, and the version needs none."""
    heavy = ("habana_frameworks", "matplotlib", "torch", "transformers")
    code = (
        "import sys, gaudi_spec; assert gaudi_spec.__version__; dir(gaudi_spec); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads():
    """Lazy names are not promises."""
    assert [name for name in gaudi_spec.__all__ if getattr(gaudi_spec, name, None) is None] == []
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        getattr(gaudi_spec, "nothing_of_the_kind")  # noqa: B009
