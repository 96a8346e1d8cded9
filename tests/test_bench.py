"""`gaudi-spec bench`: every figure against arithmetic by hand, who runs when, and its files."""

from __future__ import annotations

import csv
import io
import json
import runpy
import shlex
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny_checkpoints
import toys

from gaudi_spec import SpecConfig, SpeculativeEngine, leviathan, results
from gaudi_spec.bench import card, figures, flags, plots, report, rows, workloads
from gaudi_spec.bench.contenders import Call, Contender, LlamaCpp, Ours, Transformers
from gaudi_spec.bench.figures import Sample
from gaudi_spec.bench.rows import Entry, counted, row
from gaudi_spec.bench.session import Plan, Session, interleave
from gaudi_spec.bench.workloads import Workload
from gaudi_spec.cli import main
from gaudi_spec.device import get_device, hlml
from gaudi_spec.loading import Pair
from gaudi_spec.metrics import Report
from gaudi_spec.sampling.options import Sampling

CARD = card.Card(card.Size(10, 1000, 10), card.Size(1, 100, 1), bandwidth=1e6)
DOCS = Path(__file__).parents[1] / "docs"
PROMPTS = [prompt.tolist() for prompt in toys.PROMPTS]


def counts(proposed_at, accepted_at, **more) -> Report:
    return Report(proposed_at=proposed_at, accepted_at=accepted_at, **more)


# --- arithmetic


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.8])
def test_leviathan_is_the_closed_form(a, k):
    closed = (1 - a ** (k + 1)) / ((1 - a) * (k * 0.1 + 1))
    assert leviathan.leviathan(a, k, 0.1) == pytest.approx(closed)


def test_leviathan_by_hand():
    assert leviathan.leviathan(0.8, 5, 0.02) == pytest.approx(3.68928 / 1.1)
    assert leviathan.leviathan(1.0, 3, 0.25, 1.25) == pytest.approx(4 / 2)
    assert leviathan.leviathan(0.0, 3, 0.25, 1.25) == pytest.approx(1 / 2)


def test_break_even():
    """With one draft the speed-up is (1 + a) / (c + v)."""
    assert leviathan.break_even(1, 0.2, 1.3) == pytest.approx(0.5)
    a = leviathan.break_even(4, 0.1, 1.2)
    assert leviathan.leviathan(a, 4, 0.1, 1.2) == pytest.approx(1)
    assert leviathan.break_even(1, 1.0, 1.5) is None
    assert leviathan.break_even(2, 0.0, 1.0) == pytest.approx(0, abs=1e-9)


def test_alpha_counts_tested_tokens_only():
    """Four blocks of 3, of which 3, 3, 1 and 0 were accepted: 6 + 2 + 1 tokens were tested."""
    facts = counts([4, 4, 4], [3, 2, 2])
    assert facts.acceptance_rate == pytest.approx(7 / 12)
    assert figures.alpha(facts) == pytest.approx(7 / 9)
    assert figures.alpha(counts([2, 1], [2, 1])) == 1  # the second block had one token only
    assert figures.alpha(counts([5, 5], [0, 0])) == 0
    assert figures.alpha(Report()) is None


def test_efficiency():
    """A plain step of 10 ms, 2 ms for each of 2 drafts, 12 ms to verify: 1.75 / 1.6 expected."""
    found = figures.speculation(1.05, counts([4, 4], [2, 1]), 2, 10.0, 4.0, 12.0)
    assert found["draft_cost"] == pytest.approx(0.2) and found["verify_cost"] == pytest.approx(1.2)
    assert found["expected_speedup"] == pytest.approx((1 + 0.5 + 0.25) / 1.6)
    assert found["speculation_efficiency"] == pytest.approx(1.05 * 1.6 / 1.75)
    a = found["break_even_acceptance"]
    assert 1 + a + a * a == pytest.approx(1.6)
    nothing = figures.speculation(None, Report(), 2, 10.0, 4.0, 12.0)
    assert nothing["expected_speedup"] is None and nothing["speculation_efficiency"] is None


