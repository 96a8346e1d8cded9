"""What users of speculative decoding reported elsewhere, as cases that must come out right here.

Each docstring names one public thread; the case stands for its whole kind of fault.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import time
import types
import warnings
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
import toys
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, TextIteratorStreamer

import gaudi_spec
from gaudi_spec import SpecConfig, SpeculativeEngine, checker, cli, job, loading, results
from gaudi_spec.device import get_device
from gaudi_spec.errors import ConfigError, UnsupportedModelError, UnsupportedOptionError
from gaudi_spec.models.hf import HFCausalLM
from gaudi_spec.sampling.options import Sampling
from gaudi_spec.schedule import Schedule

KS = [1, 2, 3, 5, 8, 16]
DRAFTS = ["self", "noisy", "unrelated"]


def engine(k=5, drafted_by="noisy", family="llama", target=None, **settings):
    draft = toys.drafts(family)[drafted_by] if isinstance(drafted_by, str) else drafted_by
    config = SpecConfig(num_assistant_tokens=k, **settings)
    return SpeculativeEngine(toys.target(family) if target is None else target, draft, config)


def lists(rows):
    return [row.tolist() for row in rows]


def reference(model, prompts, new):
    return [toys.greedy(model, prompt, new).tolist() for prompt in prompts]


def first_occurrences(text):
    """Returns the indices at which an id of `text` (a list) appears for the first time."""
    return [i for i, token in enumerate(text) if token not in text[:i]]


def until(text, eos):
    """Cuts `text` behind its first id of `eos`."""
    at = next((i for i, token in enumerate(text) if token in eos), len(text))
    return text[: at + 1]


@contextlib.contextmanager
def no_forward(*models):
    """Fails if one of the models is run."""

    def fail(*_, **__):
        raise AssertionError("a forward was run before the request was checked")

    handles = [m.register_forward_pre_hook(fail) for model in models for m in (model, model.model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def recorded_positions(model):
    """Yields a list that gets the position ids of every call of the whole model."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"].clone()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


class Pattern(Schedule):
    """A schedule that walks through a list of K and then repeats the last one."""

    def __init__(self, *ks):
        self.ks, self.sizes = ks, frozenset(ks)

    def choose(self, cycle, costs):
        return self.ks[min(cycle, len(self.ks) - 1)]


class Streamer:
    """Remembers what was put, and how often the end came."""

    def __init__(self):
        self.put_values, self.ends = [], 0

    def put(self, value):
        self.put_values.append(value.tolist())

    def end(self):
        self.ends += 1


# A. The same text as plain greedy decoding


@pytest.mark.parametrize("drafted_by", DRAFTS)
@pytest.mark.parametrize("k", KS)
def test_a1_every_k_and_acceptance_pattern_gives_greedy_text(k, drafted_by):
    """huggingface/transformers#30042"""
    prompts = [*toys.PROMPTS[:2], *toys.prompts(7, 64, seed=11)]
    want = reference(toys.target(), prompts, 40)
    running = engine(k, drafted_by)
    for text in want:
        toys.assert_sound(torch.tensor(text))
    assert lists(running.generate(prompts[:1], 40)) == want[:1]
    assert lists(running.generate(prompts, 40)) == want


@pytest.mark.parametrize("drafted_by", DRAFTS)
def test_a2_candidate_i_sits_at_the_committed_length_minus_one_plus_i(drafted_by):
    """huggingface/transformers#30413"""
    (prompt,) = toys.prompts(150, seed=5)
    running, length = engine(5, copy.deepcopy(toys.drafts()[drafted_by])), len(prompt)
    running.generate([prompt], 1)  # builds the buffers
    with recorded_positions(running.runtime.target.model) as seen:
        for (facts,) in running.cycles([prompt], 60):
            width = 6 if length < 209 else 1  # a proposal is of no use to the last token
            assert [at.tolist() for at in seen] == [[[length - 1 + i for i in range(width)]]]
            seen.clear()
            length += facts.n_emitted
    assert length == 210


def int8_rounded(model):
    """Returns a copy whose weight matrices lie on an int8 grid, one scale per row."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_((weight / scale).round() * scale)
    return other


@pytest.mark.parametrize("rounded", [False, True], ids=["bf16", "int8-bf16"])
def test_a3_in_low_precision_texts_part_only_at_a_near_tie(rounded):
    """huggingface/transformers#39421"""
    model = int8_rounded(toys.target()) if rounded else copy.deepcopy(toys.target())
    model = model.to(torch.bfloat16)
    draft = copy.deepcopy(toys.drafts()["noisy"]).to(torch.bfloat16)
    prompts = toys.prompts(*range(3, 15), seed=21)
    for prompt, ours in zip(prompts, engine(5, draft, target=model).generate(prompts, 40)):
        verdict = checker.explain(model, prompt, ours, toys.greedy(model, prompt, 40))
        assert verdict == "identical" or "a near-tie" in verdict, verdict
        assert all(d.near_tie for d in checker.greedy_differences(model, prompt, ours))


def test_a3_int8_weights_computed_in_float32_give_the_exact_text():
    """ggml-org/llama.cpp#25618"""
    model = int8_rounded(toys.target())
    ours = engine(5, toys.target(), target=model).generate(toys.PROMPTS, 40)
    assert lists(ours) == reference(model, toys.PROMPTS, 40)


def test_a3_the_checker_tells_an_error_from_a_near_tie():
    """ggml-org/llama.cpp#27407"""
    prompt, text = toys.PROMPTS[3], toys.references()[3]
    wrong = text.clone()
    wrong[7] = (wrong[7] + 1) % toys.VOCAB
    assert checker.explain(toys.target(), prompt, text, text.clone()) == "identical"
    verdict = checker.explain(toys.target(), prompt, wrong, text)
    assert "token 7" in verdict and "NOT a near-tie" in verdict
    assert "different lengths" in checker.explain(toys.target(), prompt, text[:9], text)


def test_a3_a_clearly_less_likely_token_is_no_near_tie_in_bfloat16():
    """ggml-org/llama.cpp#25618"""
    model = copy.deepcopy(toys.target()).to(torch.bfloat16)
    prompt, text = toys.PROMPTS[3], toys.references()[3]
    ids = torch.cat([prompt, text])[None]
    with torch.no_grad():
        best = model(ids).logits[0, len(prompt) - 1 : -1].float().topk(3, -1)
    judged = []
    for at, (token, gap) in enumerate(
        zip(best.indices[:, 2], best.values[:, 0] - best.values[:, 2])
    ):
        if gap > 0.5:  # more than ten rounding steps of the largest logits, which are below 8
            wrong = torch.cat([text[:at], token[None]])
            judged += [d.near_tie for d in checker.greedy_differences(model, prompt, wrong)[-1:]]
    assert len(judged) > 20 and not any(judged)


