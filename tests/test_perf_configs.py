"""Every file of perf_configs: valid, true to the planner, and refused where it cannot run."""

import datetime
import runpy
import shlex
from pathlib import Path

import pytest

from gaudi_spec import cli, flags, run_generation
from gaudi_spec.device import DEVICES
from gaudi_spec.errors import ConfigError
from gaudi_spec.perf_config import BLOCKS, PerfConfig, parse
from gaudi_spec.plan import command

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("perf_configs/*.yaml"))
PLANNED = [path for path in FILES if "plan:" in path.read_text(encoding="utf-8")]
MEASURED = (
    "tokens_per_second",
    "plain_tokens_per_second",
    "speedup",
    "acceptance_rate",
    "first_token_ms",
)
DEFAULTS = vars(flags.parser().parse_args(["--model_name_or_path="]))


def named(path: Path) -> str:
    return path.stem


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("# python x --config c.yaml\n" + text)
    return path


def test_there_are_files_for_both_cards_and_this_machine():
    cards = {PerfConfig.read(path).plan["hardware"] for path in PLANNED}
    assert len(PLANNED) >= 10 and cards == {"gaudi2", "gaudi3"}
    assert len(FILES) == len(PLANNED) + 1


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_are_valid_and_start_with_their_command(path, monkeypatch):
    file = PerfConfig.read(path)
    words = shlex.split(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))
    environment = dict(word.split("=") for word in words[: words.index("python")])
    assert environment == file.environment
    assert words[-2:] == ["--config", f"perf_configs/{path.name}"]
    args = flags.parser().parse_args(file.arguments(DEFAULTS))
    assert args.model_name_or_path and args.assistant_model
    assert (args.device == "hpu") == bool(file.plan)
    for name, value in file.environment.items():
        monkeypatch.setenv(name, value)
    if file.needs:
        with pytest.raises(ConfigError, match="needs"):
            file.check_runnable("hpu")
    else:
        file.check_runnable("hpu")
        run_generation.check(args)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_name_what_this_version_lacks(path):
    file = PerfConfig.read(path)
    lacking = {
        "cards": file.plan.get("cards", 1) > 1,
        "fp8": "fp8" in file.plan.values(),
        "whisper": "whisper" in file.flags["model_name_or_path"],
    }
    assert set(file.needs) == {need for need, lacks in lacking.items() if lacks}


@pytest.mark.parametrize("path", PLANNED, ids=named)
def test_projections_are_what_the_planner_says(path):
    args, file = command.parse(["--config", str(path)])
    values = command.plan(args, file)
    assert values["label"] == "projected" and values["memory"]["fits"]
    assert file.projected == command.block(values, file)
    assert file.with_block("projected", file.projected) == path.read_text(encoding="utf-8")
    assert file.settings.num_assistant_tokens == values["best_k"]["0.7"]
    assert file.measured == {}  # nobody has run one on a card


def test_the_file_of_this_machine_says_what_was_measured_where_and_when():
    (path,) = set(FILES) - set(PLANNED)
    file = PerfConfig.read(path)
    assert file.projected == {}
    if not file.measured:
        pytest.skip("not measured yet: python docs/make_benchmarks.py --measure perf_config")
    assert file.measured["command"].endswith(f"--config perf_configs/{path.name}")
    assert file.measured["machine"] and datetime.date.fromisoformat(file.measured["date"])
    assert min(file.measured[key] for key in MEASURED) > 0


def test_what_was_measured_is_written_into_the_file(tmp_path):
    """From the results of a run; the rest of the file stays as it is."""
    (path,) = set(FILES) - set(PLANNED)
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8").partition("measured:")[0])
    maker = runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))
    place = {"hardware": "x86_64, 2 cores", "device": "cpu", "threads": 2}
    versions = {"gaudi_spec": "0.1", "torch": "2.13", "transformers": "4.55", "python": "3.11"}
    results = {
        "throughput": 30.04,
        "baseline_throughput": 25.0,
        "speedup": 1.2016,
        "acceptance_rate": 0.33333,
        "avg_first_token_latency": 0.0321,
        "environment": {**place, **versions},
    }
    file = PerfConfig.read(copy)
    copy.write_text(file.with_block("measured", maker["measured"](results, file)))
    again = PerfConfig.read(copy)
    assert again.measured["machine"] == "x86_64, 2 cores (cpu)"
    assert datetime.date.fromisoformat(again.measured["date"])
    assert [again.measured[key] for key in MEASURED] == [30.0, 25.0, 1.2, 0.333, 32.1]
    assert (again.settings, again.flags) == (file.settings, file.flags)


def test_update_rewrites_only_the_projection(tmp_path, capsys):
    text = PLANNED[0].read_text(encoding="utf-8")
    path = tmp_path / PLANNED[0].name
    path.write_text(text.replace("memory_gb: ", "memory_gb: 1") + "measured: {}  # kept\n")
    assert cli.main(["plan", "--config", str(path), "--update"]) == 0
    capsys.readouterr()
    head, _, block = text.partition("projected:")
    assert path.read_text() == head + "measured: {}  # kept\nprojected:" + block
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("scheme", "planned"), [("int4wo", "int4"), ("fp8", "fp8")])
def test_the_quantization_of_the_settings_is_planned(tmp_path, scheme, planned):
    text = PLANNED[0].read_text(encoding="utf-8").replace("target_quant: none, ", "")
    args, _ = command.parse(["--config", str(write(tmp_path, text + f"target_quant: {scheme}\n"))])
    assert (args.target_quant, args.draft_quant) == (planned, "none")


