"""The `gaudi-spec` command: its text, its figures, its files, and what it says when it fails."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
import toys
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import gaudi_spec
from gaudi_spec import audit, chat, config, device, flags, results
from gaudi_spec.cli import main
from gaudi_spec.distill import command as distill

ROOT = Path(__file__).parents[1]
ONE = [20, 30, 40]
TWO = [9, 8, 55, 44, 21]
FIRST, SECOND = tiny_checkpoints.words(*ONE), tiny_checkpoints.words(*TWO)
NEW = 14
FAST = ["-q", "--warmup", "0", "--n_iterations", "1", "--max_new_tokens", str(NEW)]
LABELS = [
    "Throughput (including tokenization) = ",
    "Average first token latency         = ",
    "Average rest token latency          = ",
    "Average end to end latency          = ",
    "Graph compilation duration          = ",
]
UPSTREAM_KEYS = ["throughput", "avg_first_token_latency", "avg_rest_token_latency"]
UPSTREAM_KEYS += ["avg_e2e_latency", "input", "output"]
KEYS = """schema_version drafter batch_size schedule schedule_reason k_trace step_seconds
cycles host_reads proposed accepted emitted_tokens target_tokens
acceptance_rate mean_acceptance_length acceptance_by_position finish_reasons target_forwards
reused_tokens target_prefill_forwards draft_forwards seconds first_token_seconds target_shapes
draft_shapes graphs models environment texts_equal_baseline warmup_iterations""".split()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The directories of a target and its draft."""
    return tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def command(checkpoints, capsys):
    """Runs `gaudi-spec generate` with target, draft and `args`; returns (code, stdout, stderr)."""

    def run(*args, target=checkpoints[0], draft=checkpoints[1], fast=FAST):
        models = ["--model_name_or_path", str(target)]
        models += ["--assistant_model", str(draft)] if draft else []
        code = main(["generate", *models, *fast, *map(str, args)])
        return code, *capsys.readouterr()

    return run


def last(out):
    return json.loads(out.rstrip("\n").splitlines()[-1])


def text_of(prompt, new=NEW, eos=None, model=None, **changes):
    """Returns the text that `model.generate` continues `prompt` (a list of ids) with."""
    model = model or toys.target()
    ids = torch.tensor([prompt])
    options = dict(do_sample=False, max_new_tokens=new, eos_token_id=eos, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **changes)
    new_ids = out[0, len(prompt) :]
    return tiny_checkpoints.word_tokenizer().decode(new_ids, skip_special_tokens=True)


# Streaming and stopping


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """Target and draft whose texts have characters of several tokens; the text after "abc"."""
    root = tmp_path_factory.mktemp("bytewise")
    tokenizer = tiny_checkpoints.byte_tokenizer([])
    prompt = tokenizer("abc", return_tensors="pt")["input_ids"][0]
    text = toys.greedy(toys.target(), prompt, 24).tolist()
    models = toys.target(), toys.drafts()["noisy"]
    paths = [
        tiny_checkpoints.save(root / name, model, tokenizer)
        for name, model in zip(("target", "draft"), models)
    ]
    return paths, tokenizer, text


def test_stop_strings_end_the_text_and_the_baseline(command, bytewise):
    (target, draft), tokenizer, text = bytewise
    stop = tokenizer.decode(text[5:7])
    end = next(i for i in range(1, 24) if stop in tokenizer.decode(text[:i]))
    args = ["--prompt", "abc", "--max_new_tokens", 24, "--stop", "never", stop]
    code, out, _ = command(*args, "--compare_baseline", target=target, draft=draft)
    values = last(out)
    assert code == 0 and values["texts_equal_baseline"]
    assert values["output"] == [[tokenizer.decode(text[:end])]] and end < 24
    assert values["finish_reasons"] == ["stop_string"] and values["emitted_tokens"] == end


def test_stream_prints_the_text_before_the_statistics(command, bytewise):
    (target, draft), tokenizer, text = bytewise
    args = ["--prompt", "abc", "--max_new_tokens", 24, "--stream"]
    code, out, err = command(*args, target=target, draft=draft)
    whole = tokenizer.decode(text, skip_special_tokens=True)
    assert code == 0 and out.startswith(whole + "\n") and last(out)["output"] == [[whole]]
    assert "generate" not in err
    code, _, err = command(*args, "--batch_size", 2, target=target, draft=draft)
    assert code == 2
    assert_one_sentence(err, "--stream", "one prompt")