def test_a4_the_text_does_not_depend_on_k():
    """NVIDIA/TensorRT-LLM#2208"""
    prompts = toys.prompts(*range(1, 21), seed=4)
    want = reference(toys.target(), prompts, 12)
    for k in [*KS, 32]:  # 16 and 32 are more than the budget
        assert lists(engine(k).generate(prompts, 12)) == want


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_a4_a_k_beyond_the_budget_changes_nothing(new):
    """NVIDIA/TensorRT-LLM#2208"""
    for drafted_by in DRAFTS:
        rows = engine(16, drafted_by).generate(toys.PROMPTS, new)
        assert lists(rows) == [text[:new].tolist() for text in toys.references()]


@pytest.mark.parametrize("length", [15, 16, 17, 18, 63, 64, 65, 66, 79, 80, 81, 82, 127, 128, 129])
def test_a7_prompts_around_a_chunk_width_start_with_the_right_token(length):
    """ml-explore/mlx-lm#1109"""
    (prompt,) = toys.prompts(length, seed=length)
    running = engine(5, prefill_chunks=(16, 64))
    want = toys.greedy(toys.target(), prompt, 12).tolist()
    assert lists(running.generate([prompt], 12)) == [want]
    assert lists(running.generate([prompt], 1)) == [want[:1]]


@pytest.mark.parametrize("drafted_by", ["noisy", "unrelated"])
def test_a9_eighty_prompts_agree_in_text_length_and_finish_reason(drafted_by):
    """SafeAILab/EAGLE#75"""
    prompts = toys.prompts(*[1 + i % 20 for i in range(80)], seed=8)
    eos = [67, 46]
    fast, plain = engine(5, drafted_by, batch_size=16), engine(5, None, batch_size=16)
    reasons = set()
    for start in range(0, 80, 16):
        batch = prompts[start : start + 16]
        ours, other = (e.generate(batch, 24, eos_token_ids=eos) for e in (fast, plain))
        assert lists(ours) == lists(other)
        assert fast.report.finish_reasons == plain.report.finish_reasons
        reasons |= set(fast.report.finish_reasons)
        for prompt, text in zip(batch, ours):
            assert checker.greedy_differences(toys.target(), prompt, text) == []
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_a10_every_token_is_the_targets_first_choice(batch):
    """RBLN-SW/vllm-rbln#630"""
    prompts = toys.prompts(*range(2, 2 + batch), seed=9)
    for prompt, text in zip(prompts, engine().generate(prompts, 30)):
        assert checker.greedy_differences(toys.target(), prompt, text) == []


@pytest.mark.parametrize("at", [0, 11, 39])
def test_a10_the_checker_finds_one_corrupted_token(at):
    """RBLN-SW/vllm-rbln#630"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].clone()
    right, text[at] = int(text[at]), (int(text[at]) + 1) % toys.VOCAB
    found = checker.greedy_differences(toys.target(), prompt, text)
    assert (found[0].index, found[0].token, found[0].best) == (at, int(text[at]), right)
    assert not found[0].near_tie and found[0].gap > 1e-3


# B. Where a text ends


@pytest.mark.parametrize("drafted_by", ["self", "noisy"])
@pytest.mark.parametrize("offset", range(6))
def test_b1_a_text_ends_at_an_end_token_anywhere_in_a_block(offset, drafted_by):
    """huggingface/transformers#47912"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    at = next(i for i in first_occurrences(text) if i % 6 == offset)
    running = engine(5, drafted_by)
    streamed = []
    for (facts,) in running.cycles([prompt], 40, eos_token_ids=[text[at]]):
        assert len(facts.tokens) == facts.n_emitted
        streamed += facts.tokens
    assert streamed == text[: at + 1]
    report = running.report
    assert report.emitted == [at + 1] and report.finish_reasons == ["stop"]
    assert report.accepted + report.target_tokens == at + 1
    assert report.accepted <= at + 1
    if drafted_by == "self":
        assert report.cycles == at // 6 + 1


@pytest.mark.parametrize("offset", range(6))
def test_b1_nothing_behind_an_end_token_is_returned_streamed_or_scored(offset):
    """huggingface/transformers#31301, LostRuins/koboldcpp#1276"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    at = next(i for i in first_occurrences(text) if i % 6 == offset)
    streamer = Streamer()
    out = gaudi_spec.generate(
        toys.target(),
        prompt[None],
        assistant_model=toys.target(),
        num_assistant_tokens=5,
        eos_token_id=text[at],
        max_new_tokens=40,
        streamer=streamer,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert out.sequences[0, len(prompt) :].tolist() == text[: at + 1]
    assert streamer.put_values == [prompt[None].tolist(), *([t] for t in text[: at + 1])]
    assert streamer.ends == 1
    assert [int(step.argmax()) for step in out.scores] == text[: at + 1]
    assert len(out.logits) == at + 1


@pytest.mark.parametrize("k", range(1, 9))
def test_b3_no_filler_follows_an_end_token_whatever_k_is(k):
    """HabanaAI/vllm-fork#1435"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    running = engine(k, "self")
    for at in first_occurrences(text)[: k + 3]:
        got = running.generate([prompt], 40, eos_token_ids=[text[at]])
        assert lists(got) == [text[: at + 1]]


@pytest.mark.parametrize("side", [toys.left_pad, toys.right_pad])
@pytest.mark.parametrize("drafted_by", DRAFTS)
def test_b4_pads_never_count_as_end_of_text(side, drafted_by):
    """huggingface/optimum-habana#1034"""
    model, eos = toys.target(), 22
    prompts = [toys.PROMPTS[0], toys.PROMPTS[2], torch.tensor([eos, eos, 5, 9])]
    ids, mask = side(prompts, eos)
    got = gaudi_spec.generate(
        model,
        ids,
        attention_mask=mask,
        assistant_model=toys.drafts()[drafted_by],
        num_assistant_tokens=5,
        eos_token_id=eos,
        pad_token_id=eos,
        max_new_tokens=30,
    )
    new = got[:, ids.shape[1] :].tolist()
    want = [until(text, [eos]) for text in reference(model, prompts, 30)]
    assert [row[: len(text)] for row, text in zip(new, want)] == want
    assert all(token == eos for row, text in zip(new, want) for token in row[len(text) :])
    assert gaudi_spec.last_report().emitted == [len(text) for text in want]
    assert min(map(len, want)) > 1