def test_rates():
    """Two rows: first tokens after 1 s, a block of two after 2 s, one token after 3 s."""
    sample = Sample(3.5, [[1.0, 2.0, 2.0, 3.0], [1.0, 2.0]], [[5, 6, 7, 8], [5, 6]], steps=2)
    assert sample.emitted == 6 and sample.decode_tokens == 4 and sample.decode_seconds == 2.0
    assert figures.decode_rate([sample, sample]) == pytest.approx(2.0)
    assert figures.end_to_end_rate([sample]) == pytest.approx(6 / 3.5)
    assert figures.step_ms([sample]) == pytest.approx(1000)
    alone = Sample(1.5, [[1.0]], [[5]], steps=0)
    assert figures.decode_rate([alone]) is None and figures.step_ms([alone]) is None


def test_latencies():
    found = figures.latencies([Sample(3.5, [[1.0, 2.0, 2.0, 3.0], [2.0]], [[5, 6, 7, 8], [5]])])
    assert found["ttft_ms_p50"] == pytest.approx(1500)
    assert found["tpot_ms_p50"] == pytest.approx(2000 / 3)  # a row of one token has none
    assert found["inter_token_ms_p50"] == pytest.approx(1000)  # of gaps 1, 0, 1
    assert figures.latencies([Sample(1.0, [[1.0]], [[5]])])["tpot_ms_p99"] is None


def test_percentiles_and_spread():
    found = figures.percentiles("x", [i / 1000 for i in range(1, 101)])
    assert list(found.values()) == pytest.approx([50.5, 90.1, 99.01])
    assert figures.spread("x", [3.0, None, 1.0, 2.0]) == {"x": 2.0, "x_min": 1.0, "x_max": 3.0}
    assert figures.spread("x", [None]) == {"x": None}


def test_phases():
    one = Sample(1.0, [[0.1]], [[5]], 2, {"prefill": 9.0, "draft": 0.004, "verify": 0.016})
    two = Sample(1.0, [[0.1]], [[5]], 3, {"prefill": 9.0, "draft": 0.006, "verify": 0.024})
    assert figures.phase_ms([one, two], "draft") == pytest.approx(2)
    assert figures.phase_ms([one, two], "cycle", "draft", "verify") == pytest.approx(10)
    assert figures.phase_ms([one], "cycle") is None


def test_reports_merge():
    total = figures.merged(
        [counts([2, 1], [1, 0], cycles=2, emitted=[3]), counts([4], [4], cycles=4, emitted=[8])]
    )
    assert total.proposed_at == [6, 1] and total.accepted_at == [5, 0]
    assert total.cycles == 6 and total.emitted == [3, 8] and total.target_tokens == 6


def test_bytes_and_utilisation():
    """1000 bytes of weights and 2 rows of 5 cached tokens of 10 bytes; the draft three times."""
    assert CARD.utilisation(2, 5, 0, 0.01) == pytest.approx(1100 / 0.01 / 1e6)
    assert CARD.utilisation(2, 5, 3, 0.01) == pytest.approx((1100 + 3 * 110) / 0.01 / 1e6)
    model = toys.target()  # 2 layers, 2 heads of 8 for keys and values, float32
    size = card.Size.of(model)
    table = model.get_input_embeddings().weight.numel()
    assert size.kv_token == 2 * 2 * 2 * 8 * 4
    weights = 4 * (size.parameters - table)
    assert weights <= size.weights <= weights + 100  # and the rotary frequencies
    assert card.bandwidth(get_device("cpu"), 1 << 20, 1) > 1e6


# --- who runs when


class Fake(Contender):
    """Notes its calls; the first ones are slow."""

    def __init__(self, name, log, slow=0, k=0):
        self.name, self.k, self._log, self._slow = name, k, log, slow

    def run(self, prompts, call):
        self._log.append((self.name, prompts[0][0]))
        self._slow -= 1
        late = 10.0 if self._slow >= 0 else 0.0
        return [Sample(late + 2.0, [[late + 1.0, late + 2.0]], [[1, 2]], 1)]


def test_contenders_run_in_turn():
    log = []
    fakes = [Fake("A", log), Fake("B", log)]
    rounds = interleave(fakes, [[[1]], [[2]]], Call(2), 2, lambda contender: None)
    one = [("A", 1), ("B", 1), ("A", 2), ("B", 2)]
    assert log == one + one
    assert [[len(samples) for samples in found] for found in rounds] == [[2, 2], [2, 2]]