def test_several_greedy_texts_of_a_prompt_are_refused(command):
    code, _, err = command("--prompt", "w9", "--num_return_sequences", 2)
    assert code == 2
    assert_one_sentence(err, "num_return_sequences")


# Results


@pytest.mark.parametrize("drafted", [True, False])
def test_the_text_is_the_targets_own(command, drafted):
    options = {} if drafted else {"draft": None}
    code, out, _ = command("--prompt", FIRST, SECOND, **options)
    assert code == 0
    assert last(out)["output"] == [[text_of(ONE)], [text_of(TWO)]]
    assert f"input 1: ({FIRST!r},)" in out and f"output 2.1: ({text_of(TWO)!r},)" in out


def test_the_last_line_is_json_with_the_documented_keys(command):
    values = last(command("--prompt", FIRST, SECOND)[1])
    assert list(values)[: len(UPSTREAM_KEYS)] == UPSTREAM_KEYS
    assert set(values) == {*UPSTREAM_KEYS, *KEYS}
    assert values["input"] == [FIRST, SECOND]
    assert values["emitted_tokens"] == 2 * NEW and values["finish_reasons"] == ["length"] * 2
    assert values["accepted"] + values["target_tokens"] == values["emitted_tokens"]
    assert values["texts_equal_baseline"] is None
    assert values["environment"]["gaudi_spec"] == gaudi_spec.__version__
    for key in UPSTREAM_KEYS[:4]:
        assert values[key] > 0


def test_without_a_draft_no_acceptance_is_claimed(command):
    code, out, _ = command("--prompt", FIRST, draft=None)
    values = last(out)
    assert code == 0 and values["acceptance_rate"] is None and values["proposed"] == 0
    assert "n/a (no draft)" in out and "drafter none" in out and values["drafter"] is None


@pytest.mark.parametrize("drafted", [True, False])
def test_prompt_lookup_drafts_with_and_without_a_model(command, drafted):
    """The text stays the target's own, and what was counted says what drafted."""
    flags = ["--prompt_lookup_num_tokens", 3, "--max_matching_ngram_size", 3, "--compare_baseline"]
    flags += ["--warmup", 1]  # in which the first times are measured
    prompt = tiny_checkpoints.words(*TWO, *TWO)
    code, out, _ = command("--prompt", prompt, *flags, **({} if drafted else {"draft": None}))
    name, values = "combined" if drafted else "ngram", last(out)
    assert code == 0 and values["output"] == [[text_of(TWO + TWO)]]
    assert f"drafter {name}, K up to 3 (auto)" in out and values["drafter"] == name
    assert values["schedule"] == "auto" and (values["draft_forwards"] == 0 or drafted)
    assert values["texts_equal_baseline"] is True and values["speedup"] > 0


def test_a_look_up_that_finds_nothing_is_not_called_no_draft(command):
    flags = ["--prompt_lookup_num_tokens", 3, "--max_new_tokens", 2]
    code, out, _ = command("--prompt", FIRST, *flags, draft=None)
    assert code == 0 and "n/a (nothing was proposed)" in out


def test_the_results_file_holds_the_same_values(command, tmp_path):
    code, out, _ = command("--prompt", FIRST, "--output_dir", tmp_path / "a" / "b")
    written = tmp_path / "a" / "b" / "results.json"
    assert code == 0 and json.loads(written.read_text(encoding="utf-8")) == last(out)
    assert os.listdir(written.parent) == ["results.json"]


def test_a_second_run_replaces_the_results(command, tmp_path):
    (tmp_path / "results.json").write_text("old")
    _, out, _ = command("--prompt", FIRST, "--output_dir", tmp_path)
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == last(out)


def test_results_survive_a_write_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.write_json(path, {"a": 1})
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["results.json"]


def test_results_survive_a_run_that_fails(command, tmp_path, damaged):
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "results.json").write_text("old")
    code, *_ = command("--prompt", FIRST, "--output_dir", directory, target=damaged("nan"))
    assert code == 1
    assert (directory / "results.json").read_text() == "old"
    assert os.listdir(directory) == ["results.json"]