@pytest.mark.parametrize("which", [0, 1])
def test_b6_any_listed_end_token_ends_a_text_and_the_drafts_does_not(which):
    """NVIDIA/TensorRT-Model-Connect#640"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    indices = first_occurrences(text)
    listed = [text[indices[9]], 2]
    model, draft = copy.deepcopy(toys.target()), copy.deepcopy(toys.target())
    model.config.eos_token_id = 2
    model.generation_config.eos_token_id = listed[::-1] if which else listed
    draft.config.eos_token_id = draft.generation_config.eos_token_id = text[indices[3]]
    options = {"assistant_model": draft, "num_assistant_tokens": 5, "max_new_tokens": 40}
    got = gaudi_spec.generate(model, prompt[None], **options)
    assert got[0, len(prompt) :].tolist() == text[: indices[9] + 1]
    assert gaudi_spec.last_report().acceptance_rate == 1.0


@pytest.mark.parametrize("drafted_by", ["self", "noisy"])
def test_b7_stop_strings_of_a_word_tokenizer_end_a_text_anywhere_in_a_block(drafted_by):
    """huggingface/transformers#48039"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    words = list(tiny_checkpoints.WORDS)
    words[next(i for i in range(7, 97) if i not in text)] = "abcdef"  # Transformers looks for it
    tokenizer = tiny_checkpoints.word_tokenizer(words)
    offsets = set()
    for end in range(2, 20):
        stop = f"{words[text[end - 2]][-1:]} {words[text[end - 1]]}"  # of two tokens
        options = {"stop_strings": [stop, "never"], "tokenizer": tokenizer, "max_new_tokens": 24}
        want = toys.target().generate(prompt[None], do_sample=False, **options)
        got = gaudi_spec.generate(
            toys.target(),
            prompt[None],
            assistant_model=toys.drafts()[drafted_by],
            num_assistant_tokens=4,
            **options,
        )
        assert got.tolist() == want.tolist() and want.shape[1] <= 17 + end
        assert gaudi_spec.last_report().finish_reasons == ["stop_string"]
        offsets.add((want.shape[1] - 18) % 5)
    assert offsets == set(range(5))


def test_b7_a_tokenizer_that_cannot_spell_is_refused_in_words():
    """huggingface/transformers#48039"""
    with no_forward(toys.target()), pytest.raises(ConfigError, match="StoppingCriteria of your"):
        gaudi_spec.generate(
            toys.target(),
            toys.PROMPTS[3][None],
            stop_strings="w9",
            tokenizer=tiny_checkpoints.word_tokenizer(),
        )


@pytest.mark.parametrize("new", range(1, 9))
def test_b9_exactly_the_budget_comes(new):
    """huggingface/transformers#46993"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    width = len(prompt)
    ways = [
        {"max_new_tokens": new},
        {"max_length": width + new},
        {"max_new_tokens": new, "max_length": width + new + 3},
        {"max_new_tokens": new, "max_length": width + 1},
    ]
    for ways_given in ways:
        got = gaudi_spec.generate(
            toys.target(),
            prompt[None],
            assistant_model=toys.drafts()["self"],
            num_assistant_tokens=5,
            **ways_given,
        )
        assert got[0, width:].tolist() == text[:new]
        report = gaudi_spec.last_report()
        assert report.proposed == new - -(-new // 6)  # all but one token of each cycle
        assert report.emitted == [new] and report.acceptance_rate in (None, 1.0)


def test_b9_rows_keep_their_own_budgets():
    """huggingface/transformers#47195"""
    budgets = [1, 4, 7, 2, 13]
    rows = engine(5, "self").generate(toys.PROMPTS, budgets)
    assert lists(rows) == [t[:n].tolist() for t, n in zip(toys.references(), budgets)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64])
@pytest.mark.parametrize("new", [1, 2])
def test_b11_a_tiny_budget_needs_no_draft_and_no_negative_one(length, new):
    """huggingface/optimum-habana#910"""
    (prompt,) = toys.prompts(length, seed=40 + length)
    draft = copy.deepcopy(toys.drafts()["noisy"])
    running = engine(5, draft)
    running.generate([prompt], 4)
    with no_forward(draft) if new == 1 else contextlib.nullcontext():
        got = running.generate([prompt], new)
    assert lists(got) == reference(toys.target(), [prompt], new)
    assert running.report.proposed == new - 1
    if new == 1:
        assert running.report.draft_forwards == 0 and running.report.acceptance_rate is None


@pytest.mark.parametrize("drafted_by", DRAFTS)
@pytest.mark.parametrize("least", [1, 6, 12])
def test_b13_an_end_token_is_blocked_at_every_position_below_the_minimum(least, drafted_by):
    """huggingface/transformers#29585"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    options = {"max_new_tokens": 30, "min_new_tokens": least, "eos_token_id": text[:4]}
    want = toys.target().generate(prompt[None], do_sample=False, **options)
    options["num_assistant_tokens"] = 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none about infeasible lengths, or any other
        got = gaudi_spec.generate(
            toys.target(), prompt[None], assistant_model=toys.drafts()[drafted_by], **options
        )
    assert torch.equal(got, want) and want.shape[1] >= 17 + least
    new = want[0, 17:].tolist()
    assert not set(new[: least - 1]) & set(text[:4])


def test_b13_no_log_message_about_lengths(caplog):
    """sgl-project/sglang#6266"""
    gaudi_spec.generate(
        toys.target(),
        toys.PROMPTS[3][None],
        assistant_model=toys.drafts()["self"],
        max_new_tokens=8,
        min_new_tokens=6,
        eos_token_id=5,
    )
    assert caplog.records == []


def test_b15_a_prompt_beyond_the_default_length_gets_its_whole_budget():
    """huggingface/optimum-habana#627"""
    prompt = toys.PROMPTS[4]
    got = gaudi_spec.generate(
        toys.target(), prompt[None], assistant_model=toys.drafts()["noisy"], max_new_tokens=10
    )
    assert got[0, len(prompt) :].tolist() == toys.references()[4][:10].tolist()


# C. Vocabularies and tokenizers


def widened(model, vocab):
    """Returns a copy of `model` with `vocab` ids, the new ones filled at random."""
    other = toys.build(seed=5, vocab=vocab)
    values = model.state_dict()
    with torch.no_grad():
        for name, weight in other.state_dict().items():
            weight[: len(values[name])] = values[name]
    return other


