"""Every flag of Optimum Habana's run_generation.py: honoured, without effect, or refused."""

import json
import os
import re
import shlex
from pathlib import Path

import optimum_habana
import pytest
import tiny_checkpoints
import torch
import toys

from gaudi_spec import flags, habana_flags, loading
from gaudi_spec.cli import main
from gaudi_spec.config import FORWARD_OPTIONS
from gaudi_spec.habana_flags import HONOURED, NO_EFFECT, REFUSED, SHARED, VALUES

ROOT = Path(__file__).parents[1]
ONE, TWO = [20, 30, 40], [9, 8, 55, 44, 21]
NEW = 6
FAST = ["-q", "--warmup", "0", "--n_iterations", "1", "--max_new_tokens", str(NEW)]
# A value for each refused or idle flag that takes one.
GIVEN = {
    "num_beams": ["2"],
    "penalty_alpha": ["0.6"],
    "force_words": ["w9"],
    "mlcommons_dataset": ["data.pkl"],
    "peft_model": ["adapter"],
    "local_rank": ["1"],
    "parallel_strategy": ["tp"],
    "local_quantized_inc_model_path": ["dir"],
    "saved_model_path": ["dir"],
    "pt2e_path": ["dir"],
    "pt2e_quant_dtype": ["int8"],
    "const_serialization_path": ["dir"],
    "attn_batch_split": ["2"],
    "decode_attn_batch_split": ["2"],
    "cache_size_limit": ["64"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def command(checkpoints, capsys):
    """Runs `gaudi-spec generate`; returns (code, stdout, stderr)."""

    def run(*args, fast=FAST):
        models = ["--model_name_or_path", checkpoints[0], "--assistant_model", checkpoints[1]]
        code = main(["generate", *map(str, models), *fast, *map(str, args)])
        return code, *capsys.readouterr()

    return run


def last(out):
    return json.loads(out.rstrip("\n").splitlines()[-1])


def text(prompt, new=NEW):
    ids = toys.greedy(toys.target(), torch.tensor(prompt), new)
    return tiny_checkpoints.word_tokenizer().decode(ids, skip_special_tokens=True)


def words(*prompts):
    return [tiny_checkpoints.words(*prompt) for prompt in prompts]


# The table


def actions():
    return {action.dest: action for action in flags.parser()._actions}


def test_the_table_has_each_flag_once():
    tables = [SHARED, HONOURED, NO_EFFECT, REFUSED]
    names = [name for table in tables for name in table]
    assert sorted(names) == sorted(optimum_habana.DEFAULTS) and len(names) > 80
    assert VALUES.keys() <= HONOURED.keys() | NO_EFFECT.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", optimum_habana.DEFAULTS)
def test_each_flag_has_the_same_default_or_says_why_not(name):
    action, default = actions()[name], optimum_habana.DEFAULTS[name]
    assert f"--{name}" in action.option_strings
    assert optimum_habana.SHORT.get(name, f"--{name}") in action.option_strings
    if name != "book_source":  # which takes a file here
        assert (action.nargs == 0) == isinstance(default, bool)
    if action.default != default:
        assert name in habana_flags.DIFFERENCES
    if name in SHARED:
        assert SHARED[name] == default


def test_the_docs_are_what_the_parser_says():
    page = (ROOT / "docs" / "run_generation.md").read_text(encoding="utf-8")
    assert page == habana_flags.page(flags.parser()), (
        "run python -m gaudi_spec.flags > docs/run_generation.md"
    )
    for name, action in actions().items():
        assert name == "help" or f"`{action.option_strings[0]}`" in page


@pytest.mark.parametrize("name", ["migration.md", "optimum_habana.md"])
def test_the_commands_of_the_pages_parse(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    commands = re.findall(r"```bash\n(.*?)```", page, re.S)
    for command in commands:
        words = shlex.split(command)
        habana_flags.check(
            flags.parser().parse_args(words[words.index("examples/run_generation.py") + 1 :])
        )
    assert commands
    for path in re.findall(r"examples/\w+\.py", page):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_flags_are_named_in_one_sentence(name, capsys):
    arguments = GIVEN.get(name, [])
    assert main(["generate", "--model_name_or_path", "none", f"--{name}", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --{name} is not supported: ") and err.count("\n") == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_flag_may_be_given_its_default(name):
    if name in VALUES and VALUES[name][0] is not None:
        arguments = ["--model_name_or_path", "x", f"--{name}", str(VALUES[name][0])]
        habana_flags.check(flags.parser().parse_args(arguments))


def test_flags_without_effect_give_one_warning_and_the_same_text(command):
    idle = [word for name in NO_EFFECT for word in (f"--{name}", *GIVEN.get(name, []))]
    code, out, err = command("--prompt", *words(ONE), *idle)
    assert code == 0 and last(out)["output"] == [[text(ONE)]]
    (line,) = [line for line in err.splitlines() if line.startswith("Without effect:")]
    for name in set(NO_EFFECT) - {"dynamo_allow_unspec_int_on_nn_module"}:
        assert f"--{name} (" in line
    assert "Without effect" not in command("--prompt", *words(ONE))[2]


def test_switches_of_their_classes_without_those_are_told_of(command):
    switches = [f"--{name}" for name in FORWARD_OPTIONS]
    code, out, err = command("--prompt", *words(ONE), *switches)
    assert code == 0 and last(out)["output"] == [[text(ONE)]]
    (line,) = [line for line in err.splitlines() if line.startswith("Without effect:")]
    assert all(f"{switch} (without --optimum_habana)" in line for switch in switches)


def test_flags_that_are_always_so_change_nothing(command):
    always = [f"--{name}" for name, note in HONOURED.items() if note.startswith("always so")]
    code, out, err = command("--prompt", *words(ONE), *always, "--sdp_on_bf16")
    assert code == 0 and last(out)["output"] == [[text(ONE)]] and "Without" not in err


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [("WORLD_SIZE", "8", True), ("WORLD_SIZE", "1", False)],
)
def test_the_environment_is_refused_by_name(command, monkeypatch, variable, value, refused):
    monkeypatch.setenv(variable, value)
    code, _, err = command("--prompt", *words(ONE))
    assert code == (2 if refused else 0) and err.startswith(f"error: {variable}") == refused


def test_their_assisted_command_line_runs_unchanged(command, monkeypatch):
    """But for the paths of the checkpoints, and how often it is repeated."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    line = (
        "--batch_size 1 --max_new_tokens 100 --use_hpu_graphs --use_kv_cache "
        "--num_return_sequences 1 --temperature 0 --sdp_on_bf16 --prompt"
    )
    code, out, err = command(*line.split(), *words(ONE), fast=["--n_iterations=1", "--warmup=1"])
    assert code == 0, err
    assert last(out)["output"] == [[text(ONE, 100)]]


def test_the_tokenizer_alone_may_run_code(monkeypatch, checkpoints):
    seen = {}
    original = loading.AutoTokenizer.from_pretrained

    def tokenizer(name, trust_remote_code, **options):
        seen["tokenizer"] = trust_remote_code
        return original(name, **options)

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", tokenizer)
    source = loading.Source(str(checkpoints[0]), trust_remote_code_tokenizer=True)
    loading._tokenizer(source)
    assert seen == {"tokenizer": True} and source.arguments()["trust_remote_code"] is False


# Output


def test_labels_and_keys_are_theirs(command, tmp_path):
    args = ["--show_graphs_count", "--output_dir", tmp_path]
    code, out, _ = command("--prompt", *words(ONE, TWO), *args)
    lines = out.splitlines()
    block = lines[lines.index("Stats:") :]
    found = [next(i for i, s in enumerate(block) if s.startswith(x)) for x in optimum_habana.LABELS]
    assert code == 0 and found == sorted(found)
    assert block[1] == "-" * len(block[1]) == block[found[-1] + 1]
    assert "Number of HPU graphs                = 0" in block  # nothing is captured on the CPU
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(written)[: len(optimum_habana.KEYS)] == optimum_habana.KEYS
    assert written["output"] == [[text(ONE)], [text(TWO)]]


def test_graphs_are_counted_where_work_is_captured(command):
    code, out, _ = command(
        "--prompt", *words(ONE), "--show_graphs_count", "--device", "hpu-emulated"
    )
    (line,) = [s for s in out.splitlines() if s.startswith("Number of HPU graphs")]
    assert code == 0 and int(line.split("=")[1]) > 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_trace_is_written(command, tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    args = ["--profiling_warmup_steps", 1, "--profiling_steps", 1, "--n_iterations", 2]
    args += ["--profiling_record_shapes", *(["--profile_whole_sequences"] if whole else [])]
    code, out, _ = command("--prompt", *words(ONE), *args)
    (trace,) = Path("hpu_profile/generate").iterdir()
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["name"] for event in events]
    assert code == 0 and any(name.startswith("aten::") for name in names)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert [n for n in names if n.startswith("ProfilerStep")]
    assert last(out)["output"] == [[text(ONE)]]


# Where prompts come from


def test_prompts_are_cut_or_stretched_to_simulated_lengths(command):
    args = ["--simulate_dyn_prompt", 2, 5, "--warmup", 1, "--compare_baseline"]
    ends = {1: [ONE[:2], TWO[:2]], 2: [[*ONE, 40, 40], TWO], 3: [ONE[:2], TWO[:2]]}
    for n, prompts in ends.items():
        code, out, _ = command("--prompt", *words(ONE, TWO), *args, "--n_iterations", n)
        assert code == 0 and last(out)["output"] == [[text(prompt)] for prompt in prompts]
        assert last(out)["texts_equal_baseline"] is True


def test_a_book_is_cut_to_words(command, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("w20  w30\n\nw40 w50 " * 4, encoding="utf-8")
    args = ["--book_source", book, "--max_input_tokens", 3, "--batch_size", 2]
    code, out, _ = command(*args)
    assert code == 0 and last(out)["input"] == words(ONE, ONE)
    assert last(out)["output"] == [[text(ONE)]] * 2


ROWS = [{"id": 1, "text": "w20 w30 w40", "other": "w5"}] + [
    {"id": i, "text": f"w{9 + i} w8", "other": "w5"} for i in range(4)
]


def write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        lines = [json.dumps(row) for row in rows]
    elif path.suffix == ".json":
        lines = [json.dumps(rows)]
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    else:
        lines = [row["text"] for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt"])
def test_a_data_set_is_read_from_a_file_in_its_order(command, tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}")
    args = ["--dataset_name", path, "--batch_size", 2, "--max_input_tokens", 2]
    args += ["--column_name", "text", "--compare_baseline", "--output_dir", tmp_path / "out"]
    code, out, err = command(*args)
    assert code == 0, err
    prompts = [[20, 30], *([9 + i, 8] for i in range(4))]
    values = last(out)
    assert values["input"] == [row["text"] for row in ROWS]
    assert values["output"] == [[text(prompt)] for prompt in prompts]
    assert values["emitted_tokens"] == 5 * NEW and values["finish_reasons"] == ["length"] * 5
    assert values["accepted"] + values["target_tokens"] == values["emitted_tokens"]
    assert values["texts_equal_baseline"] is True
    assert [s for s in out.splitlines() if s.startswith("Batch n°")] == [
        f"Batch n°{i}" for i in (1, 2, 3)
    ]
    assert "Total runtime for dataset: " in out and "requested tokens" not in out.split("{")[0]
    assert json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8")) == values


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ([], 5),
        (["--dataset_max_samples", 3], 3),
        (["--dataset_max_samples", 50], 5),
        (["--run_partial_dataset", "--n_iterations", 2], 4),
    ],
)
def test_parts_of_a_data_set(command, tmp_path, args, count):
    path = write(tmp_path / "data.jsonl")
    code, out, _ = command("--dataset_name", path, "--batch_size", 2, "--warmup", 1, *args)
    assert code == 0 and len(last(out)["output"]) == count


def test_parts_of_a_data_set_are_drawn_differently(command, tmp_path):
    path = write(tmp_path / "data.txt", [{"text": "w20 w30"}] * 2)
    args = ["--dataset_name", path, "--do_sample", "--temperature", 3, "--top_k", 0]
    args += ["--verifier", "coupled", "--compare_baseline"]
    texts, again = (last(command(*args)[1]) for _ in range(2))
    assert texts["output"][0] != texts["output"][1] and texts["output"] == again["output"]
    assert texts["texts_equal_baseline"] is True


def test_data_sets_are_cut_to_sixteen_tokens_unless_asked(command, tmp_path):
    long = list(range(10, 30))
    path = write(tmp_path / "data.txt", [{"text": words(long)[0]}])
    for args, size in (([], 16), (["--max_input_tokens", "-1"], 20)):
        _, out, _ = command("--dataset_name", path, *args)
        assert last(out)["output"] == [[text(long[:size])]]


def test_a_directory_is_read_by_the_package_datasets(command, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "test.jsonl")
    code, out, err = command("--dataset_name", tmp_path / "data", "--max_input_tokens", 2)
    assert code == 0, err
    assert last(out)["output"] == [[text([20, 30])], *([text([9 + i, 8])] for i in range(4))]
    assert "'text'" in err


def test_other_data_sets_need_the_package_or_say_what_failed(command, tmp_path):
    code, _, err = command("--dataset_name", tmp_path / "nothing")
    assert code == 2 and "nothing" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--book_source"], "--book_source FILE"),
        (["--book_source", "b.txt"], "--max_input_tokens"),
        (["--book_source", "b.txt", "--max_input_tokens", "3"], "Cannot read b.txt"),
        (["--book_source", "short.txt", "--max_input_tokens", "3"], "has 2 words"),
        (["--dataset_name", "a.txt", "--prompt", "x"], "contradict"),
        (["--dataset_name", "a.txt", "--simulate_dyn_prompt", "3"], "--dataset_name"),
        (["--dataset_name", "a.jsonl"], "Cannot read a.jsonl"),
        (["--dataset_name", "bad.json"], "Cannot read bad.json"),
        (["--dataset_name", "mapping.json"], "not a list of rows"),
        (["--dataset_name", "number.json"], "not a list of rows"),
        (["--dataset_name", "empty.txt"], "not a list of rows"),
        (["--dataset_name", "rows.csv", "--column_name", "b"], "choose one of a with"),
        (["--dataset_name", "rows.csv", "--dataset_max_samples", "0"], "dataset_max_samples"),
        (["--column_name", "a"], "add --dataset_name"),
        (["--dataset_max_samples", "4"], "add --dataset_name"),
        (["--simulate_dyn_prompt", "0"], "at least 1"),
        (["--profiling_steps", "-1"], "--profiling_steps"),
        (["--dataset_name", "rows.csv", "--stream"], "--stream"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_sources_give_one_sentence(command, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("w1 w2")
    Path("bad.json").write_text("{")
    Path("mapping.json").write_text("{}")
    Path("number.json").write_text("3")
    Path("empty.txt").write_text("\n")
    Path("rows.csv").write_text("a\nw9\n")
    code, _, err = command(*args)
    err = err.splitlines()[-1]
    assert code == 2 and err.startswith("error: ") and words in err
    assert not os.path.exists("results.json")