def test_the_statistics_keep_optimum_habanas_labels_word_for_word(command):
    _, out, _ = command("--prompt", FIRST)
    lines = out.splitlines()
    found = [next(i for i, line in enumerate(lines) if line.startswith(s)) for s in LABELS]
    assert found == sorted(found)
    units = [" tokens/second", " ms", " ms", " ms", " seconds"]
    for at, label, unit in zip(found, LABELS, units):
        assert lines[at].endswith(unit)
        assert float(lines[at].removeprefix(label).removesuffix(unit)) >= 0
    assert "Stats:" in lines and "Input tokens" in lines and "Input/outputs:" in lines
    values = last(out)
    assert lines[found[0]] == f"{LABELS[0]}{values['throughput']} tokens/second"
    assert lines[found[3]] == f"{LABELS[3]}{values['avg_e2e_latency'] * 1000} ms"


def test_compare_baseline_gives_the_speed_up_and_says_identical(command):
    code, out, _ = command("--prompt", FIRST, SECOND, "--compare_baseline")
    values = last(out)
    assert code == 0 and values["texts_equal_baseline"] is True
    assert values["speedup"] > 0 and values["baseline_throughput"] > 0
    assert "Text 1 against plain decoding       = identical" in out
    assert "Text 2 against plain decoding       = identical" in out
    assert f"Speed-up over plain decoding        = {values['speedup']:.2f}x" in out


def test_the_warm_up_is_not_counted(command):
    flags = ["--prompt", FIRST, "--num_assistant_tokens", 5]
    values = [last(command(*flags, "--warmup", n)[1]) for n in (0, 2)]
    for key in ("cycles", "proposed", "accepted", "emitted_tokens", "draft_forwards"):
        assert values[0][key] == values[1][key]


# Options


@pytest.mark.parametrize(
    ("size", "want"), [(1, [ONE]), (2, [ONE, TWO]), (3, [ONE, TWO, ONE]), (None, [ONE, TWO])]
)
def test_prompts_are_repeated_or_cut_to_the_batch_size(command, size, want):
    args = [] if size is None else ["--batch_size", size]
    code, out, err = command("--prompt", FIRST, SECOND, *args)
    assert code == 0
    assert last(out)["input"] == [tiny_checkpoints.words(*ids) for ids in want]
    assert last(out)["output"] == [[text_of(ids)] for ids in want]
    assert ("first 1 of 2 prompts" in err) == (size == 1)


@pytest.mark.parametrize("size", [None, 3])
def test_without_a_prompt_built_in_ones_are_used(command, size):
    code, out, _ = command(*(["--batch_size", size] if size else []))
    assert code == 0 and len(last(out)["output"]) == (size or 1)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_prompts_are_cut_to_max_input_tokens(command, most):
    _, out, _ = command("--prompt", FIRST, SECOND, "--max_input_tokens", most)
    assert last(out)["output"] == [[text_of(ONE[:most])], [text_of(TWO[:most])]]


EOS_PROMPT = toys.PROMPTS[3].tolist()


@pytest.mark.parametrize(
    ("flags", "stops"),
    [
        ([], False),
        (["--ignore_eos"], False),
        (["--ignore-eos"], False),
        (["--no-ignore_eos"], True),
        (["--no-ignore-eos"], True),
        (["--no_ignore_eos"], True),
    ],
    ids=str,
)
def test_the_end_of_text_is_ignored_unless_asked_for(command, checkpoints, flags, stops):
    text = toys.references()[3].tolist()
    eos = text[5]
    target = tiny_checkpoints.save(checkpoints[0].parent / "eos", toys.target(), eos=[2, eos])
    prompt = tiny_checkpoints.words(*EOS_PROMPT)
    code, out, _ = command("--prompt", prompt, *flags, target=target)
    values = last(out)
    assert code == 0
    assert values["output"] == [[text_of(EOS_PROMPT, eos=eos if stops else None)]]
    assert values["finish_reasons"] == ["stop" if stops else "length"]
    assert values["emitted_tokens"] == (6 if stops else NEW)


def test_the_chat_template_is_applied_once(command, checkpoints):
    _, out, _ = command("--prompt", FIRST, "--use_chat_template")
    ids = AutoTokenizer.from_pretrained(checkpoints[0])(
        f"<s> user : {FIRST} </s> assistant :", add_special_tokens=False
    )["input_ids"]
    assert last(out)["output"] == [[text_of(ids)]] != [[text_of(ONE)]]
    assert last(out)["input"] == [FIRST]