@pytest.mark.parametrize("wide", ["target", "draft"])
@pytest.mark.parametrize("k", [1, 5])
def test_c1_vocabularies_padded_differently_work(wide, k):
    """vllm-project/vllm#7252"""
    large, small = widened(toys.target(), 128), toys.drafts()["noisy"]
    target, draft = (large, small) if wide == "target" else (small, large)
    running = engine(k, draft, target=target)
    assert lists(running.generate(toys.PROMPTS, 40)) == reference(target, toys.PROMPTS, 40)
    assert 0 < running.report.acceptance_rate < 1


def test_c1_ids_that_only_the_draft_has_are_never_proposed():
    """QwenLM/Qwen3#466"""
    draft = widened(toys.target(), 128)
    with torch.no_grad():
        draft.lm_head.weight[97:] *= 100  # the draft alone would choose one of these
    running = engine(5, draft)
    assert lists(running.generate(toys.PROMPTS, 20)) == [t[:20].tolist() for t in toys.references()]
    assert running.report.acceptance_rate == 1.0


def test_c3_the_first_differing_token_is_named():
    """lmstudio-ai/lmstudio-bug-tracker#502"""
    words = list(tiny_checkpoints.WORDS)
    words[40], words[50] = words[50], words[40]
    ours, theirs = tiny_checkpoints.word_tokenizer(), tiny_checkpoints.word_tokenizer(words)
    with pytest.raises(ConfigError) as caught:
        loading.check_tokenizers(ours, theirs)
    message = str(caught.value)
    assert "'w40' is 40 in the target's and 50 in the draft's" in message
    assert "--allow_tokenizer_mismatch" in message


def test_c3_a_missing_token_is_named():
    """LostRuins/koboldcpp#2325"""
    shorter = tiny_checkpoints.word_tokenizer(tiny_checkpoints.WORDS[:-1])
    with pytest.raises(ConfigError, match="'w96' is 96 in the target's and missing in the draft's"):
        loading.check_tokenizers(tiny_checkpoints.word_tokenizer(), shorter)


def test_c3_other_roles_of_the_same_tokens_are_accepted():
    """LostRuins/koboldcpp#2325"""
    other = tiny_checkpoints.word_tokenizer(eos_token="w9", pad_token="</s>", bos_token="w8")
    other.chat_template = None
    loading.check_tokenizers(tiny_checkpoints.word_tokenizer(), other)


@pytest.fixture
def mismatched(tmp_path):
    """Returns the sources of a target and of a draft with another tokenizer."""
    target = tiny_checkpoints.save(tmp_path / "target", toys.target())
    draft = tiny_checkpoints.save(
        tmp_path / "draft", toys.drafts()["noisy"], tiny_checkpoints.char_tokenizer()
    )
    return loading.Source(str(target)), loading.Source(str(draft))


def test_c4_another_tokenizer_is_refused_before_weights_are_loaded(mismatched, monkeypatch):
    """huggingface/transformers#46936"""

    def fail(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ConfigError, match="tokenizers differ"):
        loading.load_pair(*mismatched, torch.float32, get_device("cpu"))


def test_c3_the_override_loads_the_pair_and_the_text_stays_the_targets(mismatched):
    """lmstudio-ai/lmstudio-bug-tracker#502"""
    pair = loading.load_pair(
        *mismatched, torch.float32, get_device("cpu"), allow_tokenizer_mismatch=True
    )
    rows = engine(5, pair.draft, target=pair.target).generate(toys.PROMPTS, 12)
    assert lists(rows) == [text[:12].tolist() for text in toys.references()]


@pytest.mark.parametrize("option", ["assistant_tokenizer"])
def test_c4_a_tokenizer_of_the_draft_is_refused_by_name(option):
    """huggingface/transformers#46936"""
    given = {option: tiny_checkpoints.char_tokenizer()}
    given["tokenizer"] = tiny_checkpoints.word_tokenizer()
    with no_forward(toys.target()), pytest.raises(UnsupportedOptionError, match=option):
        gaudi_spec.generate(toys.target(), toys.PROMPTS[3][None], max_new_tokens=3, **given)


# E. Batches, padding, positions


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_e1_each_row_equals_its_own_run(rows):
    """huggingface/transformers#32165"""
    # A draft that is right after some tokens and wrong after others: rows accept unlike lengths.
    prompts = toys.PROMPTS[:rows]
    running, spread = engine(5, "noisy"), set()
    texts = [[] for _ in prompts]
    for outcome in running.cycles(prompts, 40):
        spread.add(len({facts.n_accepted for facts in outcome}) > 1)
        for text, facts in zip(texts, outcome):
            text += facts.tokens
    assert texts == lists(toys.references()[:rows])
    assert rows == 1 or True in spread
    assert texts == [lists(engine(5, "noisy").generate([p], 40))[0] for p in prompts]


@pytest.mark.parametrize("option", [{"num_return_sequences": 2}, {"num_beams": 2}], ids=str)
def test_e1_more_sequences_and_beams_are_refused_before_any_forward(option):
    """huggingface/transformers#29769"""
    named = "|".join(option)
    with no_forward(toys.target()), pytest.raises(UnsupportedOptionError, match=named) as caught:
        gaudi_spec.generate(
            toys.target(), toys.PROMPTS[3][None], assistant_model=toys.target(), **option
        )
    assert isinstance(caught.value, ValueError)


def test_e3_no_row_sees_another_one():
    """vllm-project/vllm#14645"""
    # Token ranges are disjoint: an id says which row it came from.
    prompts = [torch.arange(3 + 20 * r, 3 + 20 * r + 5 + 3 * r) for r in range(4)]
    alone = [engine().generate([prompt], 24)[0].tolist() for prompt in prompts]
    assert len({tuple(text) for text in alone}) == 4
    running = engine()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 0, 3]):
        got = running.generate([prompts[i] for i in order], 24)
        assert lists(got) == [alone[i] for i in order]
    assert lists(running.generate([prompts[1]], 24)) == [alone[1]]  # three rows lie idle


