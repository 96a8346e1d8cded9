"""Scoring equals a plain forward; lm-evaluation-harness gets the target's own answers, drafted."""

import importlib.util
import json
import sys

import optimum_habana
import pytest
import tiny_checkpoints
import torch
import toys

from gaudi_spec import run_lm_eval
from gaudi_spec.cli import run_command
from gaudi_spec.config import SpecConfig
from gaudi_spec.device import get_device
from gaudi_spec.errors import ConfigError, InputError
from gaudi_spec.scoring import Scorer

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval: pip install lm_eval"
)
TEXTS = [[20, 30, 40, 50, 60], [9, 8], list(range(10, 24)), [5, 6, 7]]


def scorer(widths=(4, 8, 16), batch=2, device="cpu"):
    return Scorer(toys.target(), batch, widths, SpecConfig(), get_device(device))


def plain(text):
    """Returns log-probabilities and greediness of a plain forward."""
    logits = toys.target()(torch.tensor([text])).logits[0, :-1]
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    return log_probs, logits.argmax(-1) == torch.tensor(text[1:])


# Scoring


@pytest.mark.parametrize("device", ["cpu", "hpu-emulated"])
@torch.no_grad()
def test_scores_are_those_of_a_plain_forward(device):
    score = scorer(device=device)
    score.warm_up(quiet=True)
    built = score.graphs.facts.warmup
    chosen = toys.greedy(toys.target(), torch.tensor(TEXTS[0]), 5).tolist()
    for batch in ([*TEXTS[:2]], [TEXTS[2]], [TEXTS[3], TEXTS[0] + chosen]):
        for text, (log_probs, greedy) in zip(batch, score.score(batch)):
            want, best = plain(text)
            torch.testing.assert_close(log_probs, want, atol=1e-5, rtol=1e-5)
            assert torch.equal(greedy, best)
    assert greedy[-5:].all() and not greedy.all()
    assert (built, score.graphs.facts.after_warmup) == (3, 0)


@torch.no_grad()
def test_a_wrong_position_is_seen():
    """The comparison above can fail."""
    score = scorer()
    score._positions += 1
    assert not torch.allclose(score.score([TEXTS[0]])[0].log_probs, plain(TEXTS[0])[0], atol=1e-5)


def test_texts_and_widths_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="2 to 17 tokens"):
        scorer().score([[1]])
    with pytest.raises(InputError, match="2 to 17 tokens"):
        scorer().score([list(range(18))])
    for widths in ([], [0], [1 << 20]):
        with pytest.raises(ConfigError, match="positions"):
            scorer(widths)


# Flags