def test_flags_may_have_dashes(command):
    code, out, _ = command("--prompt", FIRST, "--max-new-tokens=3", "--num-assistant-tokens", 2)
    assert code == 0 and last(out)["output"] == [[text_of(ONE, 3)]]
    assert "K=2" in out


def test_text_keeps_its_dashes(command):
    code, out, _ = command("--prompt=--w20-w30 w40")
    assert code == 0 and last(out)["input"] == ["--w20-w30 w40"]


@pytest.mark.parametrize(("flag", "k"), [([], 3), (["--num_assistant_tokens", "2"], 2)])
def test_flags_beat_the_config_file(command, tmp_path, flag, k):
    (tmp_path / "c.yaml").write_text("num_assistant_tokens: 3\nlength_multiple: 8\n")
    code, out, _ = command("--prompt", FIRST, "--config", tmp_path / "c.yaml", *flag)
    assert code == 0 and f"K={k}" in out
    assert len(last(out)["acceptance_by_position"]) == k


def test_bfloat16_can_be_asked_for(command):
    code, out, _ = command("--prompt", FIRST, "--bf16")
    assert code == 0 and last(out)["emitted_tokens"] == NEW


def test_a_mismatch_of_tokenizers_can_be_overridden(command, damaged):
    options = ["--prompt", FIRST, "--allow_tokenizer_mismatch"]
    code, out, _ = command(*options, draft=damaged("other_tokenizer"))
    assert code == 0 and last(out)["output"] == [[text_of(ONE)]]


def test_sampling_defaults_of_a_checkpoint_do_not_matter(command, damaged):
    code, out, _ = command("--prompt", FIRST, target=damaged("sampling"))
    assert code == 0 and last(out)["output"] == [[text_of(ONE)]]


def test_the_penalty_of_a_checkpoint_counts_and_a_flag_wins(command, damaged):
    target = damaged("penalty")
    penal = text_of(ONE, repetition_penalty=3.0)
    assert penal != text_of(ONE)
    assert last(command("--prompt", FIRST, target=target)[1])["output"] == [[penal]]
    flags = ["--prompt", FIRST, "--repetition_penalty", 1.0]
    assert last(command(*flags, target=target)[1])["output"] == [[text_of(ONE)]]


def test_bad_words_and_ngrams_are_those_of_generate(command):
    word = text_of(ONE).split()[2]
    ids = tiny_checkpoints.word_tokenizer().encode(word, add_special_tokens=False)
    want = text_of(ONE, bad_words_ids=[ids], no_repeat_ngram_size=1)
    flags = ["--bad_words", word, "--no_repeat_ngram_size", 1]
    assert last(command("--prompt", FIRST, *flags)[1])["output"] == [[want]]