@pytest.mark.parametrize("given", [True, False], ids=["mask", "inferred"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_e5_left_padding_changes_neither_text_nor_acceptance(family, given):
    """huggingface/transformers#26892"""
    model, prompt = toys.target(family), toys.PROMPTS[2]
    assert 0 not in prompt.tolist()
    seen = set()
    for pads in range(10):
        ids = torch.cat([torch.zeros(pads, dtype=torch.long), prompt])[None]
        options = {"attention_mask": (ids != 0).long()} if given else {}
        got = gaudi_spec.generate(
            model,
            ids,
            assistant_model=toys.drafts(family)["noisy"],
            num_assistant_tokens=5,
            max_new_tokens=18,
            **options,
        )
        assert torch.equal(got[0, ids.shape[1] :], toys.references(family)[2][:18])
        report = gaudi_spec.last_report()
        seen.add((report.proposed, report.accepted, report.cycles))
    assert len(seen) == 1


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_e5_zeros_inside_the_mask_are_skipped(family):
    """huggingface/transformers#27503"""
    prompt, model = toys.PROMPTS[3], toys.target(family)
    spread = torch.stack([prompt, torch.full_like(prompt, 5)], 1).reshape(1, -1)
    mask = torch.tensor([1, 0]).repeat(len(prompt))[None]
    got = gaudi_spec.generate(
        model,
        spread,
        attention_mask=mask,
        assistant_model=toys.drafts(family)["noisy"],
        max_new_tokens=20,
    )
    assert torch.equal(got[0, spread.shape[1] :], toys.references(family)[3][:20])


def test_e7_a_round_without_acceptance_adds_exactly_one_token():
    """lucidrains/speculative-decoding#3"""
    rejected = 0
    for outcome in engine(5, "unrelated").cycles(toys.PROMPTS[:2], 30):
        for facts in outcome:
            assert facts.n_emitted == len(facts.tokens)
            if facts.n_proposed:
                assert facts.n_emitted == facts.n_accepted + 1
                rejected += facts.n_accepted == 0
    assert rejected > 20


@pytest.mark.parametrize("budgets", [[1, 20], [20, 1], [1, 1], [2, 20], [7, 6]], ids=str)
@pytest.mark.parametrize("drafted_by", DRAFTS)
def test_e9_a_row_with_little_room_left_does_not_disturb_another(budgets, drafted_by):
    """vllm-project/vllm#7508"""
    running = engine(5, drafted_by)
    rows = running.generate(toys.PROMPTS[2:4], budgets)
    assert lists(rows) == [t[:n].tolist() for t, n in zip(toys.references()[2:4], budgets)]
    assert running.report.emitted == budgets


@pytest.mark.parametrize("new", [1, 2, 3, 6])
def test_e9_the_last_positions_of_the_model_can_be_used(new):
    """vllm-project/vllm#5302"""
    prompts = toys.prompts(256 - new, 20, seed=31)
    rows = engine(5).generate(prompts, new)
    assert lists(rows) == reference(toys.target(), prompts, new)


# F. Caches, rollback, reuse


def buffers(running):
    caches = running.runtime.target.cache, running.runtime.drafter.model.cache
    return [*(t for c in caches for t in (*c.keys, *c.values)), running.runtime.state.tokens]


@pytest.mark.parametrize("drafted_by", DRAFTS)
def test_f1_buffers_keep_storage_and_shape_in_every_round(drafted_by):
    """huggingface/transformers#34797"""
    running, text = engine(3, drafted_by), []
    facts_of_round = []
    for (facts,) in running.cycles([toys.PROMPTS[3]], 40):
        facts_of_round.append([(b.data_ptr(), tuple(b.shape)) for b in buffers(running)])
        text += facts.tokens
    assert all(facts == facts_of_round[0] for facts in facts_of_round)
    assert text == toys.references()[3].tolist()
    kept = facts_of_round[0]
    running.generate([toys.PROMPTS[2]], 30)
    assert [(b.data_ptr(), tuple(b.shape)) for b in buffers(running)] == kept


def fresh_cache(model, tokens, slots):
    """Returns a cache filled by one plain pass over `tokens`."""
    adapter = HFCausalLM(model, 1, slots)
    with torch.no_grad():
        adapter.fill(tokens[None], torch.arange(len(tokens))[None])
    return adapter.cache


@pytest.mark.parametrize("drafted_by", DRAFTS)
def test_f3_both_caches_hold_the_committed_tokens_after_every_round(drafted_by):
    """lablup/mlxcel#994"""
    running, prompt = engine(3, drafted_by), toys.PROMPTS[3]
    known = prompt.tolist()
    for (facts,) in running.cycles([prompt], 20):
        known += facts.tokens
        # The last token is not fed yet; nor is the draft's last one, which its next round reads.
        for adapter, lag in ((running.runtime.target, 1), (running.runtime.drafter.model, 2)):
            held = len(known) - lag
            want = fresh_cache(adapter.model, torch.tensor(known[:held]), adapter.slots)
            for mine, right in zip(
                adapter.cache.keys + adapter.cache.values, want.keys + want.values
            ):
                torch.testing.assert_close(mine[:held], right[:held], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 3, 5, 16])
def test_f3_a_perfect_draft_is_accepted_to_the_end(k):
    """vllm-project/vllm#9730"""
    running = engine(k, "self")
    running.generate([toys.PROMPTS[3]], 200)
    report = running.report
    assert report.acceptance_rate == 1.0
    assert report.cycles == -(-200 // (k + 1))


@pytest.mark.parametrize(
    "ks", [(3, 0, 0, 3), (0, 3), (3, 0, 3, 0, 0, 0, 3), (1, 0, 5, 2), (0, 0, 0, 0, 0, 4)], ids=str
)
def test_f5_a_draft_is_right_again_after_rounds_without_it(ks):
    """vllm-project/vllm-metal#716"""
    for drafted_by in DRAFTS:
        running = engine(5, drafted_by)
        rows = running.generate(toys.PROMPTS, 40, schedule=Pattern(*ks))
        assert lists(rows) == lists(toys.references())
        if drafted_by == "self":
            assert running.report.acceptance_rate == 1.0


def test_f7_a_given_cache_is_refused_by_name_before_any_forward():
    """huggingface/transformers#31644"""
    model, ids = toys.target(), toys.PROMPTS[3][None]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with no_forward(model), pytest.raises(UnsupportedOptionError, match="past_key_values"):
        gaudi_spec.generate(model, ids, past_key_values=cache, assistant_model=model)


def test_f7_an_empty_cache_to_be_filled_is_refused_too():
    """huggingface/transformers#24841"""
    model, ids, cache = toys.target(), toys.PROMPTS[3][None], DynamicCache()
    with pytest.raises(UnsupportedOptionError, match="past_key_values"):
        gaudi_spec.generate(model, ids, past_key_values=cache, max_new_tokens=4)


def test_f7_a_second_turn_with_all_ids_equals_one_run():
    """huggingface/transformers#31644"""
    model, draft = toys.target(), toys.drafts()["noisy"]
    ids = toys.PROMPTS[3][None]
    mask = torch.ones_like(ids)
    for width in (10, 14):
        want = toys.greedy(model, ids[0], width)
        ids = gaudi_spec.generate(
            model,
            ids,
            attention_mask=mask,
            assistant_model=draft,
            num_assistant_tokens=5,
            max_new_tokens=width,
        )
        assert torch.equal(ids[0, -width:], want)
        ids = torch.cat([ids, torch.tensor([[9, 33, 21]])], 1)  # the user's next words
        mask = torch.ones_like(ids)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("gemma2", "eager"),  # its soft-capped scores exist in eager attention only
        ("gemma3", "eager"),
        ("gemma3", "sdpa"),
        ("mistral-window", "eager"),
        ("mistral-window", "sdpa"),
    ],
)
def test_f10_sliding_windows_hold_beyond_the_window(family, attention):
    """huggingface/transformers#48280"""
    model, draft = (copy.deepcopy(m) for m in (toys.target(family), toys.drafts(family)["noisy"]))
    assert model.config.sliding_window == 8
    for changed in (model, draft):
        changed.set_attn_implementation(attention)
    prompts = toys.prompts(3, 8, 20, seed=14)
    want = reference(model, prompts, 40)
    unlimited = toys.build(family, sliding_window=256)
    unlimited.load_state_dict(model.state_dict())
    assert reference(unlimited, prompts, 40) != want  # so the window matters
    for k in (1, 5, 16):  # the last one is wider than the window
        assert lists(engine(k, draft, target=model).generate(prompts, 40)) == want