@pytest.mark.parametrize("warmup", [2, 1])
def test_warm_up_is_in_no_rate(warmup, monkeypatch):
    """The first two calls take 10 s more; a warm-up of one call must show in the figures."""
    log = []
    plan = Plan([Workload("w", [[1]])], [1], [2], [], [], True, Call(2), warmup=warmup)
    bar = types.SimpleNamespace(update=lambda: None)
    session = Session(None, get_device("cpu"), plan, CARD, lambda **_: nullcontext(bar), True)
    entry = Entry(Fake("A", log, slow=2))
    monkeypatch.setattr(session, "_entries", lambda batch: [entry])
    (found,) = session.run()
    assert len(log) == warmup + 3
    assert (found["end_to_end_tokens_per_second_min"] == 1.0) == (warmup == 2)
    assert found["repetitions"] == 3 and found["emitted_tokens"] == 2


def test_speedups_are_of_the_same_repetition():
    plain = Entry(Fake("plain", []))
    plain.rounds = [[Sample(2.0, [[1.0, 2.0]], [[1, 2]])], [Sample(5.0, [[1.0, 5.0]], [[1, 2]])]]
    ours = Entry(Fake("ours", []), plain=plain)
    ours.rounds = [[Sample(1.5, [[1.0, 1.5]], [[1, 2]])], [Sample(3.0, [[1.0, 3.0]], [[1, 3]])]]
    found = row(ours, Call(2), CARD, 1.0)
    assert found["speedup_min"] == found["speedup_max"] == pytest.approx(2.0)
    assert found["end_to_end_speedup_min"] == pytest.approx(4 / 3)
    assert found["end_to_end_speedup_max"] == pytest.approx(5 / 3)
    assert found["same_text"] == 0.0
    assert "same_text" not in row(
        ours, Call(2, sampling=Sampling(do_sample=True, seed=1)), CARD, 1.0
    )  # another draw is no error


# --- contenders


@pytest.fixture(scope="module")
def pair():
    return Pair(toys.target(), toys.drafts()["noisy"], tiny_checkpoints.word_tokenizer())


def texts(samples):
    return [tokens for sample in samples for tokens in sample.tokens]


def cut(text, ends):
    at = next((i for i, token in enumerate(text) if token in ends), len(text) - 1)
    return text[: at + 1]


@pytest.mark.parametrize(
    "name", ["plain", "ours", "lookup", "transformers", "assisted", "hf-lookup"]
)
@pytest.mark.parametrize("ended", [False, True])
def test_contenders_decode_the_same_text(name, ended, pair):
    wanted = [text.tolist() for text in toys.references()]
    ends = (wanted[2][7], wanted[4][11]) if ended else ()
    config = SpecConfig(num_assistant_tokens=3)
    engine = SpeculativeEngine(pair.target, pair.draft, config)
    lookup = SpeculativeEngine(pair.target, None, config.replace(drafter="ngram"))
    contender = {
        "plain": Ours(engine, 0, "plain"),
        "ours": Ours(engine, 3, "ours"),
        "lookup": Ours(lookup, 3, "lookup"),
        "transformers": Transformers(pair),
        "assisted": Transformers(pair, 3),
        "hf-lookup": Transformers(pair, 3, lookup=True),
    }[name]
    before = pair.draft.generation_config.num_assistant_tokens
    samples = contender.run(PROMPTS, Call(toys.NEW, ends))
    toys.assert_equal_rows(texts(samples), [cut(text, ends) for text in wanted])
    assert pair.draft.generation_config.num_assistant_tokens == before
    for sample in samples:
        assert [len(row) for row in sample.arrivals] == [len(row) for row in sample.tokens]
        assert all(
            sorted(times) == times and times[-1] <= sample.seconds for times in sample.arrivals
        )