def test_sampled_text_depends_on_the_seed_and_coupled_equals_plain(command):
    draw = ["--prompt", FIRST, "--do_sample", "--temperature", 1.5, "--top_p", 0.9, "--seed"]
    texts = [last(command(*draw, seed)[1])["output"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    code, out, _ = command(*draw, 1, "--compare_baseline")  # auto: coupled
    assert last(out)["texts_equal_baseline"] is True and "= identical" in out
    code, out, _ = command(*draw, 1, "--compare_baseline", "--num_assistant_tokens", 2)
    assert code == 0 and last(out)["texts_equal_baseline"] is None and "another draw" in out


@pytest.mark.parametrize(
    "flag",
    [
        ["--temperature", 0.3],
        ["--top_k", 2],
        ["--top_p", 0.2],
        ["--min_p", 0.5],
        ["--repetition_penalty", 0.1],
        ["--no_repeat_ngram_size", 1],
        ["--bad_words", *(f"w{i}" for i in range(7, 50))],
        ["--seed", 3],
        ["--verifier", "coupled"],
    ],
    ids=lambda flag: flag[0],
)
def test_d12_no_flag_for_the_choice_of_tokens_is_dropped(command, flag):
    """sgl-project/sglang#10617, InternLM/lmdeploy#4551"""
    draw = ["--prompt", FIRST, "--do_sample", "--num_assistant_tokens", 3]
    texts = [last(command(*draw, *more)[1])["output"] for more in ([], flag)]
    assert texts[0] != texts[1]
    if flag[0] != "--verifier":  # and the draft does not dilute what it does
        args = [*draw, *flag, "--verifier", "coupled", "--compare_baseline"]
        assert last(command(*args)[1])["texts_equal_baseline"] is True


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--temperature", 0], ["--temperature must be"]),
        (["--top_k", -1], ["--top_k must be"]),
        (["--top_p", 1.5], ["--top_p must be"]),
        (["--min_p", 2], ["--min_p must be"]),
        (["--repetition_penalty", 0], ["--repetition_penalty must be"]),
        (["--no_repeat_ngram_size", -3], ["--no_repeat_ngram_size must be"]),
        (["--bad_words", "w9", ""], ["--bad_words needs"]),
        (["--stop", ""], ["--stop needs"]),
        (["--stop"], ["--stop needs"]),
        (["--stop", "w9"], ["--stop=['w9']", "tokenizer"]),  # a tokenizer of words cannot
        (["--seed", 1 << 70], ["--seed must be"]),
        (["--num_assistant_tokens", 99], ["--num_assistant_tokens must be"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_errors_name_flags(command, args, words):
    code, out, err = command("--prompt", FIRST, "--do_sample", *args)
    assert (code, out) == (2, "")
    assert_one_sentence(err, *words)


@pytest.mark.parametrize(
    ("args", "drafted", "idle"),
    [
        (["--temperature", 0.7, "--top_p", 0.9], True, ["--temperature", "--top_p"]),
        (["--verifier", "coupled"], True, ["--verifier"]),
        (["--num_assistant_tokens", 3], False, ["--num_assistant_tokens"]),
        (["--num_assistant_tokens", 3, "--do_sample", "--top_k", 4], True, []),
        (["--prompt_lookup_num_tokens", 3, "--num_assistant_tokens", 3], False, []),
    ],
    ids=str,
)
def test_flags_without_effect_are_named_once(command, args, drafted, idle):
    code, _, err = command("--prompt", FIRST, *args, **({} if drafted else {"draft": None}))
    assert code == 0
    told = [line.split()[0] for line in err.splitlines() if "has no effect without" in line]
    assert told == idle


# Streams


class Terminal(io.StringIO):
    """A standard error that is a terminal, where progress is shown."""

    def isatty(self):
        return True


def test_progress_goes_to_standard_error_only(command, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    loud = ["--warmup", "1", "--n_iterations", "2", "--max_new_tokens", "6"]
    code, out, _ = command("--prompt", FIRST, fast=loud)
    shown = sys.stderr.getvalue()
    assert code == 0 and "tok/s" not in out and "%|" not in out
    for name in ("load", "warm-up", "generate"):
        assert f"{name}:" in shown
    assert "12/12" in shown  # the bar counts tokens and reaches its end


def test_quiet_shows_no_progress_on_a_terminal(command, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert command("--prompt", FIRST)[0] == 0
    assert sys.stderr.getvalue() == ""


def test_the_program_of_the_examples_runs_as_a_process(checkpoints):
    program = [sys.executable, str(ROOT / "examples" / "run_generation.py")]
    models = ["--model_name_or_path", checkpoints[0], "--assistant_model", checkpoints[1]]
    done = subprocess.run(
        [*program, *map(str, models), "--prompt", FIRST, "--batch-size", "1", *FAST],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert last(done.stdout)["output"] == [[text_of(ONE)]]


# Failures


@pytest.fixture
def damaged(tmp_path):
    """Makes a checkpoint with the named damage and returns its directory."""

    def save(model, *args):
        model.save_pretrained(tmp_path / "model")
        tiny_checkpoints.word_tokenizer().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def make(damage):
        sizes = dict(vocab_size=toys.VOCAB, d_model=16, d_ff=32, d_kv=8)
        if damage == "t5":
            return save(T5ForConditionalGeneration(T5Config(num_layers=1, num_heads=2, **sizes)))
        if damage == "bart":
            bart = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
            heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
            config = BartConfig(vocab_size=toys.VOCAB, d_model=16, **bart, **heads)
            return save(BartForConditionalGeneration(config))
        if damage.startswith("bert"):
            kind = BertForMaskedLM if damage == "bert" else BertForSequenceClassification
            layers = dict(num_hidden_layers=1, num_attention_heads=2)
            config = dict(vocab_size=toys.VOCAB, hidden_size=16, intermediate_size=32)
            return save(kind(BertConfig(**config, **layers)))
        tokenizer = tiny_checkpoints.char_tokenizer() if damage == "other_tokenizer" else None
        directory = tiny_checkpoints.save(tmp_path / "model", toys.target(), tokenizer)
        weights, config = directory / "model.safetensors", directory / "config.json"
        if damage == "no_config":
            config.unlink()
        elif damage == "bad_config":
            config.write_text(config.read_text()[:40])
        elif damage == "truncated":
            weights.write_bytes(weights.read_bytes()[:-400])
        elif damage == "bin_only":
            torch.save(load_file(weights), directory / "pytorch_model.bin")
            weights.unlink()
        elif damage == "no_weights":
            weights.unlink()
        elif damage in ("missing", "nan"):
            values = load_file(weights)
            if damage == "missing":
                del values["model.layers.1.mlp.up_proj.weight"]
            else:
                values["model.norm.weight"][3] = float("nan")
            save_file(values, weights, metadata={"format": "pt"})
        elif damage == "no_tokenizer":
            for path in directory.glob("*token*"):
                path.unlink()
        elif damage == "no_template":
            for path in directory.glob("*template*"):
                path.unlink()
        elif damage in ("sampling", "penalty", "guidance"):
            path = directory / "generation_config.json"
            values = json.loads(path.read_text())
            new = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
            other = {"penalty": {"repetition_penalty": 3.0}, "guidance": {"guidance_scale": 1.5}}
            values |= other.get(damage, new)
            path.write_text(json.dumps(values))
        else:
            assert damage == "other_tokenizer", damage
        return directory

    return make


def assert_one_sentence(err, *words):
    """Checks that an error is one line, the last one, and holds `words`."""
    lines = [line for line in err.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:] and "Traceback" not in err, err
    assert len(errors) == 1 and len(errors[0]) < 500, err
    for word in words:
        assert word in errors[0], errors[0]


@pytest.mark.parametrize(
    ("damage", "code", "word"),
    [
        ("no_config", 1, "config.json"),
        ("bad_config", 1, "config"),
        ("truncated", 1, "safetensors"),
        ("bin_only", 1, "safetensors"),
        ("no_weights", 1, "safetensors"),
        ("missing", 1, "model.layers.1.mlp.up_proj.weight"),
        ("no_tokenizer", 1, "tokenizer"),
        ("nan", 1, "NaN"),
        ("bert", 2, "bert"),
        ("bert_classifier", 2, "bert"),
        ("t5", 2, "t5"),
        ("bart", 2, "bart"),
        ("guidance", 2, "guidance_scale"),
    ],
)
def test_a_bad_checkpoint_is_explained_in_one_sentence(command, damaged, damage, code, word):
    got, out, err = command("--prompt", FIRST, target=damaged(damage))
    assert_one_sentence(err, word)
    assert (got, out) == (code, "")


@pytest.mark.parametrize("damage", ["truncated", "missing", "bert", "t5"])
def test_a_bad_draft_is_explained_in_one_sentence(command, damaged, damage):
    got, out, err = command("--prompt", FIRST, draft=damaged(damage))
    assert_one_sentence(err, "model" if damage in ("truncated", "missing") else damage)
    assert (got, out) == (1 if damage in ("truncated", "missing") else 2, "")


def test_different_tokenizers_are_explained_in_one_sentence(command, damaged):
    code, _, err = command("--prompt", FIRST, draft=damaged("other_tokenizer"))
    assert code == 2
    assert_one_sentence(err, "tokenizers differ", "--allow_tokenizer_mismatch")


def test_a_missing_chat_template_is_explained_in_one_sentence(command, damaged):
    code, _, err = command("--prompt", FIRST, "--use_chat_template", target=damaged("no_template"))
    assert code == 2
    assert_one_sentence(err, "chat template")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", ""], ["prompt", "empty"]),
        (["--prompt", "   "], ["rompt", "empty"]),
        (["--prompt"], ["--prompt"]),
        (["--num_assistant_tokens", "0"], ["num_assistant_tokens", "1 to 32"]),
        (["--num_assistant_tokens", "33"], ["num_assistant_tokens", "1 to 32"]),
        (["--prompt_lookup_num_tokens", "0"], ["prompt_lookup_num_tokens", "1 to 32"]),
        (["--prompt_lookup_num_tokens", "3", "--num_assistant_tokens", "2"], ["=2", "=3"]),
        (
            ["--prompt_lookup_num_tokens", "3", "--max_matching_ngram_size", "0"],
            ["max_matching_ngram_size", "1 to 32"],
        ),
        (["--max_matching_ngram_size", "3"], ["--prompt_lookup_num_tokens"]),
        (["--max_new_tokens", "0"], ["max_new_tokens"]),
        (["--batch_size", "0"], ["batch_size"]),
        (["--n_iterations", "0"], ["n_iterations"]),
        (["--warmup", "-1"], ["warmup"]),
        (["--max_new_tokens", "300"], ["300", "256"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--device", "hpu"], ["hpu"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("-") else "",
)
def test_a_bad_setting_is_explained_in_one_sentence(command, args, words):
    prompt = [] if "--prompt" in args else ["--prompt", FIRST]
    code, out, err = command(*prompt, *args)
    assert_one_sentence(err, *words)
    assert (code, out) == (2, "")


@pytest.mark.parametrize("name", ["missing", "./missing", "some owner/not a name!"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_does_not_exist_is_explained(command, tmp_path, name, role):
    path = tmp_path / "missing" if name == "missing" else name
    code, out, err = command("--prompt", FIRST, **{role: path})
    assert_one_sentence(err, str(path))
    assert (code, out) == (2, "")


@pytest.mark.parametrize("inside", [True, False])
def test_an_output_dir_that_cannot_be_made_is_found_before_any_work(command, tmp_path, inside):
    (tmp_path / "file").write_text("kept")
    directory = tmp_path / "file" / "x" if inside else tmp_path / "file"
    code, _, err = command("--output_dir", directory, target=tmp_path / "missing")
    assert code == 2 and (tmp_path / "file").read_text() == "kept"
    assert_one_sentence(err, str(directory))


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("num_asistant_tokens: 3", ["num_asistant_tokens", "did you mean", "num_assistant_tokens"]),
        ("num_assistant_tokens: many", ["num_assistant_tokens", "many"]),
        ("- 3", ["mapping"]),
        ("a: [", ["c.yaml"]),
    ],
)
def test_a_bad_config_file_is_explained_in_one_sentence(command, tmp_path, yaml, words):
    (tmp_path / "c.yaml").write_text(yaml)
    code, _, err = command("--config", tmp_path / "c.yaml")
    assert code == 2
    assert_one_sentence(err, *words)


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_shows_the_traceback_before_the_sentence(command, tmp_path, flag):
    code, _, err = command(flag, target=tmp_path / "missing")
    assert code == 2 and "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_is_one_line_too(command, monkeypatch):
    monkeypatch.setattr(results, "stats_block", lambda *_: 1 / 0)
    code, _, err = command("--prompt", FIRST)
    assert code == 1
    assert_one_sentence(err, "ZeroDivisionError", "-v")


def test_an_interrupt_ends_with_130(command, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "stats_block", interrupt)
    code, _, err = command("--prompt", FIRST)
    assert code == 130 and "Traceback" not in err


# The command itself


def test_help_and_version(capsys):
    assert main(["--help"]) == main(["-h"]) == 0
    assert "generate" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == gaudi_spec.__version__


def test_help_of_generate_lists_every_flag(capsys):
    assert main(["generate", "--help"]) == 0
    out, err = capsys.readouterr()
    for flag in ("--model_name_or_path", "--assistant_model", "--no-ignore_eos", "--output_dir"):
        assert flag in out
    assert err == ""


def test_help_shows_every_default():
    for program in (flags, audit, distill, chat):
        parser = program.parser()
        for action in parser._actions:
            value = action.default
            if value is None or value is False or value == argparse.SUPPRESS:
                continue
            shown = parser._get_formatter()._expand_help(action)
            assert "default" in shown, action.option_strings


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "usage"),
        (["compress"], "compress"),
        (["generate"], "--model_name_or_path"),
        (["generate", "--model_name_or_path", "x", "--no_such_flag"], "--no_such_flag"),
        (["generate", "--model_name_or_path", "x", "--batch_size", "two"], "two"),
    ],
    ids=str,
)
def test_wrong_usage_ends_with_2(capsys, argv, word):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert word in out + err and "Traceback" not in err


@pytest.mark.parametrize("words", [["generate"], ["bench", "sweep"], ["plan"]], ids=" ".join)
def test_help_does_not_wait_for_torch(words):
    code = (
        "import sys; from gaudi_spec.cli import main; code = main(sys.argv[1:] + ['--help']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_the_names_of_devices_are_those_of_the_devices():
    """They are written twice, so that flags do not import torch."""
    assert tuple(device.DEVICES) == config.DEVICES
