"""Every command of the README runs, or parses where it needs a card."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_spec import cli, run_generation

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands(language: str) -> list[str]:
    return [line for block in blocks(language) for line in block.splitlines() if line.strip()]


def arguments(command: str) -> list[str]:
    words = shlex.split(command)
    return words[2:] if words[0] in ("python", "gaudi-spec") else []


def generate_commands() -> list[str]:
    return [c for c in commands("bash") if not c.startswith("make") and "chat.py" not in c]


def test_the_readme_is_short_and_has_commands():
    assert len(README.splitlines()) < 250
    assert len(generate_commands()) >= 2 and len(commands("sh")) >= 2 and blocks("python")


@pytest.mark.parametrize("command", [c for c in commands("bash") if c.startswith("make")])
def test_make_targets_exist(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.model
@pytest.mark.parametrize("command", generate_commands())
def test_readme_commands_run(command, capsys):
    assert cli.run_command(run_generation.main, arguments(command)) == 0
    assert '"throughput"' in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.model
@pytest.mark.parametrize("command", [c for c in commands("bash") if "chat.py" in c])
def test_chats_run_from_a_pipe(command):
    command = command.replace("python ", f"{sys.executable} ")
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "0 prompt tokens reused" in done.stderr


@pytest.mark.model
def test_the_python_example_runs(tmp_path):
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is" in done.stdout


@pytest.mark.parametrize(
    "command", [c for c in commands("sh") if "run_generation.py" in c], ids=lambda c: c[:40]
)
def test_commands_for_a_card_parse(command):
    args = run_generation.parser().parse_args(arguments(command))
    assert args.device == "hpu"


def test_the_file_tree_names_what_is_there():
    tree = blocks("text")[-1]
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).exists(), line