def test_counts_are_those_of_the_report(pair):
    config = SpecConfig(num_assistant_tokens=3)
    ours = Ours(SpeculativeEngine(pair.target, pair.draft, config), 3, "ours")
    (sample,) = ours.run(PROMPTS, Call(20))
    facts = ours.engine.report.to_dict()
    found = counted(Entry(ours, rounds=[[sample]]), ours)
    for name in ("proposed", "accepted", "cycles", "host_reads", "acceptance_rate",
                 "mean_acceptance_length", "acceptance_by_position"):  # fmt: skip
        assert found[name] == facts[name], name
    assert 0 < found["acceptance_rate"] < 1
    assert sample.emitted == facts["emitted_tokens"] == 100
    assert sample.steps == facts["cycles"] - 1
    assert found["accepted"] + facts["target_tokens"] == sample.emitted


def test_a_block_arrives_at_once(pair):
    engine = SpeculativeEngine(pair.target, pair.target, SpecConfig(num_assistant_tokens=4))
    (sample,) = Ours(engine, 4, "ours").run([PROMPTS[2]], Call(20))
    (times,) = sample.arrivals
    assert [times.count(t) for t in sorted(set(times))] == [5, 5, 5, 5]
    assert sample.decode_tokens == 15 and sample.steps == 3


def test_llama_cpp(monkeypatch):
    """Through a stand-in of its package: what it is asked, and where it stops."""
    asked = []

    class Llama:
        def __init__(self, **settings):
            asked.append(settings)

        def reset(self):
            asked.append("reset")

        def generate(self, prompt, **how):
            asked.append((prompt, how["temp"]))
            yield from range(100)

    assert "not installed" in LlamaCpp.missing("x.gguf")
    module = types.ModuleType("llama_cpp")
    module.Llama, module.__spec__ = Llama, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    assert "--gguf" in LlamaCpp.missing(None) and LlamaCpp.missing("x.gguf") is None
    found = LlamaCpp("x.gguf", 64).run([[7], [8]], Call(5, ends=(3,)))
    assert texts(found) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert asked[0]["n_ctx"] == 64 and asked[1:] == ["reset", ([7], 0.0), "reset", ([8], 0.0)]


# --- workloads and flags


def test_workloads(tmp_path, pair):
    work = Workload("w", [[1], [2], [3]])
    assert work.batches(2) == [[[1], [2]], [[3], [1]]]
    assert work.take(4).rows == [[1], [2], [3], [1]]
    two = [Workload("a", [[1], [2]]), Workload("b", [[3]])]
    assert workloads.mixed(two) == Workload("a+b", [[1], [3], [2]])
    assert set(flags.KINDS) <= workloads.kinds().keys()
    assert all(len(texts) >= 3 for texts in workloads.kinds().values())
    random = workloads.random_tokens(9, 2, 50, 0)
    assert [len(row) for row in random.rows] == [9, 9] and max(max(random.rows)) < 50
    path = tmp_path / "mine.jsonl"
    path.write_text('"w20"\n\n{"prompt": "w30 w40", "kind": "k"}\n')
    assert [w.name for w in workloads.from_file(str(path), pair.tokenizer)] == ["mine", "k"]


def test_lists_and_ranges():
    read = lambda text, least=1: flags.numbers("n", text, least)  # noqa: E731
    assert read("1,2,4") == [1, 2, 4] and read("1-4") == [1, 2, 3, 4]
    assert read("1-9+4") == [1, 5, 9] and read("16-128*2") == [16, 32, 64, 128]
    assert read("0,2", 0) == [0, 2] and read("2,2") == [2]
    assert flags.sizes("auto,1-4*2,1") == [None, 1, 2, 4]


def test_any_setting_can_be_varied():
    line = ["sweep", "--model", "m", "--set", "sync_every=1,4", "--verifier", "coupled"]
    args = flags.parser().parse_args([*line, "--set", "prefill_chunks=[64]"])
    found = flags.settings(args)
    assert [values["sync_every"] for values, _ in found] == [1, 4]
    assert {config.verifier for _, config in found} == {"coupled"}
    assert found[1][1].sync_every == 4 and found[1][1].prefill_chunks == (64,)


