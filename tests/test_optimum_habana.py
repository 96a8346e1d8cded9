"""Optimum Habana, in processes of its own: it changes Transformers for good.

The tests are in `adapted/`; what is here also runs where optimum-habana is not installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gaudi_spec
from gaudi_spec import gaudi_options
from gaudi_spec.config import FORWARD_OPTIONS

ADAPTED = Path(__file__).parent / "adapted"
WANTED = "1.21.2"
_BLOCK = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *a: None if name.split(".")[0] == "optimum" else find(name, *a)
"""


def installed() -> bool:
    """Returns whether the release that the tests are written for is here."""
    try:
        return importlib.metadata.version("optimum-habana") == WANTED
    except importlib.metadata.PackageNotFoundError:
        return False


needed = pytest.mark.skipif(
    not installed(), reason=f"optimum-habana {WANTED} is not installed: pip install -e .[habana]"
)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python with this package."""
    root = str(Path(gaudi_spec.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)


@needed
@pytest.mark.parametrize("file", sorted(path.name for path in ADAPTED.glob("test_*.py")))
def test_adapted(file, pytestconfig):
    """Runs one file of `adapted/`."""
    marked = pytestconfig.option.markexpr
    done = run("-m", "pytest", "-q", "-m", marked, str(ADAPTED / file), GAUDI_SPEC_ADAPTED="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@needed
def test_optimum_habana_cannot_be_imported_without_the_emulator():
    """Which is why there is a stand-in; if this fails, less of it is needed."""
    assert "IndexError" in run("-c", "import optimum.habana").stderr


@needed
def test_the_emulator_says_what_it_stands_in_for_and_leaves_nothing():
    """In its first line; torchvision is gone after the one import that wants it."""
    code = """
import sys
from gaudi_spec.device import standin
standin.install("gaudi2")
from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi
from optimum.habana.utils import get_habana_frameworks_version
assert str(get_habana_frameworks_version()) == "1.24.0"
assert "torchvision" not in sys.modules
standin.remove()
assert not [name for name in sys.modules if name.startswith("habana_frameworks")]
assert not [each for each in sys.meta_path if "gaudi_spec" in type(each).__module__]
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("EMULATED HPU: Optimum Habana runs over stand-ins"), done.stderr
    assert "torchvision" in first and "1.24.0" in first


def test_without_optimum_habana_the_patch_says_so():
    """And everything else works."""
    code = (
        _BLOCK
        + """
sys.path.insert(0, sys.argv[1])
import gaudi_spec, toys, torch
try:
    gaudi_spec.patch_optimum_habana()
except gaudi_spec.ConfigError as error:
    print(error)
gaudi_spec.unpatch_optimum_habana()
model = toys.build("llama")
prompt = toys.PROMPTS[2][None]
out = gaudi_spec.generate(model, prompt, assistant_model=model, max_new_tokens=8, do_sample=False)
assert torch.equal(out[0, prompt.shape[1]:], toys.greedy(model, prompt[0], 8))
"""
    )
    done = run("-c", code, str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    assert "optimum-habana is not installed: pip install" in done.stdout


def test_the_program_over_their_classes_wants_optimum_habana():
    """In one sentence, before anything is loaded."""
    code = _BLOCK + "import gaudi_spec.cli as c; sys.exit(c.main(sys.argv[1:]))"
    asked = ["generate", "--model_name_or_path", "none", "--optimum_habana", "--device", "cpu"]
    done = run("-c", code, *asked)
    assert (done.returncode, done.stderr) == (
        2,
        "error: optimum-habana is not installed: pip install optimum-habana==1.21.2.\n",
    )


@needed
def test_the_program_over_their_classes_wants_a_card_or_the_emulator():
    """Their package cannot be imported on a plain CPU."""
    code = "import sys, gaudi_spec.cli as c; sys.exit(c.main(sys.argv[1:]))"
    asked = ["generate", "--model_name_or_path", "none", "--optimum_habana", "--device", "cpu"]
    done = run("-c", code, *asked)
    assert done.returncode == 2 and "or the device hpu-emulated" in done.stderr


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (gaudi_options._REFUSED, "refused by name"),
        (gaudi_options._WITHOUT_EFFECT, "one warning, no effect"),
        (gaudi_options._READ, "honoured"),
        (FORWARD_OPTIONS, "honoured"),
        (gaudi_options._INHERENT - {"generation_mode", "use_fused_rope"}, "always so"),
    ],
)
def test_the_table_of_options_says_what_the_code_does(names, verdict):
    """Each field of their generation config stands in a row with its verdict."""
    page = Path(__file__).parents[1] / "docs" / "optimum_habana.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    for name in names:
        (what,) = [row[2] for row in rows if f"`{name}`" in row[1]]
        assert what.strip().startswith(verdict), name


@needed
def test_the_patch_wants_transformers_to_be_adapted_first():
    """In a process where nobody has."""
    with pytest.raises(gaudi_spec.ConfigError, match=r"adapt_transformers_to_gaudi\(\) first"):
        gaudi_spec.patch_optimum_habana()
