"""The planner: its fit to public speeds, memory against a loaded engine, arithmetic, and errors."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from toys import build
from transformers import AutoConfig

from gaudi_spec import cli, leviathan, zoo
from gaudi_spec.config import SpecConfig
from gaudi_spec.device import get_device
from gaudi_spec.plan import hardware, measure, memory, speed
from gaudi_spec.plan.hardware import Hardware, fit, gaudi, rows
from gaudi_spec.plan.memory import Job
from gaudi_spec.plan.sizes import config_of, published, sizes, skeleton, weights
from gaudi_spec.runtime import Runtime

PAIR = ["--model", "Qwen/Qwen2.5-7B", "--assistant_model", "Qwen/Qwen2.5-0.5B"]
CARDS = ("gaudi2", "gaudi3")


def job(target="Qwen/Qwen2.5-7B", draft="Qwen/Qwen2.5-0.5B", batch=1, context=2048, k=4, **other):
    return Job(sizes(target), sizes(draft, "draft"), batch, context, k, **other)


# The hardware model


@pytest.mark.parametrize("name", CARDS)
def test_the_fit_reproduces_the_public_rows(name):
    card, single = gaudi(name), rows("single")
    times = [(card.step(r.layers, r.gigabytes), r.milliseconds[name]) for r in single]
    assert len(single) == 17
    assert sum(abs(ours / public - 1) for ours, public in times) / 17 <= 0.07
    assert sum(abs(public / ours - 1) for ours, public in times) / 17 <= 0.07  # of tokens/s
    assert f"{card.error:.1%}" in card.source


def test_a_fit_without_layers_misses_the_rows():
    """Negative control: bytes alone do not explain the speeds."""
    work = [(0.0, r.gigabytes) for r in rows("single")] + [(1.0, 0.0)]
    times = [r.milliseconds["gaudi2"] for r in rows("single")] + [1.0]
    assert fit(work, times)[1] > 0.07


@pytest.mark.parametrize("name", CARDS)
def test_several_cards_are_within_a_quarter(name):
    card = gaudi(name)
    for row in rows("several"):
        ours = card.step(row.layers, row.gigabytes / row.cards, cards=row.cards)
        assert abs(ours / row.milliseconds[name] - 1) < 0.26, row.model


@pytest.mark.parametrize("name", CARDS)
def test_the_document_has_the_fitted_constants(name):
    text = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")
    column = 2 + CARDS.index(name)
    table = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    values = {row[1].strip(): row[column].strip() for row in table}
    card = gaudi(name)
    assert values["a, ms for each layer"] == f"{card.per_layer:.4f}"
    assert values["b, ms for each GB"] == f"{card.per_gb:.3f}"
    assert values["mean absolute error of the 17 step times"] == f"{100 * card.error:.1f} %"
    assert values["r, µs for each further card"] == f"{1000 * card.reduce:.1f}"


@pytest.mark.parametrize("name", CARDS)
def test_fp8_gains_what_the_public_row_gains(name):
    card, (row,) = gaudi(name), rows("fp8")
    plain = next(r for r in rows("single") if r.model == row.model)
    gain = card.step(plain.layers, plain.gigabytes) / card.step(row.layers, row.gigabytes, fp8=True)
    assert gain == pytest.approx(plain.milliseconds[name] / row.milliseconds[name], rel=1e-6)


def test_a_fit_finds_the_constants_of_exact_points_and_survives_an_outlier():
    work = [(10.0, 1.0), (20.0, 5.0), (30.0, 2.0), (15.0, 9.0), (25.0, 4.0)]
    times = [0.05 * x + 0.4 * y for x, y in work]
    times[3] *= 2
    assert fit(work, times)[0] == pytest.approx((0.05, 0.4))


# The shipped table


@functools.cache
def counted(name: str) -> dict[str, int]:
    return weights(skeleton(config_of(name)))


def test_shapes_have_the_published_number_of_parameters():
    seen: list[dict] = []
    for name, values in published().items():
        if values not in seen:  # else another name of the same shape
            seen.append(values)
            billions = counted(name)["parameters"] / 1e9
            assert billions == pytest.approx(values["parameters"], rel=0.005), name


def test_calibration_rows_have_the_bytes_of_their_models():
    for row in (*rows("single"), *rows("several")):
        read = counted(row.model)["parameters"] - counted(row.model)["table"]
        assert read * 2 / 1e9 == pytest.approx(row.gigabytes, rel=0.002), row.model
        assert config_of(row.model).num_hidden_layers == row.layers


@pytest.mark.model
@pytest.mark.parametrize("name", [zoo.FULL, zoo.DRAFT])
def test_zoo_names_are_planned_without_being_made(name, monkeypatch):
    made = zoo.resolve(name)
    monkeypatch.setattr(zoo, "resolve", lambda name: pytest.fail("weights were touched"))
    ours, real = sizes.__wrapped__(name), sizes(made)
    assert (ours.parameters, ours.kv, ours.layers) == (real.parameters, real.kv, real.layers)


# Memory


def held(runtime: Runtime) -> dict[str, int]:
    """Returns the bytes of every tensor that a loaded engine holds, by model and otherwise."""
    counted: dict[str, int] = {}
    for role, adapter in runtime.models.items():
        model, cache = adapter.model, adapter.cache
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        counted[f"{role} weights"] = sum(t.nbytes for t in tensors.values())
        counted[f"{role} cache"] = sum(t.nbytes for t in (*cache.keys, *cache.values))
    state = [v for v in vars(runtime.state).values() if isinstance(v, torch.Tensor)]
    state += [a._slot_ids for a in runtime.models.values()]
    counted["state"] = sum(t.nbytes for t in state)
    return counted


def check_memory(target, draft, names, batch, context, k):
    config = SpecConfig(num_assistant_tokens=k)
    planned = Job(sizes(names[0]), sizes(names[1], "draft"), batch, context, k, 4, config=config)
    runtime = Runtime(target, draft, config, get_device("cpu"), batch, planned.slots, k)
    parts, counted = memory.memory(planned), held(runtime)
    for name, size in counted.items():
        assert parts[name] * 1e9 == pytest.approx(size, rel=0.05), name
    total = sum(size for name, size in parts.items() if name != "workspace")
    assert total * 1e9 == pytest.approx(sum(counted.values()), rel=0.05)
    ids = torch.zeros(batch, k + 1, dtype=torch.long)
    logits = runtime.target.forward(ids, torch.arange(k + 1).expand(batch, -1))
    assert memory.verify_bytes(planned) == logits.nbytes + logits.float().nbytes


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "gpt2", "falcon-new"])
def test_memory_is_that_of_a_loaded_engine(tmp_path, family):
    target, draft = build(family), build("llama", seed=1, num_hidden_layers=1)
    names = [str(tmp_path / role) for role in ("target", "draft")]
    for model, name in zip((target, draft), names):
        model.config.save_pretrained(name)
    check_memory(target, draft, names, batch=3, context=100, k=4)


@pytest.mark.model
def test_memory_is_that_of_a_loaded_engine_with_real_models():
    from gaudi_spec.loading import Source, load_pair

    pair = load_pair(Source(zoo.FULL), Source(zoo.DRAFT), torch.float32, get_device("cpu"))
    check_memory(pair.target, pair.draft, (zoo.FULL, zoo.DRAFT), batch=2, context=1000, k=2)


def test_cards_split_the_target_and_not_the_draft():
    one, four = (memory.memory(job("Qwen/Qwen2.5-32B", cards=n)) for n in (1, 4))
    assert four["target cache"] == one["target cache"] / 4
    assert one["target weights"] / 4 < four["target weights"] < one["target weights"] / 3
    assert four["draft weights"] == one["draft weights"]
    odd = memory.cache_bytes(sizes("Qwen/Qwen2.5-7B"), 1, 64, 2, cards=8)  # 4 heads on 8 cards
    assert odd == memory.cache_bytes(sizes("Qwen/Qwen2.5-7B"), 1, 64, 2, cards=4)


def test_packed_weights_take_their_bytes():
    plain, packed = (memory.memory(job(target_quant=q))["target weights"] for q in ("none", "int4"))
    linear = sizes("Qwen/Qwen2.5-7B").linear
    assert plain - packed == pytest.approx(linear * (2 - 0.53125) / 1e9)


def test_a_shared_encoder_is_held_once():
    pair = job("openai/whisper-large-v2", "distil-whisper/distil-large-v2", context=448)
    draft = sizes("distil-whisper/distil-large-v2")
    held_weights = memory.memory(pair)["draft weights"] * 1e9
    assert held_weights == 2 * (draft.parameters - draft.encoder)


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (dict(batch=200, context=8192), {"--batch", "--context", "--cards"}),
        (dict(target="Qwen/Qwen2.5-72B"), {"--target_quant", "--cards"}),
        (dict(target="Qwen/Qwen2.5-72B", batch=9000, context=32768), set()),
    ],
)
def test_the_nearest_thing_that_fits(change, flags):
    planned, card = job(**change), gaudi("gaudi2")
    assert memory.left(planned, card) < 0
    found = dict(memory.nearest(planned, card))
    assert {flag.split()[0] for flag in found} == flags
    for flag, changed in found.items():
        assert memory.left(changed, card) >= 0
        name, value = flag.split()
        if name == "--batch":  # and one row more does not fit
            more = job(**change | dict(batch=int(value) + 1))
            assert memory.left(more, card) < 0


def test_the_nearest_batch_is_found_in_few_tries(monkeypatch):
    tries, left = [], memory.left
    monkeypatch.setattr(memory, "left", lambda *given: tries.append(given) or left(*given))
    assert dict(memory.nearest(job(batch=10**6), gaudi("gaudi2"))) and len(tries) < 100


# Speed


def test_expected_tokens_and_speedup_by_hand():
    assert leviathan.expected_tokens(0.5, 2) == 1.75
    assert leviathan.expected_tokens(1.0, 3) == 4
    flat = Hardware("x", 1000.0, per_layer=1.0, per_gb=0.0, per_tflop=0.0)
    line = speed.line(job(), flat, 2)  # 28 layers against 24
    assert (line.verify, line.cycle) == (28, 28 + 2 * 24)
    assert line.speedup[0.5] == pytest.approx(1.75 * 28 / 76)
    assert leviathan.expected_tokens(line.break_even, 2) * 28 / 76 == pytest.approx(1, abs=1e-4)
    assert speed.best([speed.line(job(), flat, k) for k in (1, 2, 3)], 0.5) is None


def test_break_even_is_never_where_a_draft_costs_too_much():
    flat = Hardware("x", 1000.0, per_layer=1.0, per_gb=0.0, per_tflop=0.0)
    same = job("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B")
    assert speed.line(same, flat, 1).break_even is None


def test_a_step_reads_weights_and_the_cache_once():
    reading = Hardware("x", 1000.0, per_layer=0.0, per_gb=1.0, per_tflop=0.0)
    target = sizes("Qwen/Qwen2.5-7B")
    want = 2 * (target.read + 3 * 2048 * target.kv) / 1e9
    assert speed.plain(job(batch=3), reading) == pytest.approx(want)
    unpacked = speed.plain(job(batch=3, target_quant="int8"), reading)
    assert unpacked - want == pytest.approx(target.linear * (1 - 2 + 4) / 1e9)
    fast = dataclasses.replace(reading, int8=dataclasses.replace(reading, per_gb=2.0))
    packed = speed.plain(job(batch=3, target_quant="int8"), fast)
    assert packed == pytest.approx(2 * (want - target.linear / 1e9)), "multiplied as they are"
    assert speed.draft_step(job(), fast) == speed.draft_step(job(), reading), "not the target's"


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "reading", functools.partial(measure.reading, size=4 << 20))
    found = measure.this_machine(get_device("cpu"), torch.float32)
    assert found.int8 is None
    packed = measure.this_machine(get_device("cpu"), torch.float32, int8=True).int8
    assert packed.per_gb > 0 and packed.per_layer >= 0 and packed.per_tflop >= 0
    assert found.per_gb > 0 and found.per_layer >= 0 and found.per_tflop >= 0
    assert found.memory > 1 and found.cards == 1
    assert "measured" in found.source and "projected" in found.label


# The command


def run(capsys, *argv):
    code = cli.main(["plan", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_line_with_figures_is_labelled(capsys):
    code, out, err = run(capsys, *PAIR, "--hardware", "gaudi3", "--batch", "2")
    assert (code, err) == (0, "")
    blocks = [block for block in out.split("\n\n") if any(c.isdigit() for c in block)]
    assert all("projected" in block for block in blocks)
    table = [line for line in out.splitlines() if line.startswith(" ")]
    others = [line for line in out.splitlines() if line not in table and "." in line]
    assert len(table) > 15
    assert all("projected" in line or line.startswith("hardware: fitted") for line in others)
    assert "measured" not in out


def test_json_holds_what_the_text_says(capsys):
    code, out, _ = run(
        capsys, *PAIR, "--hardware", "gaudi2", "--num-assistant-tokens", "2", "4", "--json"
    )
    values = json.loads(out)
    assert code == 0
    assert [row["k"] for row in values["by_k"]] == [2, 4]
    labelled = (values, values["memory"], values["step_ms"], *values["by_k"])
    assert {part["label"] for part in labelled} == {"projected"}
    assert values["memory"]["fits"] and values["memory"]["k"] == 4
    assert set(values["best_k"]) == {"0.5", "0.6", "0.7", "0.8", "0.9"}


def test_what_does_not_fit_is_said_with_what_would(capsys):
    code, out, _ = run(capsys, *PAIR, "--hardware", "gaudi2", "--batch", "300", "--context", "8192")
    assert code == 0
    assert "does not fit (projected); what would: --batch " in out


def unreachable(*_, **__):
    raise OSError("no network")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hardware", "gaudi2"], ["--model"]),
        (PAIR, ["--hardware"]),
        ([*PAIR, "--hardware", "gaudi4"], ["gaudi4"]),
        ([*PAIR, "--hardware", "gaudi2", "--batch", "0"], ["batch", "0"]),
        ([*PAIR, "--hardware", "gaudi2", "--cards", "-1"], ["cards", "-1"]),
        ([*PAIR, "--hardware", "gaudi2", "--batch", "9" * 20], ["batch", "1000000"]),
        ([*PAIR, "--hardware", "gaudi2", "--cards", "9"], ["cards", "8"]),
        ([*PAIR, "--hardware", "gaudi2", "--context", "40000"], ["context", "32768"]),
        ([*PAIR, "--hardware", "gaudi2", "--num_assistant_tokens", "99"], ["32"]),
        ([*PAIR, "--hardware", "gaudi2", "--target_quant", "int3"], ["int3"]),
        ([*PAIR, "--hardware", "this", "--cards", "2"], ["cards"]),
        ([*PAIR, "--hardware", "this", "--draft_quant", "int4"], ["int4"]),
        ([*PAIR, "--hardware", "gaudi2", "--update"], ["--config"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--model", "Qwen/Qwen2.5-7", *PAIR[2:], "--hardware", "gaudi2"], ["Qwen2.5-7B"]),
    ],
    ids=lambda value: " ".join(value)[-40:],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(capsys, monkeypatch, argv, words):
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert "Traceback" not in err and all(word in err for word in words)


def test_a_model_that_cannot_be_served_is_refused_by_name(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    code, _, err = run(capsys, "--model", str(tmp_path), *PAIR[2:], "--hardware", "gaudi2")
    assert code == 2 and "mamba" in err


def test_fits_are_computed_once():
    assert hardware.gaudi("gaudi2") is hardware.gaudi("gaudi2")