def test_a_file_of_perf_configs_gives_the_settings(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("flags:\n  batch_size: 4\nsync_every: 3\n")
    args = flags.parser().parse_args(["latency", "--model", "m", "--config", str(path)])
    assert flags.settings(args)[0][1].sync_every == 3


# --- the command


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tiny_checkpoints.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def bench(checkpoints, capsys, small_card):
    """Runs `gaudi-spec bench` on tiny models; returns (code, stdout, stderr)."""

    def run(what, *args):
        models = ["--model", str(checkpoints[0]), "--assistant_model", str(checkpoints[1])]
        fast = ["--input_len", "9", "--max_new_tokens", "8", "-r", "1", "--warmup", "0", "-q"]
        code = main(["bench", what, *models, *fast, *map(str, args)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def small_card(monkeypatch):
    """No ceiling is measured."""
    monkeypatch.setattr(card, "bandwidth", lambda device: 1e9)


def last(out):
    return json.loads(out.rstrip("\n").splitlines()[-1])


def test_latency(bench, tmp_path):
    code, out, err = bench("latency", "--num_assistant_tokens", 3, "--output_dir", tmp_path / "new")
    found = last(out)
    assert code == 0, err
    assert [row["contender"] for row in found["rows"]] == [
        "plain",
        "speculative",
        "transformers",
        "transformers assisted",
    ]
    assert all(row["same_text"] == 1.0 for row in found["rows"][1:])
    assert all(row["emitted_tokens"] == 8 for row in found["rows"])
    assert "llama-cpp-python is not installed" in out and "Peak memory" in out
    ours = found["rows"][1]
    for key in ("draft_ms", "verify_ms", "accept_ms", "expected_speedup", "bandwidth_utilisation"):
        assert ours[key] > 0, key
    assert ours["cycle_ms"] == pytest.approx(
        ours["draft_ms"] + ours["verify_ms"] + ours["host_ms"]
    )  # without graphs the parts are the cycle's own
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    assert written == found
    assert json.loads((tmp_path / "new" / "environment.json").read_text()) == found["environment"]
    assert found["command"] in (tmp_path / "new" / "report.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_sweep_makes_every_combination_and_parses_back(bench):
    sweep = ("--batch_size", "1,2", "--num_assistant_tokens", "1-2", "--baselines", "none")
    code, out, err = bench("sweep", *sweep, "--set", "sync_every=1,2", "-o", "csv")
    assert code == 0, err
    rows = last(out)["rows"]
    keys = {(r["batch_size"], r["num_assistant_tokens"], r["sync_every"]) for r in rows}
    assert len(keys) == len(rows) == 2 * 3 * 2
    parsed = list(csv.DictReader(io.StringIO(out.rsplit("\n", 2)[0])))
    assert len(parsed) == len(rows)
    for text, value in zip(parsed, rows):
        assert float(text["cycles"]) == value["cycles"]
        assert json.loads(text["acceptance_by_position"]) == value["acceptance_by_position"]


def test_json_lines(bench):
    code, out, err = bench("throughput", "--num_prompts", 3, "--batch_size", 2, "-o", "jsonl")
    assert code == 0, err
    *rows, whole = map(json.loads, out.splitlines())
    assert whole["rows"] == rows
    assert rows[0]["emitted_tokens"] == 4 * 8  # three prompts, and the first one again
    assert any("one row" in note for note in whole["notes"])


def test_json_only(bench):
    code, out, _ = bench("latency", "--baselines", "none", "-o", "json")
    assert code == 0 and len(out.splitlines()) == 1 and last(out)["schema_version"] == 1


def test_steps(bench):
    steps = ("--modes", "eager", "--no_start_times", "--num_assistant_tokens", "1,2")
    code, out, err = bench("steps", *steps)
    assert code == 0, err
    plain, one, two, other = last(out)["rows"]
    assert (plain["plain_step_ms"], other["contender"]) == (plain["cycle_ms"], "transformers")
    assert two["draft_token_ms"] == pytest.approx(two["draft_ms"] / 2)
    assert one["parts_ms"] == pytest.approx(one["draft_ms"] + one["verify_ms"])
    assert "host share" in out


def test_sampled(bench):
    """With one seed and the coupled verifier everybody of ours draws the same text."""
    sampled = ("--do_sample", "--temperature", "0.8", "--num_assistant_tokens", "2")
    code, out, err = bench("latency", *sampled, "--verifier", "coupled")
    assert code == 0, err
    rows = last(out)["rows"]
    assert all("same_text" not in row for row in rows) and len(rows) == 4
    assert all(row["emitted_tokens"] == 8 for row in rows)
    assert rows[1]["accept_ms"] > 0 and rows[0]["verifier"] == "coupled"


def test_what_the_settings_choose(bench):
    """`auto` leaves K to the engine; its row is not one of a constant K."""
    code, out, err = bench("sweep", "--num_assistant_tokens", "auto,2", "--baselines", "none")
    assert code == 0, err
    plain, ours, two = last(out)["rows"]
    assert (plain["num_assistant_tokens"], two["num_assistant_tokens"]) == (0, 2)
    assert ours["contender"] == "scheduled" and ours["num_assistant_tokens"] is None
    assert ours["speedup"] > 0 and ours["same_text"] == 1.0 and "draft_ms" not in ours


def test_without_a_draft(checkpoints, capsys, small_card):
    base = ["--model", str(checkpoints[0]), "--input_len", "5", "--max_new_tokens", "4", "-q"]
    assert main(["bench", "latency", *base, "-r", "1", "--baselines", "none"]) == 0
    assert [row["contender"] for row in last(capsys.readouterr().out)["rows"]] == ["plain"]
    assert main(["bench", "latency", *base, "--drafter", "ngram", "-r", "1"]) == 0
    assert len(last(capsys.readouterr().out)["rows"]) == 4
    for args in (["latency", "--num_assistant_tokens", "2"], ["sweep", "--drafter", "auto,ngram"]):
        assert main(["bench", args[0], *base, *args[1:]]) == 2
        assert "--assistant_model" in capsys.readouterr().err


def test_graphs_on_the_emulator_time_their_parts(bench):
    """A captured cycle is one graph; its parts are timed as graphs of their own."""
    graphs = ("--device", "hpu-emulated", "--baselines", "none", "--num_assistant_tokens", "2")
    code, out, err = bench("latency", *graphs, "--set", "prefill_chunks=[16]")
    assert code == 0, err
    ours = last(out)["rows"][1]
    assert ours["draft_ms"] > 0 and ours["verify_ms"] > 0 and ours["same_text"] == 1.0
    assert "emulat" in out.splitlines()[0]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["latency", "--batch_size", "1,2"], "bench sweep"),
        (["throughput", "--set", "sync_every=1,2"], "bench sweep"),
        (["sweep", "--batch_size", "two"], "numbers such as"),
        (["sweep", "--batch_size", "0"], "at least 1"),
        (["sweep", "--batch_size", "2-8*1"], "never end"),
        (["sweep", "--batch_size", "1-99999999999"], "1000 numbers at most"),
        (["sweep", "--max_new_tokens", "1-600,601-1200"], "1000 numbers at most"),
        (["latency", "--seed", "9" * 30], "64 bits"),
        (["latency", "--set", "forward_options=[[1]]"], "forward_options must be names"),
        (["latency", "-r", "0"], "--repetitions"),
        (["latency", "--kinds", "chat"], "exclude each other"),
        (["latency", "--baselines", "vllm"], "--baselines takes"),
        (["latency", "--set", "sync_evry=2"], "did you mean 'sync_every'"),
        (["latency", "--set", "sync_every"], "NAME=VALUE"),
        (["latency", "--set", "batch_size=2"], "has a flag"),
        (["latency", "--num_assistant_tokens", "40"], "num_assistant_tokens"),
        (["latency", "--max_new_tokens", "400"], "takes 256"),
    ],
)
def test_usage_errors_are_one_sentence(bench, args, reason):
    code, out, err = bench(*args)
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert reason in err


@pytest.mark.parametrize("command", [["bench", "latency"], ["quality"], ["generate"]])
def test_settings_of_a_draft_need_one_before_anything_is_loaded(capsys, command):
    ask = ["--set", "draft_quant=int8"] if command[0] == "bench" else ["--draft_quant", "int8"]
    assert main([*command, "--model_name_or_path", "/no/such/model", *ask]) == 2
    assert "need a draft model" in capsys.readouterr().err


def test_a_quantized_target_is_measured_beside_the_plain_one(bench):
    """Each row tells what its own target holds, and bandwidth only where the card knows it."""
    lookup = ["--drafter", "ngram", "--num_assistant_tokens", "2", "--baselines", "none"]
    quick = ["--modes", "eager", "--no_start_times"]
    code, out, err = bench("steps", *lookup, *quick, "--set", "target_quant=none,int8")
    assert code == 0, err
    rows = last(out)["rows"]
    plain, eight = ([r for r in rows if r["target_quant"] == q] for q in ("none", "int8"))
    assert len(plain) == len(eight) == 2
    assert all(r["bandwidth_utilisation"] > 0 for r in plain)
    assert not any("bandwidth_utilisation" in r for r in eight)
    assert eight[0]["target_weight_mb"] < plain[0]["target_weight_mb"]
    assert eight[0]["target_kv_mb"] == plain[0]["target_kv_mb"] > 0


@pytest.mark.parametrize(
    ("content", "reason"), [("{\n", "Line 1"), ('{"text": "a"}\n', "Line 1"), ("\n", "no prompt")]
)
def test_bad_prompt_files(checkpoints, tmp_path, capsys, content, reason):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    assert main(["bench", "latency", "--model", str(checkpoints[0]), "--prompts", str(path)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "value",
    [
        {"rows": 5, "card": {}, "models": {}, "environment": {}},
        {"rows": [1], "card": {}, "models": {}, "environment": {}},
        {"rows": [{}], "card": {}, "models": {}, "environment": {}},
        {"rows": [], "card": {}},
        [],
    ],
)
def test_a_file_that_is_no_result_is_not_drawn(tmp_path, capsys, value):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(value))
    assert main(["plot", str(path), "-o", str(tmp_path)]) == 2
    assert "not a result of gaudi-spec bench" in capsys.readouterr().err


def test_nothing_is_overwritten(bench, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine").write_text("x")
    code, _, err = bench("latency", "--output_dir", tmp_path / "old")
    assert code == 2 and "not empty" in err


def test_files_are_written_all_or_none(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(report, "markdown", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write({"environment": results.environment(get_device("cpu"))}, str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_early_keeps_its_rows(bench, tmp_path, monkeypatch):
    run = Ours.run

    def fail(self, prompts, call):
        if len(prompts) == 2:
            raise KeyboardInterrupt
        return run(self, prompts, call)

    monkeypatch.setattr(Ours, "run", fail)
    sweep = ("--batch_size", "1,2", "--num_assistant_tokens", 1, "--baselines", "none")
    code, out, err = bench("sweep", *sweep, "--output_dir", tmp_path / "new")
    assert code == 130 and "its 2 rows are above, and in" in err
    found = last(out)
    assert [row["batch_size"] for row in found["rows"]] == [1, 1]
    assert "Not complete" in found["notes"][-1] and found["notes"][-1] in out.split("\n{")[0]
    (file,) = tmp_path.iterdir()
    assert file.name == "new.partial.json"
    assert json.loads(file.read_text())["rows"] == found["rows"]
    assert main(["plot", str(file), "-o", str(tmp_path / "drawn")]) == 0
    monkeypatch.setattr(Ours, "run", run)
    assert bench("sweep", *sweep, "--output_dir", tmp_path / "new")[0] == 0 and not file.exists()


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (None, {}),
        ({"count": 2}, {}),  # which of them is ours is not known
        (
            {"rates": 40, "power": 250_000, "used": 5_000_000_000},
            {"card_utilisation": 0.4, "card_power_watts": 250.0, "card_memory_gb": 5.0},
        ),
        ({"rates": types.SimpleNamespace(aip=40, memory=10)}, {"card_utilisation": 0.4}),
        ({"init": RuntimeError("no driver"), "rates": 40}, {}),
    ],
    ids=["not installed", "two cards", "older release", "newer release", "no driver"],
)
def test_the_card_is_asked_through_pyhlml(monkeypatch, library, said):
    """A stand-in with the functions of that library, of which a card may not serve all."""

    def serve(name):
        def function(*_):
            value = (library or {})[name]
            if isinstance(value, Exception):
                raise value
            return value

        return function

    module = None
    if library is not None:
        library = {"init": None, "count": 1, "card": object(), **library}
        library["memory"] = types.SimpleNamespace(**library) if "used" in library else KeyError()
        names = {"Init": "init", "DeviceGetCount": "count", "DeviceGetHandleByIndex": "card"}
        names |= {"DeviceGetUtilizationRates": "rates", "DeviceGetPowerUsage": "power"}
        names |= {"DeviceGetMemoryInfo": "memory"}
        module = types.SimpleNamespace(**{f"hlml{n}": serve(key) for n, key in names.items()})
    monkeypatch.setitem(sys.modules, "pyhlml", module)
    assert hlml.Counters().read() == said


def test_counters_of_the_card_are_medians_of_the_calls_that_have_them():
    said = rows.said([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {}, {"a": 2.0}])
    assert said == {"a": 2.0, "b": 2.0} and rows.said([{}, {}]) == {}


# --- plots


def test_plots(bench, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert bench("latency", "--output_dir", tmp_path / "new")[0] == 0
    names = {"throughput_by_batch", "acceptance_by_position", "cycle_time", "speedup"}
    assert {path.stem for path in (tmp_path / "new").glob("*.png")} == names
    file = str(tmp_path / "new" / "results.json")
    assert main(["plot", file, file, "-o", str(tmp_path / "drawn")]) == 0
    paths = last(capsys.readouterr().out)["plots"]
    assert len(paths) == 4 and all(Path(path).read_bytes()[:4] == b"\x89PNG" for path in paths)


def test_plots_where_k_is_chosen_by_itself(bench, tmp_path):
    pytest.importorskip("matplotlib")
    args = ("--num_assistant_tokens", "1,auto", "--output_dir", tmp_path / "new")
    code, _, err = bench("sweep", *args)
    assert code == 0 and "No plots" not in err
    assert (tmp_path / "new" / "acceptance_by_position.png").exists()


def test_a_drawing_that_fails_loses_no_results(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("gaudi_spec.bench.plots.draw", lambda *_, **__: 1 / 0)
    code, _, err = bench("latency", "--output_dir", tmp_path / "new")
    assert code == 0 and "No plots: ZeroDivisionError" in err
    assert last((tmp_path / "new" / "results.json").read_text().replace("\n", " "))["rows"]


def test_plots_name_the_settings_that_differ():
    found = [
        {"num_assistant_tokens": 1, "fuse_cycle": fuse, "compile": "graph", "input_tokens": 8}
        for fuse in (True, False)
    ]
    assert [plots._line(one, found)[1] for one in found] == [
        ", fuse_cycle = True",
        ", fuse_cycle = False",
    ]


def test_plots_say_what_is_missing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text('{"rows": [], "card": {}, "models": {}, "environment": {}}')
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(path)]) == 1
    assert 'pip install "gaudi-spec[bench]"' in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_plot_refuses_other_files(tmp_path, capsys, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert main(["plot", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- the page


def test_the_page_is_made_of_the_committed_files():
    maker = runpy.run_path(str(DOCS / "make_benchmarks.py"))
    page = DOCS / "benchmarks.md"
    assert page.exists() == bool(maker["files"]())
    assert {path.stem for path in DOCS.glob("benchmarks/*.json")} <= set(maker["RUNS"])
    if page.exists():
        assert page.read_text(encoding="utf-8") == maker["page"](), "run docs/make_benchmarks.py"


def test_the_page_names_machine_date_and_command(tmp_path, bench):
    _, out, _ = bench("latency", "--baselines", "none")
    found = last(out)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "steps.json").write_text(json.dumps(found))
    maker = runpy.run_path(str(DOCS / "make_benchmarks.py"))
    maker["page"].__globals__["DOCS"] = tmp_path
    assert maker["main"]([]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    for key in ("date", "command"):
        assert found[key] in page
    assert found["environment"]["hardware"] in page


def test_the_commands_of_the_page_parse():
    for command in runpy.run_path(str(DOCS / "make_benchmarks.py"))["RUNS"].values():
        flags.check(flags.parser().parse_args(shlex.split(command)))
