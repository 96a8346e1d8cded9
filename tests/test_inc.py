"""FP8 with Intel Neural Compressor: the calls, the order on a card, and the flow where it runs."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import json
from pathlib import Path

import inc_api
import pytest
import tiny_checkpoints
import torch
import toys

from gaudi_spec import ConfigError, SpecConfig, SpeculativeEngine
from gaudi_spec.cli import main
from gaudi_spec.device.base import Device
from gaudi_spec.device.cpu import CpuDevice
from gaudi_spec.device.hpu import HpuDevice
from gaudi_spec.loading import Source, load_pair
from gaudi_spec.quant import inc
from gaudi_spec.quant.kv import KVCache, add_kv_modules, kv_modules

SOURCE = Path(inc.__file__).read_text(encoding="utf-8")
needs_inc = pytest.mark.skipif(
    importlib.util.find_spec("neural_compressor") is None,
    reason="neural-compressor-pt is not installed",
)


def calls(source):
    """Returns (dotted name, call) of everything that is called on `_inc()`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and "_inc()." in ast.unparse(node.func):
            found.append((ast.unparse(node.func).removeprefix("_inc()."), node))
    return found


def faults(source):
    """Returns what the table does not have."""
    found = []
    for name, node in calls(source):
        space: dict = {}
        exec(f"def call({inc_api.API.get(name, '')}): pass", space)
        words = {keyword.arg: 0 for keyword in node.keywords if keyword.arg}
        try:
            inspect.signature(space["call"]).bind(*node.args, **words)
            found += [] if name in inc_api.API else [name]
        except TypeError as error:
            found.append(f"{name}: {error}")
    return found


def test_every_call_is_public_with_arguments_it_has():
    assert {name for name, _ in calls(SOURCE)} == set(inc_api.API)
    assert faults(SOURCE) == []
    assert faults(SOURCE.replace("_inc().convert(", "_inc().transmute(")) != []
    assert faults(SOURCE.replace("finalize_calibration(model)", "finalize_calibration()")) != []


def test_settings_use_known_keys_and_methods():
    for qdq in (True, False):
        values = inc.settings("QUANTIZE", Path("d"), "maxabs_hw", ["lm_head"], qdq)
        assert set(values) <= set(inc_api.KEYS)
    assert {*inc.SCALE_METHODS.values(), inc.CPU_SCALE_METHOD} <= set(inc_api.SCALE_METHODS)
    assert set(inc.SCALE_METHODS) == {"gaudi2", "gaudi3"}


@needs_inc
def test_the_table_is_what_is_installed():
    module = inc._inc()
    for name, signature in inc_api.API.items():
        found = module
        for part in name.split("."):
            found = getattr(found, part)
        names = [p.split("=")[0].strip(" *") for p in signature.split(", ")]
        actual = list(inspect.signature(inspect.unwrap(found)).parameters)
        assert actual in (names, ["args", "kwargs"]), (name, actual)  # some are wrapped


class Order(Device):
    """Notes what it is told, and when the model is moved."""

    name = "hpu"

    def __init__(self, notes):
        self.notes = notes

    @property
    def torch_device(self):
        self.notes.append("move")
        return torch.device("cpu")

    def before_quantized(self):
        self.notes.append("inference mode")

    def after_quantized(self, model):
        self.notes.append("scales are constants")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


