"""`gaudi-spec quality`: its figures, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import tiny_checkpoints
import torch
import toys

from gaudi_spec.cli import main
from gaudi_spec.config import SpecConfig
from gaudi_spec.device.cpu import CpuDevice
from gaudi_spec.quality import measure


@pytest.fixture(scope="module")
def text():
    """Ids of a text that the target partly agrees with."""
    return torch.cat([*toys.PROMPTS, *toys.references()])[:150]


def run(ids, draft=None, window=64, **settings):
    models = (toys.target(), toys.target(), draft)
    return measure(models, SpecConfig(**settings), CpuDevice(), ids, window)


@torch.no_grad()
def plain(ids, window=64):
    """Returns perplexity and best tokens of the plain model, window by window."""
    losses, best = [], []
    for piece in ids.split(window):
        logits = toys.target()(piece[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
        best.append(logits.argmax(-1))
    return math.exp(torch.cat(losses).mean()), torch.cat(best)


def test_the_unquantized_target_agrees_with_itself(text):
    found = run(text, toys.drafts()["self"])
    perplexity, best = plain(text)
    assert found["tokens"] == len(best)
    assert found["perplexity"]["unquantized"] == pytest.approx(perplexity, rel=1e-3)
    assert found["perplexity"]["quantized"] == found["perplexity"]["unquantized"]
    assert found["agreement"] == 1
    assert found["acceptance"] == {"unquantized": 1, "quantized": 1}


def test_coarser_schemes_agree_less(text):
    agreement = [run(text, target_quant=scheme)["agreement"] for scheme in ("int8wo", "int4wo")]
    assert 1 > agreement[0] > 0.8 > agreement[1] > 0.2


def test_a_quantized_cache_is_in_the_figures(text):
    found = run(text, target_kv_dtype="fp8")
    assert found["agreement"] < 1
    assert found["models"]["target"]["kv_cache"]["scheme"] == "fp8"


def test_a_drafts_acceptance_is_given_for_both_targets(text):
    found = run(text, toys.drafts()["self"], target_quant="int4wo", draft_quant="int8")
    assert found["acceptance"]["unquantized"] > found["acceptance"]["quantized"] > 0.2
    assert found["models"]["draft"]["weights"][0]["scheme"] in ("int8", "float32")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


def test_the_command_prints_json_last(checkpoints, capsys, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(tiny_checkpoints.words(*toys.references()[3].tolist()))
    pair = ["--model", str(checkpoints[0]), "--assistant_model", str(checkpoints[1])]
    code = main(["quality", *pair, "--target-quant", "int8", "--text", str(file), "-q"])
    out = capsys.readouterr().out
    assert code == 0
    assert json.loads(out.splitlines()[-1])["tokens"] == 39
    assert "Perplexity, quantized" in out and "Target linear" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--text", "/nowhere/at/all"], "Cannot read /nowhere/at/all"),
        (["--window", "257", "--max_tokens", "400"], "--window must be at most 256"),
        (["--target_quant_exclude", "x"], "give target_quant too"),
        (["--window", "1"], "--window and --max_tokens must be at least 2"),
        (["--draft_quant", "int8"], "need a draft model"),
        (["--draft_quant_config", "x.json"], "--draft_quant_config needs a draft model"),
        (["--target_quant_config", "x.json"], "Cannot read --target_quant_config x.json"),
    ],
)
def test_bad_input_gets_one_sentence(checkpoints, capsys, args, message):
    assert main(["quality", "--model", str(checkpoints[0]), "-q", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.model
def test_the_built_in_text_is_read(capsys):
    code = main(["quality", "--model", "smollm2-135m-instruct", "--max_tokens", "96", "-q"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and found["perplexity"]["unquantized"] < 40 and found["agreement"] == 1
