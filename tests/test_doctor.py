"""The checks of `gaudi-spec doctor`, on environments that contradict themselves."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gaudi_spec import SpecConfig, cli, device, doctor, environment, run_generation
from gaudi_spec.environment import Facts

ROOT = Path(__file__).parents[1]
CPU = Facts(torch="2.9.1", transformers="4.55.4", memory={"total": 8.0})
HPU = Facts(
    torch="2.9.0",
    transformers="4.55.4",
    bridge="1.23.0.695",
    bridge_lazy=True,
    device="hpu",
    hardware="GAUDI3, lazy mode",
    memory={"total": 128.0},
    hl_smi=True,
)
GOOD = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_RECIPE_CACHE_CONFIG": "./recipes,false,4096,false"}


def change(facts: Facts, **changes) -> Facts:
    return dataclasses.replace(facts, **changes)


def find(name: str, env: dict, facts: Facts) -> environment.Check:
    found = [check for check in doctor.examine(env, facts) if check.name == name]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(("env", "facts"), [({}, CPU), (GOOD, HPU)], ids=["cpu", "hpu"])
def test_a_sound_installation_is_all_ok(env, facts):
    checks = doctor.examine(env, facts)
    assert [str(check) for check in checks if check.status != "ok"] == []
    assert len({check.name for check in checks}) == len(checks) == 20


NO_CARD = {"bridge": None, "device": None, "hardware": None, "hl_smi": False}

# name of the check, status, words of the line, environment on top of GOOD, facts on top of HPU
CASES = [
    ("Python", "problem", "3.14.0", {}, dict(python="3.14.0")),
    ("Python", "problem", "3.9.1", {}, dict(python="3.9.1")),
    ("torch", "problem", "Not installed", {}, dict(torch=None)),
    ("transformers", "problem", "older than 4.55", {}, dict(transformers="4.54.1")),
    ("transformers", "problem", "Not installed", {}, dict(transformers=None)),
    ("transformers", "ok", "5.24.0", {}, dict(transformers="5.24.0")),
    ("transformers", "note", "newer than tested", {}, dict(transformers="6.0.0.dev0")),
    (
        "optimum-habana",
        "note",
        "found 5.24.0",
        {},
        dict(optimum_habana="1.21.2", pin="<4.56.0,>=4.55.0", transformers="5.24.0"),
    ),
    (
        "optimum-habana",
        "ok",
        "1.21.2 wants",
        {},
        dict(optimum_habana="1.21.2", pin="<4.56.0,>=4.55.0"),
    ),
    ("device", "problem", "no card", {}, dict(device=None, why="hpu: no card.", hardware=None)),
    ("hardware", "problem", "cannot be opened", {}, dict(hardware=None)),
    ("memory", "note", "not counted", {}, dict(memory={})),
    ("threads", "note", "OMP_NUM_THREADS=2", {}, dict(threads=64, cores=2)),
    ("habana_frameworks", "problem", "no habana_frameworks", {}, dict(bridge=None, device="cpu")),
    ("habana_frameworks", "problem", "cannot be used", {}, dict(device="cpu")),
    ("habana_frameworks", "ok", "1.23", {}, dict(device="cpu", requested="cpu")),
    ("habana_frameworks", "ok", "unknown version", {}, dict(bridge=None)),
    ("driver", "note", "not on PATH", {}, dict(hl_smi=False)),
    *(
        (name, status, text, {}, {**NO_CARD, "requested": requested})
        for name, status, text, requested in (
            ("habana_frameworks", "problem", "no habana_frameworks", "hpu"),
            ("habana_frameworks", "ok", "not installed", "auto"),
            ("driver", "note", "not on PATH", "hpu"),
            ("driver", "ok", "no card is used", "auto"),
            ("mode", "ok", "not used", "hpu"),
        )
    ),
    ("mode", "problem", "eager to gaudi-spec", {"PT_HPU_LAZY_MODE": "2"}, {}),
    ("mode", "problem", "is 0, but the bridge runs lazy", {"PT_HPU_LAZY_MODE": "0"}, {}),
    ("mode", "problem", "is not set, but the bridge runs lazy", {"PT_HPU_LAZY_MODE": None}, {}),
    ("mode", "note", "not set", {"PT_HPU_LAZY_MODE": None}, dict(bridge_lazy=False)),
    ("mode", "ok", "torch.compile", {"PT_HPU_LAZY_MODE": "0"}, dict(bridge_lazy=False)),
    ("recipe cache", "note", "every process", {"PT_HPU_RECIPE_CACHE_CONFIG": None}, {}),
    ("recipe cache", "problem", "malformed", {"PT_HPU_RECIPE_CACHE_CONFIG": "r,maybe,10"}, {}),
    ("recipe cache", "problem", "malformed", {"PT_HPU_RECIPE_CACHE_CONFIG": "r,false,1GB"}, {}),
    ("recipe cache", "problem", "malformed", {"PT_HPU_RECIPE_CACHE_CONFIG": "r,0,1,0,0"}, {}),
    ("recipe cache", "problem", "three fields", {}, dict(bridge="1.19.0.561")),
    ("recipe cache", "problem", "not writable", {}, dict(writable=lambda path: False)),
    ("recipe cache", "note", "emptied", {"PT_HPU_RECIPE_CACHE_CONFIG": "r,True,10"}, {}),
    ("recipe cache", "note", "No path", {"PT_HPU_RECIPE_CACHE_CONFIG": ",false,10"}, {}),
    ("recipe cache", "ok", "recipes", {"PT_HPU_RECIPE_CACHE_CONFIG": "recipes"}, {}),
    ("recipe cache", "note", "overridden", {"PT_RECIPE_CACHE_PATH": "old"}, {}),
    (
        "recipe cache",
        "note",
        "deprecated",
        {"PT_RECIPE_CACHE_PATH": "old", "PT_HPU_RECIPE_CACHE_CONFIG": None},
        {},
    ),
    ("collectives", "problem", "8 processes", {"WORLD_SIZE": "8"}, {}),
    (
        "collectives",
        "ok",
        "8 processes",
        {"OMPI_COMM_WORLD_SIZE": "8", "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"},
        {},
    ),
    (
        "collectives",
        "ok",
        "2 processes",
        {"WORLD_SIZE": "2", "PT_HPU_LAZY_MODE": "0"},
        dict(bridge_lazy=False),
    ),
    ("tensor cache", "note", "not used here", {"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "1"}, {}),
    ("metrics file", "problem", "no directory", {"PT_HPU_METRICS_FILE": "m.json"}, {}),
    ("metrics file", "ok", "./m.json", {"PT_HPU_METRICS_FILE": "./m.json"}, {}),
    (
        "metrics file",
        "problem",
        "Unknown format",
        {"PT_HPU_METRICS_FILE": "./m", "PT_HPU_METRICS_FILE_FORMAT": "csv"},
        {},
    ),
    (
        "metrics file",
        "problem",
        "trigger",
        {"PT_HPU_METRICS_FILE": "./m", "PT_HPU_METRICS_DUMP_TRIGGERS": "process_exit,often"},
        {},
    ),
    ("int64", "problem", "eager mode only", {"PT_ENABLE_INT64_SUPPORT": "1"}, {}),
    ("int64", "ok", "=1", {"PT_ENABLE_INT64_SUPPORT": "1"}, dict(bridge_lazy=False)),
    ("int64", "ok", "=0", {"PT_ENABLE_INT64_SUPPORT": "0"}, {}),
    (
        "quantization",
        "note",
        "converts the target, not the draft",
        {"QUANT_CONFIG": "quant.json"},
        {},
    ),
    (
        "model cache",
        "problem",
        "not writable",
        {"GAUDI_SPEC_CACHE": "there"},
        dict(writable=lambda path: path != "there"),
    ),
    ("model cache", "note", "not writable", {}, dict(writable=lambda path: False)),
    ("hub", "note", "downloaded before", {"HF_HUB_OFFLINE": "1"}, {}),
    ("hub", "ok", "online", {"HF_HUB_OFFLINE": "0"}, {}),
]


@pytest.mark.parametrize(("name", "status", "words", "env", "changes"), CASES)
def test_check(name, status, words, env, changes):
    merged = {key: value for key, value in {**GOOD, **env}.items() if value is not None}
    check = find(name, merged, change(HPU, **changes))
    assert check.status == status, check
    assert words in str(check)
    assert (check.status == "problem") <= bool(check.remedy), "a problem without a remedy"


def test_the_kernel_for_few_rows_is_told_on_the_cpu():
    """With the reason against it; on other devices it is none of their business."""
    assert find("few-rows kernel", {}, change(CPU, kernel="")).text == "built"
    found = find("few-rows kernel", {}, change(CPU, kernel="There is no C compiler."))
    assert (found.status, found.text) == ("note", "There is no C compiler.") and found.remedy
    assert "few-rows kernel" not in {check.name for check in doctor.examine(GOOD, HPU)}


def test_every_check_of_the_card_has_a_case_that_is_not_ok():
    never_bad = {"gaudi_spec"}
    named = {case[0] for case in CASES if case[1] != "ok"}
    assert {check.name for check in doctor.examine(GOOD, HPU)} - never_bad == named


def test_settings_of_a_card_do_not_fail_another_device():
    env = {
        "PT_HPU_LAZY_MODE": "2",
        "PT_HPU_RECIPE_CACHE_CONFIG": "a,b,c,d,e",
        "PT_HPU_METRICS_FILE": "m",
        "PT_ENABLE_INT64_SUPPORT": "1",
        "WORLD_SIZE": "8",
    }
    assert not [check for check in doctor.examine(env, CPU) if check.status == "problem"]


def test_checks_touch_neither_environment_nor_machine(monkeypatch):
    before = dict(os.environ)
    monkeypatch.setattr(os, "access", None)
    monkeypatch.setattr(os, "environ", None)
    first = doctor.examine(GOOD, HPU)
    monkeypatch.undo()
    assert first == doctor.examine(GOOD, HPU) and before == dict(os.environ)


def test_versions_of_every_form_are_read():
    read = [environment.numbers(v) for v in ("4.55.4", "5.0.0.dev0", "2.9.1+git12", None, "")]
    assert read == [(4, 55, 4), (5, 0, 0), (2, 9, 1), (), ()]


class Card(device.base.Device):
    """A device whose answers tests choose."""

    reason: str | Exception | None = None
    broken = False

    @classmethod
    def missing(cls):
        if isinstance(cls.reason, Exception):
            raise cls.reason
        return cls.reason

    @classmethod
    def version(cls):
        return "1.23.0"

    def bridge_lazy(self):
        return True

    def describe(self):
        if self.broken:
            raise RuntimeError("synStatus 8, device\nacquired")
        return "GAUDI3"


@pytest.fixture
def card(monkeypatch):
    kind = type("ThisCard", (Card,), {})
    monkeypatch.setitem(device.DEVICES, "hpu", kind)
    return kind


def test_gather_takes_the_card_and_the_mode_the_bridge_says(card):
    facts = doctor.gather()
    assert (facts.device, facts.hardware, facts.bridge_lazy) == ("hpu", "GAUDI3", True)
    assert facts.bridge == "1.23.0" and facts.why == ""


@pytest.mark.parametrize("requested", ["auto", "hpu", "cpu"])
def test_a_bridge_that_cannot_be_imported_is_a_problem_unless_it_is_not_asked_for(card, requested):
    card.reason = AssertionError("Compile-time version differs\nfrom run-time")
    checks = {check.name: check for check in doctor.examine({}, doctor.gather(requested))}
    wanted = "ok" if requested == "cpu" else "problem"
    assert checks["habana_frameworks"].status == wanted
    assert checks["device"].status == ("problem" if requested == "hpu" else "ok")
    if requested != "cpu":
        assert "differs from run-time" in checks["device"].text


def test_a_card_that_another_process_holds_is_a_problem(card):
    card.broken = True
    checks = {check.name: check for check in doctor.examine({}, doctor.gather())}
    assert checks["hardware"].status == "problem"
    assert "synStatus 8, device acquired" in checks["device"].text


def test_writable_looks_at_the_nearest_directory(tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor._writable(str(tmp_path / "new" / "deeper"))
    assert not doctor._writable(str(tmp_path / "file"))
    assert not doctor._writable(str(tmp_path / "file" / "below"))


def test_command_prints_a_line_a_check_and_returns_0(capsys):
    code = cli.main(["doctor", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21 and all(re.match(r"(ok|note|problem) +\w", line) for line in lines)
    assert code == any(line.startswith("problem") for line in lines)


def test_command_prints_json_and_returns_1_for_a_problem(capsys, card):
    card.reason = "no card here."
    assert cli.main(["doctor", "--json", "--device", "hpu"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["problems"] == sum(c["status"] == "problem" for c in values["checks"]) > 0
    found = next(c for c in values["checks"] if c["name"] == "device")
    assert found["text"] == "hpu: no card here." and found["remedy"]


def test_usage_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", text, re.M) for name in cli.COMMANDS)
    assert cli.main(["doctor", "--device", "tpu"]) == 2


DOCUMENT = (ROOT / "docs" / "on_gaudi.md").read_text(encoding="utf-8")


def test_every_variable_that_is_checked_is_explained_in_the_docs():
    source = Path(environment.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r"\b(?:PT|QUANT|HF|GAUDI|OMP)_[A-Z0-9_]+\b", source))
    assert len(names) >= 12
    assert [name for name in sorted(names) if f"`{name}`" not in DOCUMENT] == []


def test_commands_and_settings_of_the_docs_are_valid():
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOCUMENT, re.S)
    settings = [
        SpecConfig.from_dict(yaml.safe_load(text)) for kind, text in blocks if kind == "yaml"
    ]
    assert len(settings) >= 3 and not settings[0].fuse_cycle
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    runs = [shlex.split(line)[2:] for line in commands if "run_generation.py" in line]
    assert [run_generation.parser().parse_args(run).device for run in runs] == ["hpu", "hpu"]


def test_tests_that_the_docs_name_exist():
    """Every `-k` expression of the table selects something."""
    source = (ROOT / "tests" / "test_hpu.py").read_text(encoding="utf-8")
    names = " ".join(re.findall(r"def (test_\w+)", source)) + source.partition("@pytest")[0]
    table = DOCUMENT.partition("| assumption |")[2].partition("\n\n")[0]
    words = {word for found in re.findall(r'`"([a-z_ ]+)"`', table) for word in found.split()}
    assert len(words) > 6
    assert [word for word in words - {"and", "or"} if word not in names] == []