STATEFUL = {
    "mamba": dict(hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2),
    "mamba2": dict(
        hidden_size=16, state_size=4, num_hidden_layers=2, head_dim=8, num_heads=4, n_groups=1
    ),
    "lfm2": dict(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    ),
    "jamba": dict(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=4,
        mamba_d_conv=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_f12_models_whose_state_cannot_roll_back_are_refused_by_name(kind, role):
    """huggingface/transformers#46937"""
    config = AutoConfig.for_model(kind, vocab_size=toys.VOCAB, **STATEFUL[kind])
    model = AutoModelForCausalLM.from_config(config)
    pair = (model, toys.target()) if role == "target" else (toys.target(), model)
    for allowed in (False, True):
        with pytest.raises(UnsupportedModelError) as caught:
            SpeculativeEngine(*pair, SpecConfig(allow_untested_models=allowed))
        message = str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert role in message and type(model).__name__ in message and "rolled back" in message


@pytest.mark.parametrize("who", ["target", "both"])
def test_f14_a_saved_use_cache_false_gives_one_warning_and_the_right_text(who):
    """huggingface/transformers#24177"""
    model, draft = copy.deepcopy(toys.target()), copy.deepcopy(toys.drafts()["noisy"])
    for changed in (model, draft) if who == "both" else (model,):
        changed.config.use_cache = changed.generation_config.use_cache = False
    with pytest.warns(UserWarning, match="use_cache") as caught:
        options = {"assistant_model": draft, "num_assistant_tokens": 5, "max_new_tokens": 30}
        got = gaudi_spec.generate(model, toys.PROMPTS[3][None], **options)
    assert len(caught) == 1
    assert torch.equal(got[0, 17:], toys.references()[3][:30])
    report = gaudi_spec.last_report()
    assert report.target_prefill_forwards == 1 and report.cycles < 30


@pytest.fixture
def poisoned():
    """Makes PyTorch fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
def test_f16_no_uninitialised_memory_is_read(poisoned):
    """huggingface/optimum-habana#422"""
    running = engine(5, batch_size=6, max_length=100)
    rows = running.generate(toys.PROMPTS, 40)
    assert lists(rows) == lists(toys.references())
    assert all(torch.isfinite(buffer).all() for buffer in buffers(running))


def test_f16_a_failed_request_leaves_nothing_behind():
    """huggingface/optimum-habana#422"""
    model = copy.deepcopy(toys.target())
    running = engine(5, target=model)
    kept = model.model.norm.weight.clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(gaudi_spec.NumericalError, match="row 0"):
        running.generate(toys.PROMPTS, 20)
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    assert lists(running.generate(toys.PROMPTS, 40)) == lists(toys.references())


# G. A draft with less room than the target


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("length", [10, 31, 32, 60])
def test_g1_a_draft_with_fewer_positions_stops_helping_with_one_warning(length, family):
    """vllm-project/vllm#22935"""
    draft = toys.build(family, seed=3, max_position_embeddings=32)
    prompts = toys.prompts(length, 4, seed=17)
    running = engine(5, draft, family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = running.generate(prompts, 50)
    assert lists(rows) == reference(toys.target(family), prompts, 50)
    assert running.report.proposed > 0
    assert sum("maximum positions" in str(w.message) for w in caught) == 1


def test_g1_a_perfect_draft_is_accepted_up_to_its_last_position():
    """vllm-project/vllm#57941"""
    draft = copy.deepcopy(toys.target())
    draft.config.max_position_embeddings = 32
    running = engine(5, draft)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (row,) = running.generate([toys.PROMPTS[2]], 50)
    assert row.tolist() == toys.greedy(toys.target(), toys.PROMPTS[2], 50).tolist()
    assert running.report.acceptance_rate == 1.0
    assert running.report.accepted >= 32 - len(toys.PROMPTS[2]) - 6


@pytest.mark.parametrize("room", [48, 64, 200])
def test_g4_both_caches_follow_the_configured_length(room):
    """lmstudio-ai/lmstudio-bug-tracker#499"""
    running = engine(5, max_length=room)
    running.generate([toys.PROMPTS[2]], 8)
    assert running.runtime.target.cache.slots == running.runtime.drafter.model.cache.slots == room
    running.generate([toys.PROMPTS[2]], room - 9)  # exactly full
    assert running.runtime.target.cache.slots == running.runtime.drafter.model.cache.slots == room
    with pytest.raises(gaudi_spec.InputError, match=str(room)):
        running.generate([toys.PROMPTS[2]], room - 8)


@pytest.mark.parametrize("positions", [32, 512])
def test_g4_the_drafts_cache_is_never_longer_than_its_positions(positions):
    """lmstudio-ai/lmstudio-bug-tracker#499"""
    draft = toys.build(seed=3, max_position_embeddings=positions)
    running = engine(5, draft, max_length=200)
    running.generate([toys.PROMPTS[2]], 8)
    assert running.runtime.target.cache.slots == 200
    assert running.runtime.drafter.model.cache.slots == min(positions, 200)


# J. Results, streaming, validation


@pytest.mark.parametrize("k", KS)
def test_j3_a_stream_concatenates_to_the_text_for_every_k_and_stop(k):
    """vllm-project/vllm#30204, turboderp-org/exllamav2#108"""
    prompt, text = toys.PROMPTS[3], toys.references()[3].tolist()
    tokenizer = tiny_checkpoints.byte_tokenizer(text)  # characters of up to four tokens
    whole = tokenizer.decode(text[:24])
    stops = [{"eos_token_id": text[at]} for at in first_occurrences(text[:24])]
    stops += [{"stop_strings": whole[i : i + 2]} for i in range(0, len(whole) - 2, 3)]
    lengths = set()
    for stop in [{}, *stops[k % 3 :: 3]]:
        if not "".join(stop.get("stop_strings", "")).isascii():
            continue  # test_stopping.py has those that this Transformers can look for
        streamer, recorder = TextIteratorStreamer(tokenizer, skip_prompt=True), Streamer()
        put, end = streamer.put, streamer.end
        streamer.put = lambda value, put=put, to=recorder: (to.put(value), put(value))
        streamer.end = lambda end=end, to=recorder: (to.end(), end())
        got = gaudi_spec.generate(
            toys.target(),
            prompt[None],
            assistant_model=toys.drafts()["noisy"],
            num_assistant_tokens=k,
            max_new_tokens=24,
            streamer=streamer,
            tokenizer=tokenizer,
            **stop,
        )
        new = got[0, len(prompt) :].tolist()
        assert "".join(streamer) == tokenizer.decode(new)
        assert new == text[: len(new)] and recorder.ends == 1
        assert recorder.put_values == [prompt[None].tolist(), *([token] for token in new)]
        lengths.add(len(new))
    assert len(lengths) > 5 and not whole.isascii()


@pytest.mark.parametrize("eos", [5, [46, 67], None])
def test_j7_a_missing_pad_token_is_filled_in_before_any_work(eos):
    """huggingface/transformers#22211"""
    model = copy.deepcopy(toys.target())
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = None, eos
    ids, mask = toys.left_pad(toys.PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 24}
    got = gaudi_spec.generate(model, ids, assistant_model=toys.drafts()["noisy"], **options)
    assert got.tolist() == model.generate(ids, do_sample=False, **options).tolist()
    assert model.generation_config.pad_token_id is None


def test_j7_a_pad_token_that_is_no_id_is_refused_before_any_work():
    """huggingface/transformers#22211"""
    model = toys.target()
    with no_forward(model), pytest.raises(ConfigError, match="pad"):
        gaudi_spec.generate(model, toys.PROMPTS[3][None], pad_token_id="<pad>", eos_token_id=5)


# K. Draft length, thresholds, no speed-up


@pytest.mark.parametrize("drafted_by", ["self", "unrelated"])
def test_k1_drafting_that_does_not_pay_turns_itself_off_and_says_why(drafted_by):
    """huggingface/transformers#36337, #26565; ggml-org/llama.cpp#10664"""
    as_large = {k: 1 + 1.05 * k for k in range(6)}  # a draft as large as the target
    times = as_large if drafted_by == "self" else {k: 1 + 0.24 * k for k in range(6)}
    running = engine(5, drafted_by)
    rows = running.generate(toys.PROMPTS, 40, schedule=toys.Told(5, times))
    assert lists(rows) == lists(toys.references())
    report = running.report
    steps = sum(times[k] * cycles for k, cycles in report.k_trace)
    assert steps / 40 < 1.05 and report.k_trace[-1][0] == 0
    assert "off, since with K = 1 a cycle takes" in report.schedule_reason
    assert report.to_dict()["schedule_reason"] == report.schedule_reason


def test_k1_a_slow_down_is_shown_as_one_with_the_reason():
    """The report has the time of each phase, acceptance, and what a cycle takes and emits."""
    running = engine(5, "unrelated")
    running.generate(toys.PROMPTS[:1], 30, schedule=toys.Told(5, {k: 1 + k for k in range(6)}))
    slow, plain = results.Run(30), results.Run(30)
    for run, seconds in ((slow, 4.0), (plain, 2.0)):
        run.seconds.append(seconds)
        run.reports.append(running.report)
    shown = results.speculation_block(slow, plain)
    assert "Speed-up over plain decoding        = 0.50x" in shown
    assert "off, since with K = 1 a cycle takes 2.00 plain steps and is expected to emit" in shown
    for name in ("Acceptance rate", "draft ", "verify ", "Cycles by K (auto)"):
        assert name in shown


@pytest.mark.parametrize("threshold", [0, 0.4, 1.0])
def test_k3_every_threshold_gives_the_same_text_in_the_same_shapes(threshold):
    """huggingface/transformers#33657, #33258"""
    config = SpecConfig(num_assistant_tokens=4, assistant_confidence_threshold=threshold)
    running = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config)
    for _ in range(2):
        rows = running.generate(toys.PROMPTS, 40)
        assert lists(rows) == lists(toys.references())
    report = running.report
    assert report.proposed >= report.drafts > 0
    assert (report.proposed == report.drafts) == (threshold == 1.0)  # at least one, at 1 just that
    widths = {shape[-1] for shape in running.runtime.target.shapes}
    assert widths <= {*running.config.prefill_chunks, 1, 2, 3, 5}


def test_k3_a_single_possible_token_is_certain():
    config = SpecConfig(num_assistant_tokens=4, assistant_confidence_threshold=1.0)
    running = SpeculativeEngine(toys.target(), toys.drafts()["self"], config)
    only = Sampling(do_sample=True, top_k=1, seed=0)
    assert lists(running.generate(toys.PROMPTS, 40, sampling=only)) == lists(toys.references())
    assert running.report.proposed_at[3] > 0


@pytest.mark.parametrize("k", [1, 3, 6])
def test_k5_no_way_in_drafts_less_than_another(k, tmp_path, capsys):
    """ggml-org/llama.cpp#12968"""
    rounds, model = -(-30 // (k + 1)), toys.target()
    running = engine(k, "self")
    running.generate([toys.PROMPTS[3]], 30)
    assert running.report.cycles == rounds
    options = {"assistant_model": model, "num_assistant_tokens": k, "max_new_tokens": 30}
    gaudi_spec.generate(model, toys.PROMPTS[3][None], **options)
    assert gaudi_spec.last_report().cycles == rounds
    path = str(tiny_checkpoints.save(tmp_path / "model", model))
    arguments = ["generate", "--model_name_or_path", path, "--assistant_model", path, "--quiet"]
    arguments += ["--num_assistant_tokens", str(k), "--max_new_tokens", "30", "--warmup", "0"]
    assert cli.main([*arguments, "--n_iterations", "1", "--prompt", "ba da fu"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["cycles"] == rounds
    assert (values["schedule"], values["k_trace"]) == ("constant", [[k, rounds]])


def test_k8_a_batch_that_makes_verifying_dear_is_decoded_plainly():
    """vllm-project/vllm#4266, #2607"""
    prompts = toys.prompts(5, 9, 13, 4, 8, 6, 7, 3)
    alone = {k: 1 + 0.1 * k for k in range(5)}  # plain steps of a batch of one, and of eight
    crowd = {k: 1 + 1.2 * k for k in range(5)}
    want = reference(toys.target(), prompts, 30)
    for rows, times, drafts in ((1, alone, True), (8, crowd, False)):
        running = engine(4, "noisy")
        texts = running.generate(prompts[:rows], 30, schedule=toys.Told(4, times))
        assert lists(texts) == want[:rows]
        assert any(k for k, _ in running.report.k_trace) == drafts
        assert running.report.to_dict()["batch_size"] == rows


# L. Measuring


def test_l1_counters_are_those_of_a_hand_computed_script():
    """sgl-project/sglang#11572; vllm-project/vllm#56101, #10914; NVIDIA/TensorRT-LLM#14724

    K = 3, two prompts in a batch of four rows. Row 0 ends its text at its sixth token, a drafted
    one inside the second block; row 1 fills its budget of eight.
    """
    first, second = (toys.references()[row] for row in (2, 3))
    end = int(first[5])
    assert end not in first[:5] and end not in second[:8]
    running = engine(3, "self", batch_size=4)
    running.generate(toys.PROMPTS[2:4], 8)
    texts = [torch.cat([toys.PROMPTS[r], toys.references()[r]]) for r in (2, 3)]
    script = toys.ScriptedDrafter(
        [*texts, *[torch.zeros(9, dtype=torch.long)] * 2],
        [[3, 0, 3, 3], [3, 2, 3, 3], [3, 3, 3, 3]],
    )
    running.runtime.drafter = running.runtime.parts.drafter = script
    rows = running.generate(toys.PROMPTS[2:4], 8, eos_token_ids=[end])
    assert lists(rows) == [first[:6].tolist(), second[:8].tolist()]
    report = running.report
    assert (report.cycles, report.target_forwards, report.k_trace) == (3, 3, [[3, 3]])
    # Row 0: 3 of 3 and its own token; then 3 proposed, of which the second ends the text.
    # Row 1: 0 of 3, 2 of 3, 3 of 3, each time with a token of the target's own.
    assert (report.proposed_at, report.accepted_at) == ([5, 5, 5], [4, 4, 2])
    assert (report.drafts, report.proposed, report.accepted) == (5, 15, 10)
    assert (report.emitted, report.target_tokens) == ([6, 8], 4)
    assert report.emitted_tokens == report.accepted + report.target_tokens == 14
    assert report.acceptance_rate == 10 / 15 and report.mean_acceptance_length == 1 + 10 / 5
    assert report.acceptance_by_position == [4 / 5, 4 / 5, 2 / 5]
    assert report.finish_reasons == ["stop", "length"]


@pytest.mark.parametrize("schedule", ["constant", "auto", "heuristic", "confidence"])
@pytest.mark.parametrize("drafted_by", DRAFTS)
def test_l1_no_schedule_counts_what_was_not_proposed_or_not_returned(drafted_by, schedule):
    """Short last blocks, ends of text and spare rows among them."""
    running = engine(4, drafted_by, schedule=schedule, batch_size=6)
    end = int(toys.references()[1][9])
    for budget in (1, 2, 7, 23):
        rows = running.generate(toys.PROMPTS, budget, eos_token_ids=[end])
        report = running.report
        assert report.emitted == [len(row) for row in rows]
        assert report.emitted_tokens == report.accepted + report.target_tokens
        assert 0 <= (report.acceptance_rate or 0) <= 1
        assert report.drafts <= report.proposed <= 4 * report.drafts or not report.drafts
        assert all(0 <= a <= p for a, p in zip(report.accepted_at, report.proposed_at))
        assert sum(cycles for _, cycles in report.k_trace) == report.cycles
    assert running.report.proposed > 0 or schedule == "auto"


def test_l2_what_is_slow_at_first_is_in_no_figure(tmp_path, capsys, monkeypatch):
    """huggingface/optimum-habana#715, #48; Lightning-AI/lightning-thunder#2638"""
    late = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    stream, calls = SpeculativeEngine.stream, []

    def slow_at_first(self, *given, **options):
        calls.append(1)
        late[0] += 1000.0 if len(calls) <= 2 else 0.0
        return stream(self, *given, **options)

    monkeypatch.setattr(SpeculativeEngine, "stream", slow_at_first)
    monkeypatch.setattr(job, "time", clock)
    target, draft = map(str, tiny_checkpoints.make(tmp_path))
    arguments = ["generate", "--model_name_or_path", target, "--assistant_model", draft]
    arguments += ["--max_new_tokens", "8", "--n_iterations", "2", "--prompt", "ba da fu", "--quiet"]
    seen = {}
    for warmup in ("2", "0"):
        calls.clear()
        assert cli.main([*arguments, "--warmup", warmup]) == 0
        out = capsys.readouterr().out
        seen[warmup] = json.loads(out.splitlines()[-1])
        assert ("There was no warm-up" in out) == (warmup == "0")
        assert ("= 200" in out.split("Graph compilation duration")[1][:25]) == (warmup == "2")
    assert seen["2"]["avg_e2e_latency"] < 500 < seen["0"]["avg_e2e_latency"]
    assert seen["2"]["throughput"] > 100 * seen["0"]["throughput"]
    assert [seen[w]["warmup_iterations"] for w in ("2", "0")] == [2, 0]


def test_l5_no_test_of_speed_reads_a_clock():
    """huggingface/transformers#48000: forwards are counted instead."""
    clock = re.compile(r"^ *assert .*(perf_counter|time\(\)|\bseconds\[)", re.M)
    for path in Path(__file__).parent.glob("test_*.py"):
        assert clock.search(path.read_text()) is None, path
