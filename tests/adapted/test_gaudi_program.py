"""The programs over Optimum Habana's classes: `--optimum_habana`, on the emulated card."""

from __future__ import annotations

import json

import gaudi_toys
import pytest
import tiny_checkpoints
import torch

from gaudi_spec import gaudi_pipeline, run_generation
from gaudi_spec.cli import run_command
from gaudi_spec.config import SpecConfig
from gaudi_spec.device import get_device
from gaudi_spec.models.habana import HabanaCausalLM
from gaudi_spec.scoring import Scorer

NEW = 12
PROMPT = [20, 30, 40]
# Optimum Habana's own command for assisted decoding, without paths and with fewer tokens.
LINE = f"""--batch_size 1 --max_new_tokens {NEW} --use_hpu_graphs --use_kv_cache
--num_return_sequences 1 --temperature 0 --sdp_on_bf16""".split()
OURS = """--device hpu-emulated --optimum_habana --num_assistant_tokens 3 --n_iterations 1
--warmup 0 -q""".split()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """GPT-2 and a smaller one, as arguments."""
    root = tmp_path_factory.mktemp("checkpoints")
    draft = gaudi_toys.drafts("gpt2")["noisy"]
    target = tiny_checkpoints.save(root / "gpt2", gaudi_toys.target("gpt2"))
    paths = [str(target), str(tiny_checkpoints.save(root / "distilgpt2", draft))]
    return ["--model_name_or_path", paths[0], "--assistant_model", paths[1]]


@pytest.fixture
def adapters(monkeypatch):
    """The adapters that are made in the test."""
    made: list[HabanaCausalLM] = []
    original = HabanaCausalLM.__init__

    def init(self, *args, **options):
        made.append(self)
        original(self, *args, **options)

    monkeypatch.setattr(HabanaCausalLM, "__init__", init)
    return made


def want(whole: bool = False) -> str:
    """Returns the text of their own code without a draft."""
    prompt = torch.tensor(PROMPT)
    (new,) = gaudi_toys.plain(gaudi_toys.target("gpt2"), [prompt], NEW)
    ids = [*(PROMPT if whole else []), *new.tolist()]
    return tiny_checkpoints.word_tokenizer().decode(ids, skip_special_tokens=True)


def test_their_assisted_command_line_runs_over_their_classes(models, adapters, capsys):
    """Target and draft are both theirs, and the text is that of their own greedy code."""
    argv = [*models, *LINE, *OURS, "--prompt", tiny_checkpoints.words(*PROMPT)]
    code = run_command(run_generation.main, argv)
    out, err = capsys.readouterr()
    assert code == 0, err
    values = json.loads(out.splitlines()[-1])
    assert values["output"] == [[want()]] and values["accepted"] > 0
    assert [type(each.model).__name__ for each in adapters] == ["GaudiGPT2LMHeadModel"] * 2


def test_switches_reach_both_models_or_are_told_of(models, adapters, capsys):
    """GPT-2 has no flash attention in their classes."""
    argv = [*models, *LINE, *OURS, "--use_flash_attention", "--flash_attention_fast_softmax=false"]
    code = run_command(run_generation.main, [*argv, "--prompt", tiny_checkpoints.words(*PROMPT)])
    err = capsys.readouterr().err
    assert code == 0 and "--use_flash_attention has no effect on GaudiGPT2LMHeadModel" in err
    assert "Without effect" not in err and "fast_softmax" not in err
    assert all(each._options == {"use_flash_attention": True} for each in adapters)


def test_the_pipeline_runs_over_their_classes(models, adapters, capsys):
    """The same flags, and prompt and continuation."""
    argv = [*models, *LINE, *OURS, "--prompt", tiny_checkpoints.words(*PROMPT)]
    code = run_command(gaudi_pipeline.main, argv)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert f"Generated Text[1][1]: {want(whole=True)!r}" in out and len(adapters) == 2


@torch.no_grad()
def test_scores_over_their_classes_are_those_of_a_plain_forward():
    """What tasks of lm-evaluation-harness with a choice of answers are decided by."""
    model = gaudi_toys.target("llama")
    ids = list(range(10, 24))
    scorer = Scorer(model, 2, (16,), SpecConfig(), get_device("hpu-emulated"))
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(scorer.score([ids])[0].log_probs, picked, atol=1e-4, rtol=1e-4)