def test_a_quantized_cache_is_not_planned_as_an_unquantized_one(tmp_path, capsys):
    text = PLANNED[0].read_text(encoding="utf-8")
    path = write(tmp_path, text + "draft_kv_dtype: int8\n")
    assert cli.main(["plan", "--config", str(path)]) == 2
    assert "draft_kv_dtype" in capsys.readouterr().err


def test_an_abbreviated_flag_reads_the_whole_file(tmp_path):
    path = write(tmp_path, "flags: {batch_size: 3}\nneeds: [cards]")
    with pytest.raises(ConfigError, match="several cards"):
        parse(flags.parser(), ["--model_name_or_path", "a", "--conf", str(path)])


def test_flags_given_win_over_the_file(tmp_path):
    path = write(
        tmp_path,
        "flags: {model_name_or_path: a, batch_size: 3, ignore_eos: false, bf16: true,\n"
        "        prompt: [x, y], warmup: 2}\nnum_assistant_tokens: 7\n",
    )
    argv = ["--config", str(path), "--batch_size", "5", "--num_assistant_tokens", "2"]
    args = parse(flags.parser(), argv)
    assert (args.model_name_or_path, args.batch_size, args.warmup) == ("a", 5, 2)
    assert (args.ignore_eos, args.bf16, args.prompt) == (False, True, ["x", "y"])
    assert PerfConfig.read(path).settings.num_assistant_tokens == 7
    assert run_generation.check(args).num_assistant_tokens == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flag: {}", ["'flag'", "'flags'"]),
        ("num_asistant_tokens: 3", ["num_assistant_tokens"]),
        ("flags: {bach_size: 3}", ["bach_size", "'batch_size'"]),
        ("flags: {config: x}", ["config"]),
        ("flags: {batch_size: two}", ["batch_size", "two"]),
        ("flags: [1]", ["mapping"]),
        ("environment: 3", ["environment", "mapping"]),
        ("plan: {card: 2}", ["'cards'"]),
        ("needs: [whispr]", ["'whisper'"]),
        ("needs: fp8", ["needs", "list"]),
        ("needs: [fp8, cards]\nflags: {model_name_or_path: x}", ["target_quant_config", "cards"]),
        (
            "environment: {PT_HPU_LAZY_MODE: '1'}\nflags: {device: hpu, model_name_or_path: x}",
            ["PT_HPU_LAZY_MODE=1", "before Python"],
        ),
    ],
)
def test_a_wrong_file_is_one_sentence_and_exit_code_2(tmp_path, capsys, monkeypatch, text, words):
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    argv = ["--config", str(write(tmp_path, text))]
    assert cli.main(["generate", *argv]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and all(word in err for word in words)


def test_the_environment_is_checked_where_a_card_is_found(tmp_path, monkeypatch):
    """Also with `--device auto`, and not where there is none."""
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    path = write(tmp_path, "environment: {PT_HPU_LAZY_MODE: '1'}\nflags: {device: auto}")
    argv = ["--config", str(path), "--model_name_or_path", "x"]
    assert parse(flags.parser(), argv).device == "auto"
    monkeypatch.setattr(DEVICES["hpu"], "missing", classmethod(lambda cls: None))
    with pytest.raises(ConfigError, match="PT_HPU_LAZY_MODE=1"):
        parse(flags.parser(), argv)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    assert parse(flags.parser(), argv).device == "auto"


def test_a_plan_block_is_checked_like_flags(tmp_path, capsys):
    path = write(tmp_path, "plan: {hardware: gaudi9}")
    assert cli.main(["plan", "--config", str(path)]) == 2
    assert "gaudi9" in capsys.readouterr().err


def test_flags_given_win_over_a_plan_block():
    args, _ = command.parse(["--config", str(PLANNED[0]), "--hardware", "this", "--batch", "4"])
    assert (args.hardware, args.batch, args.context) == ("this", 4, 2048)


def test_blocks_are_documented():
    text = (ROOT / "perf_configs" / "README.md").read_text(encoding="utf-8")
    assert [name for name in BLOCKS if f"`{name}`" not in text] == []


def test_a_measured_file_makes_fp8_runnable():
    file = PerfConfig.read(next(f for f in FILES if "8b_1b_gaudi3_fp8" in f.name))
    with pytest.raises(ConfigError, match="--target_quant_config"):
        file.check_runnable("cpu")
    file.check_runnable("cpu", quantized=True)
    cards = PerfConfig.read(next(f for f in FILES if "x2_fp8" in f.name))
    with pytest.raises(ConfigError, match="several cards"):
        cards.check_runnable("cpu", quantized=True)
