"""What a first-time user runs into: models changed between calls, odd arguments, lost output."""

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tiny_checkpoints
import torch
import toys
from torch import nn

import gaudi_spec
from gaudi_spec import SpecConfig, SpeculativeEngine, cli, results, run_generation
from gaudi_spec.errors import ConfigError, InputError


def change_head(model):
    model.lm_head = nn.Linear(32, toys.VOCAB, bias=False)


def change_activation(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def change_attribute(model):
    model.model.layers[0].self_attn.scaling = 3.0


def change_forward(model):
    original = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: -3 * original(x)


def change_weights(model):
    model.lm_head.weight.data.mul_(-1)


def change_dtype(model):
    model.double()


@pytest.mark.parametrize(
    "change",
    [
        change_head,
        change_activation,
        change_attribute,
        change_forward,
        change_weights,
        change_dtype,
    ],
)
def test_a_model_changed_between_calls_is_run_as_it_is_now(change):
    """By a kept engine and by the function."""
    model = copy.deepcopy(toys.target())
    engine = SpeculativeEngine(model, model)
    ids, mask = toys.left_pad(toys.PROMPTS)
    before = gaudi_spec.generate(model, ids, attention_mask=mask, max_new_tokens=20)
    engine.generate(toys.PROMPTS, 20)
    torch.manual_seed(0)
    change(model)
    want = [toys.greedy(model, prompt, 20) for prompt in toys.PROMPTS]
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 20), want)
    after = gaudi_spec.generate(model, ids, attention_mask=mask, max_new_tokens=20)
    toys.assert_equal_rows(list(after[:, ids.shape[1] :]), want)
    assert not torch.equal(before, after) or change is change_dtype


def test_buffers_are_kept_while_a_model_stays_as_it_is():
    engine = SpeculativeEngine(toys.target(), toys.target())
    engine.generate(toys.PROMPTS, 5)
    runtime = engine.runtime
    engine.generate(toys.PROMPTS, 5)
    assert engine.runtime is runtime


def test_a_refused_call_leaves_an_open_stream_alone():
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"])
    stream = engine.cycles(toys.PROMPTS[:1], 20)
    text = list(next(stream)[0].tokens)
    with pytest.raises(InputError):
        engine.generate([[]], 3)
    text += [token for outcome in stream for token in outcome[0].tokens]
    assert text == toys.references()[0][:20].tolist()


def test_a_broken_embedding_of_a_token_that_is_not_there_does_not_matter():
    """Fillers behind a prompt are tokens of the row's own."""
    model = copy.deepcopy(toys.target())
    model.model.embed_tokens.weight.data[0] = float("nan")
    rows = [r for r in range(5) if 0 not in toys.references()[r]]
    got = SpeculativeEngine(model).generate([toys.PROMPTS[r] for r in rows], toys.NEW)
    toys.assert_equal_rows(got, [toys.references()[r] for r in rows])
    assert len(rows) > 1


@pytest.mark.parametrize("ends", [7, [7], (7,), {7}, np.array([7]), torch.tensor([7]), np.int64(7)])
def test_end_tokens_come_in_any_form(ends):
    token = int(toys.references()[2][5])
    ends = type(ends)([token]) if isinstance(ends, (list, tuple, set)) else ends - 7 + token
    engine = SpeculativeEngine(toys.target(), toys.target())
    assert len(engine.generate(toys.PROMPTS[2:3], 40, eos_token_ids=ends)[0]) <= 6
    ids = toys.PROMPTS[2][None]
    got = gaudi_spec.generate(toys.target(), ids, eos_token_id=ends, max_new_tokens=40)
    assert got.shape[1] <= ids.shape[1] + 6


@pytest.mark.parametrize("ends", [3.7, "a", [2**70], [[3]], [None]])
def test_odd_end_tokens_are_refused(ends):
    with pytest.raises(InputError, match="whole number"):
        SpeculativeEngine(toys.target()).generate(toys.PROMPTS, 4, eos_token_ids=ends)


@pytest.mark.parametrize(
    "arguments",
    [
        {"assistant_model": "gpt2"},
        {"generation_config": {"max_new_tokens": 3}},
        {"spec_config": {}},
        {"spec_config": {"batch_size": 1}},
        {"max_new_tokens": "5"},
        {"watermarking_config": {"a": 1}},
        {"inputs": torch.ones(2, 2, dtype=torch.long)},
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_in_one_sentence(arguments):
    with pytest.raises(ConfigError) as error:
        gaudi_spec.generate(toys.target(), toys.PROMPTS[3][None], **arguments)
    assert "\n" not in str(error.value)


def test_prompts_may_come_from_a_generator():
    engine = SpeculativeEngine(toys.target(), toys.target())
    got = engine.generate((prompt for prompt in toys.PROMPTS), 9)
    toys.assert_equal_rows(got, [text[:9] for text in toys.references()])
    with pytest.raises(InputError, match="list of rows"):
        engine.generate(None, 9)


def test_more_end_tokens_than_there_was_room_for_end_a_captured_row():
    config = SpecConfig(num_assistant_tokens=3, prefill_chunks=(16,))
    engine = SpeculativeEngine(toys.target(), toys.target(), config, "hpu-emulated")
    ends = toys.references()[2][5:30].tolist()
    for ids in ([], ends[:1], ends):
        got = engine.generate(toys.PROMPTS[2:3], 40, eos_token_ids=ids)[0].tolist()
        want = toys.references()[2].tolist()
        stop = next((i + 1 for i, token in enumerate(want) if token in ids), 40)
        assert got == want[:stop]


def test_only_flags_are_spelt_with_underscores():
    assert cli._underscores("--max-new-tokens=3-4") == "--max_new_tokens=3-4"
    for prompt in ("-- select a well-known value", "--", "--a b-c", "well-known", "---x-y"):
        assert cli._underscores(prompt) == prompt


@pytest.fixture
def arguments(tmp_path):
    target, draft = tiny_checkpoints.make(tmp_path)
    common = ["--warmup", "0", "--n_iterations", "1", "--max_new_tokens", "8", "-q"]
    names = ["--model_name_or_path", str(target), "--assistant_model", str(draft)]
    return [*names, *common, "--output_dir", str(tmp_path / "out")]


def test_results_are_written_before_anything_can_fail_to_print(arguments, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_generation, "_print", fail)
    assert cli.run_command(run_generation.main, arguments) == 1
    assert json.loads((tmp_path / "out" / "results.json").read_text())["emitted_tokens"] == 8


def test_a_directory_that_cannot_be_written_is_found_before_the_work(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(results.tempfile, "TemporaryFile", fail)
    with pytest.raises(ConfigError, match="Permission denied"):
        results.check_output_dir(str(tmp_path))


def test_an_emulated_run_says_so_in_its_first_line(arguments, capsys):
    assert cli.run_command(run_generation.main, [*arguments, "--device", "hpu-emulated"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "EMULATED HPU (not a measurement)" in lines[0]
    assert json.loads(lines[-1])["environment"]["device"] == "hpu-emulated"


def test_a_closed_pipe_ends_quietly(arguments):
    command = [sys.executable, "-m", "gaudi_spec", "generate", *arguments]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and "Broken pipe" not in done.stderr
    assert "Traceback" not in done.stderr