def test_the_evaluation_has_their_flags_and_defaults():
    defaults = {action.dest: action.default for action in run_lm_eval.parser()._actions}
    assert optimum_habana.LM_EVAL.items() <= defaults.items()
    short = {option for a in run_lm_eval.parser()._actions for option in a.option_strings}
    assert {"-o", "-L", "-f", "-E"} <= short


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", "x"], "--prompt does nothing in run_lm_eval.py"),
        (["--compare_baseline"], "--compare_baseline does nothing"),
        (["--fewshot_as_multiturn"], "add --apply_chat_template"),
        (["--samples", "{}", "--limit", "3"], "contradict"),
        (["--samples", "none.json"], "Cannot read --samples"),
        (["--num_beams", "2"], "--num_beams"),
    ],
)
def test_bad_flags_give_one_sentence(args, words, capsys, tmp_path):
    need = ["-o", str(tmp_path / "o.json"), "--model_name_or_path", "none"]
    assert run_command(run_lm_eval.main, [*need, *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and words in err and err.count("\n") == 1


def test_without_lm_eval_one_sentence_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "gaudi_spec.lm_eval", raising=False)
    args = ["-o", str(tmp_path / "o.json"), "--model_name_or_path", "none"]
    assert run_command(run_lm_eval.main, args) == 2
    assert "pip install 'gaudi-spec[eval]'" in capsys.readouterr().err


# Tasks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


def adapter(draft="noisy", **options):
    from gaudi_spec.lm_eval import GaudiSpecLM

    draft = toys.drafts()[draft] if draft else None
    options = {"batch_size": 2, "buckets": (4, 8, 16), "max_gen_toks": 8} | options
    return GaudiSpecLM(toys.target(), tiny_checkpoints.word_tokenizer(), draft, **options)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


PAIRS = [("w20 w30", " w40"), ("w9 w8 w55", " w44 w21"), ("", "w12"), ("w7", " w8 w9 w10")]


@needs_lm_eval
def test_likelihoods_are_those_of_the_harness_own_adapter():
    from lm_eval.models.huggingface import HFLM

    ours = adapter()
    theirs = HFLM(
        pretrained=toys.target(),
        tokenizer=tiny_checkpoints.word_tokenizer(),
        device="cpu",
        batch_size=2,
        max_length=16,
        add_bos_token=True,
    )
    whole = [(tiny_checkpoints.words(*range(10, 10 + n)),) for n in (3, 40, 17)]
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", whole)):
        got = getattr(ours, kind)(requests(kind, *arguments), disable_tqdm=True)
        want = getattr(theirs, kind)(requests(kind, *arguments), disable_tqdm=True)
        assert torch.allclose(torch.tensor(got), torch.tensor(want), atol=1e-4)
    assert not ours.reports


@needs_lm_eval
@pytest.mark.parametrize("draft", ["self", "noisy", None])
def test_texts_are_the_targets_own_up_to_a_stop_text(draft):
    prompts = [[20, 30, 40], [9, 8, 55, 44, 21], [50]]
    texts = [toys.greedy(toys.target(), torch.tensor(p), 8).tolist() for p in prompts]
    decode = tiny_checkpoints.word_tokenizer().decode
    stop = f" {tiny_checkpoints.words(texts[0][3])}"
    options = [{"until": [stop, "never"]}, {"until": [], "max_gen_toks": 5}, {"until": stop}]
    contexts = [tiny_checkpoints.words(*prompt) for prompt in prompts]
    lm = adapter(draft, add_bos_token=False)
    got = lm.generate_until(requests("generate_until", *zip(contexts, options)), disable_tqdm=True)
    assert got[0] == decode(texts[0][:3], skip_special_tokens=True)
    assert got[1] == decode(texts[1][:5], skip_special_tokens=True)
    assert got[2] == decode(texts[2], skip_special_tokens=True).split(stop)[0]
    assert (sum(report.accepted for report in lm.reports) > 0) == (draft is not None)


@needs_lm_eval
def test_texts_are_generated_on_the_emulated_card():
    """As the likelihoods are scored there."""
    lm = adapter(device="hpu-emulated", add_bos_token=False, batch_size=1)
    ask = (tiny_checkpoints.words(20, 30, 40), {"until": [], "max_gen_toks": 5})
    (got,) = lm.generate_until(requests("generate_until", ask), disable_tqdm=True)
    want = toys.greedy(toys.target(), torch.tensor([20, 30, 40]), 5)
    assert got == tiny_checkpoints.word_tokenizer().decode(want, skip_special_tokens=True)
    assert lm.reports[0].graphs.warmup + lm.reports[0].graphs.after_warmup > 0


@needs_lm_eval
def test_a_stop_text_in_the_prompt_does_not_stop():
    prompt = [20, 30, 40]
    text = toys.greedy(toys.target(), torch.tensor(prompt), 8).tolist()
    lm = adapter(add_bos_token=False)
    ask = (tiny_checkpoints.words(*prompt), {"until": ["w40"]})
    (got,) = lm.generate_until(requests("generate_until", ask), disable_tqdm=True)
    want = tiny_checkpoints.word_tokenizer().decode(text, skip_special_tokens=True)
    assert got == want.split("w40")[0] and got


@needs_lm_eval
def test_the_program_runs_local_tasks(checkpoints, tmp_path, capsys, monkeypatch):
    """A multiple-choice and a generating task, from YAML and a local data file."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [
        {"question": "w20 w30", "choices": ["w40", "w41 w42"], "label": 0, "answer": "w5"},
        {"question": "w9 w8 w55", "choices": ["w44", "w6"], "label": 1, "answer": "w6"},
        {"question": "w50", "choices": ["w12 w13", "w14"], "label": 0, "answer": "w7"},
    ]
    data = tmp_path / "data.json"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    common = f"""dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    (tmp_path / "choose.yaml").write_text(
        "task: tiny_choose\noutput_type: multiple_choice\n"
        'doc_to_choice: "{{choices}}"\ndoc_to_target: label\nmetric_list:\n  - metric: acc\n'
        + common
    )
    (tmp_path / "write.yaml").write_text(
        "task: tiny_write\noutput_type: generate_until\ndoc_to_target: answer\n"
        "generation_kwargs: {until: [w1], max_gen_toks: 6}\n"
        "metric_list:\n  - metric: exact_match\n" + common
    )
    output = tmp_path / "out" / "results.json"
    args = f"""--model_name_or_path {checkpoints[0]} --assistant_model {checkpoints[1]} -o {output}
        --tasks tiny_choose tiny_write --include_path {tmp_path} --batch_size 2 --log_samples
        --use_kv_cache --use_hpu_graphs --trim_logits --buckets 8 16 -q""".split()
    code = run_command(run_lm_eval.main, args)
    out, err = capsys.readouterr()
    assert code == 0, err
    values = json.loads(output.read_text(encoding="utf-8"))
    assert "tiny_choose" in out and values["args"]["tasks"] == ["tiny_choose", "tiny_write"]
    assert values["generation"]["accepted"] > 0
    lm = adapter()
    for sample in values["samples"]["tiny_choose"]:
        row = sample["doc"]
        pairs = [(row["question"], f" {choice}") for choice in row["choices"]]
        want = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        assert [float(r[0][0]) for r in sample["resps"]] == pytest.approx([w[0] for w in want])
    for sample in values["samples"]["tiny_write"]:
        ids = [1, *(int(word[1:]) for word in sample["doc"]["question"].split())]
        ids = ids if sample["resps"] else []
        text = toys.greedy(toys.target(), torch.tensor(ids[1:]), 6)
        want = tiny_checkpoints.word_tokenizer().decode(text, skip_special_tokens=True)
        assert sample["resps"][0][0] == want.split("w1")[0]