def test_the_calls_come_in_the_order_a_card_needs(checkpoints, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(inc, "convert", lambda m, path: notes.append(f"convert {path}") or m)
    target, draft = (Source(str(path)) for path in checkpoints)
    load_pair(target, draft, torch.float32, Order(notes), quant_configs={"draft": "d.json"})
    assert notes == ["inference mode", "move", "convert d.json", "move", "scales are constants"]
    notes.clear()
    load_pair(target, draft, torch.float32, Order(notes), quant_configs={"target": "t.json"})
    assert notes == ["inference mode", "convert t.json", "move", "scales are constants", "move"]
    notes.clear()
    load_pair(target, draft, torch.float32, Order(notes))
    assert notes == ["move", "move"]


def test_the_card_is_told_with_intels_own_calls():
    told = []

    class Core:
        def hpu_set_env(self, model=None):
            told.append("env")

        def hpu_initialize(self, model, mark_only_scales_as_const=False, optimizer=None, args=None):
            told.append((model, mark_only_scales_as_const))

    device = object.__new__(HpuDevice)
    device._core = Core()
    device.before_quantized()
    device.after_quantized("model")
    assert told == ["env", ("model", True)]


@pytest.mark.parametrize(("quantized", "loaded"), [("target", True), ("draft", True)])
def test_int4_checkpoints_of_one_model_go_through_neural_compressor(
    checkpoints, monkeypatch, tmp_path, quantized, loaded
):
    """H2: a GPTQ target with an unquantized draft, and the reverse."""
    paths = dict(zip(("target", "draft"), checkpoints))
    path = tiny_checkpoints.save(tmp_path / "gptq", toys.target())
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (path / "config.json").write_text(json.dumps(config))
    paths[quantized] = path
    seen = []

    def load(name, device, **arguments):
        seen.append((name, device))
        return copy.deepcopy(toys.target())

    monkeypatch.setattr(inc, "load", load)
    notes: list[str] = []
    pair = load_pair(
        Source(str(paths["target"])), Source(str(paths["draft"])), torch.float32, Order(notes)
    )
    assert seen == [(str(path), "hpu")]
    assert type(pair.target) is type(pair.draft)
    assert notes.count("inference mode") == notes.count("scales are constants") == 1


@pytest.fixture
def run(checkpoints, capsys):
    def call(*args, draft=True):
        models = ["--model_name_or_path", str(checkpoints[0])]
        models += ["--assistant_model", str(checkpoints[1])] if draft else []
        fast = ["-q", "--warmup", "0", "--n_iterations", "1", "--max_new_tokens", "8"]
        code = main(["generate", *models, *fast, "--prompt", tiny_checkpoints.words(9, 8), *args])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("args", "draft", "message"),
    [
        (["--draft_quant_config", "q"], False, "--draft_quant_config needs a draft model"),
        (["--target_quant_config", "q", "--target_quant", "int8"], True, "exclude each other"),
        (["--draft_quant_config", "q", "--draft_quant", "fp8"], True, "exclude each other"),
        (["--draft_quant_config", "q", "--device", "hpu-emulated"], True, "not on hpu-emulated"),
        (["--target_quant_config", "nowhere"], True, "Cannot read --target_quant_config nowhere"),
        (["--target_quant_config", "{m}"], True, "measures: use it with `gaudi-spec quantize"),
        (["--target_quant_config", "{bad}"], True, "is not a Neural Compressor configuration"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(run, tmp_path, args, draft, message):
    (tmp_path / "m").write_text(json.dumps({"mode": "MEASURE"}))
    (tmp_path / "bad").write_text("[]")
    args = [a.format(m=tmp_path / "m", bad=tmp_path / "bad") for a in args]
    code, _, err = run(*args, draft=draft)
    assert code == 2 and message in err


def test_quant_config_is_the_targets(run, monkeypatch):
    monkeypatch.setenv("QUANT_CONFIG", "/nowhere.json")
    code, _, err = run()
    assert code == 2 and "--target_quant_config /nowhere.json" in err


def test_converting_needs_measurements(checkpoints, capsys, tmp_path):
    args = ["--model", str(checkpoints[0]), "-o", str(tmp_path), "--device", "cpu"]
    assert main(["quantize", "convert", *args]) == 2
    assert "has no measurements: run `gaudi-spec quantize measure`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "args", "message"),
    [
        ("measure", ["--exclude", "("], "--exclude takes regular expressions; '(' is none"),
        ("convert", ["--exclude", "lm_head", "*"], "'*' is none"),
        ("measure", ["--max_new_tokens", "0"], "--max_new_tokens must be at least 1"),
        ("measure", ["--prompts", "/nowhere"], "Cannot read /nowhere"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(tmp_path, capsys, step, args, message):
    place = ["--model", str(tmp_path / "no model"), "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["quantize", step, *place, *args]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("neural_compressor") is not None, reason="it is installed"
)
def test_a_missing_library_is_named(checkpoints, capsys, tmp_path):
    args = ["--model", str(checkpoints[0]), "-o", str(tmp_path), "--device", "cpu"]
    assert main(["quantize", "measure", *args]) == 2
    err = capsys.readouterr().err
    assert "pip install neural-compressor-pt" in err and "cannot use" not in err


class Halving(KVCache):
    """Does to a cache on the CPU what Neural Compressor's module does on a card, in float16."""

    def allocate(self, inp_seq_len, dtype, device, shape):
        return super().allocate(inp_seq_len, torch.float16, device, shape)

    def update(self, prev, cur, dim, idx, inp_seq_len):
        return super().update(prev, cur.half(), dim, idx, inp_seq_len).to(cur.dtype)


def test_a_converted_cache_goes_through_the_modules_of_neural_compressor():
    """Which finds ours by the names of class and methods, in every attention layer."""
    draft = add_kv_modules(copy.deepcopy(toys.target()))
    assert kv_modules(draft) == []  # not replaced yet: what is stored is ours to say
    names = {name for name, module in draft.named_modules() if type(module).__name__ == "KVCache"}
    want = {f"model.layers.{i}.self_attn.{c}_cache" for i in range(2) for c in "kv"}
    assert names == want
    for layer in draft.model.layers:
        layer.self_attn.k_cache, layer.self_attn.v_cache = Halving(), Halving()
    running = SpeculativeEngine(toys.target(), draft, SpecConfig(num_assistant_tokens=3))
    got = running.generate(toys.PROMPTS, 24)
    toys.assert_equal_rows(got, [text[:24] for text in toys.references()])
    held = running.facts()
    assert held["draft"]["kv_cache"]["scheme"] == "Neural Compressor float16"
    assert held["draft"]["kv_cache"]["bits"] == 16
    assert held["target"]["kv_cache"]["scheme"] == "float32"
    assert running.report.acceptance_rate > 0.9
    with pytest.raises(
        ConfigError, match="draft was converted by Neural Compressor, which decides"
    ):
        SpeculativeEngine(toys.target(), draft, SpecConfig(draft_kv_dtype="int8"))


@needs_inc
def test_measure_convert_and_generate(checkpoints, capsys, tmp_path, run):
    """The whole flow in Neural Compressor's own quantize-and-dequantize mode, for each model."""
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(tiny_checkpoints.words(*p.tolist()) for p in toys.PROMPTS))
    for role, path in zip(("target", "draft"), checkpoints):
        common = ["--model", str(path), "-o", str(tmp_path / role), "--device", "cpu", "-q"]
        assert main(["quantize", "measure", *common, "--prompts", str(prompts)]) == 0
        assert main(["quantize", "convert", *common]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        schemes = {p["part"]: p["scheme"] for p in found["model"]["weights"]}
        assert "float8_e4m3fn" in schemes["linear"] and schemes["head"] == "bfloat16"
    for role in ("target", "draft"):
        config = str(tmp_path / role / "quantize.json")
        code, out, err = run(f"--{role}_quant_config", config, "--bf16", "--compare_baseline")
        assert code == 0, err
        held = json.loads(out.splitlines()[-1])["models"]
        for each, values in held.items():
            linear = next(p["scheme"] for p in values["weights"] if p["part"] == "linear")
            assert ("float8" in linear) == (each == role)
        assert "NOT a near-tie" not in out


@needs_inc
@pytest.mark.parametrize("quantized", ["target", "draft"])
def test_a_gptq_checkpoint_works_as_either_model(checkpoints, run, tmp_path, quantized):
    """H2: on the CPU too, and the weights are those that the checkpoint stands for."""
    path, exact = tiny_checkpoints.save_gptq(tmp_path / "gptq", toys.target())
    paths = dict(zip(("target", "draft"), checkpoints)) | {quantized: path}
    sources = [Source(str(paths[role])) for role in ("target", "draft")]
    pair = load_pair(*sources, torch.float32, CpuDevice())
    twin = copy.deepcopy(toys.target())
    twin.load_state_dict(twin.state_dict() | exact)
    prompts = toys.PROMPTS
    running = SpeculativeEngine(pair.target, pair.draft, SpecConfig(num_assistant_tokens=3))
    got = running.generate(prompts, 24)
    if quantized == "draft":
        toys.assert_equal_rows(got, [text[:24] for text in toys.references()])
    else:
        toys.assert_equal_rows(got, SpeculativeEngine(pair.target).generate(prompts, 24))
        logits = [model(prompts[4][None]).logits for model in (pair.target, twin)]
        assert torch.allclose(*logits, atol=2e-2 * float(logits[1].abs().max()))
    linear = {r: v["weights"][0]["scheme"] for r, v in running.facts().items()}
    assert ("INCWeightOnlyLinear" in linear[quantized]) and len(set(linear.values())) == 2
    flags = {"target": "--model_name_or_path", "draft": "--assistant_model"}
    code, _, err = run(flags[quantized], str(path), f"--{quantized}_quant", "int8")
    assert code == 2 and "quantized already (gptq)" in err


@needs_inc
def test_a_converted_model_is_served_like_any_other(checkpoints, tmp_path):
    """With a draft it writes what it writes alone."""
    common = ["--model", str(checkpoints[0]), "-o", str(tmp_path), "--device", "cpu", "-q"]
    assert main(["quantize", "measure", *common]) == 0
    assert main(["quantize", "convert", *common]) == 0
    model = load_pair(
        Source(str(checkpoints[0])),
        None,
        torch.bfloat16,
        Device(),
        quant_configs={"target": str(tmp_path / "quantize.json")},
    ).target
    alone = SpeculativeEngine(model).generate(toys.PROMPTS, 24)
    running = SpeculativeEngine(model, toys.drafts()["noisy"], SpecConfig(num_assistant_tokens=3))
    toys.assert_equal_rows(running.generate(toys.PROMPTS, 24), alone)
