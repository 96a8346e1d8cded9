"""Sampling and processors together with stopping, streaming, results and several sequences."""

from __future__ import annotations

import warnings

import pytest
import tiny_checkpoints
import torch
import toys
from test_host import ENDS, Rotate
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import RepetitionPenaltyLogitsProcessor

import gaudi_spec
from gaudi_spec import BatchStreamer, Sampling, SpecConfig, SpeculativeEngine

IDS = toys.PROMPTS[3][None]
NEW = 20
COUPLED = SpecConfig(verifier="coupled")
DRAWN = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3}


def theirs(ids=IDS, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = dict(max_new_tokens=NEW, do_sample=False) | options
        return toys.target().generate(ids, **options)


def ours(ids=IDS, draft="noisy", k=5, **options):
    options = dict(max_new_tokens=NEW, num_assistant_tokens=k) | options
    if draft is not None:
        options["assistant_model"] = toys.drafts()[draft]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gaudi_spec.generate(toys.target(), ids, **options)


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_sequences_of_one_prompt_are_rows_with_noise_of_their_own(verifier):
    config = SpecConfig(verifier=verifier)
    got = ours(num_return_sequences=4, seed=5, spec_config=config, **DRAWN)
    assert got.shape[0] == 4 and len({tuple(row.tolist()) for row in got}) == 4
    same = ours(IDS.repeat(4, 1), seed=5, spec_config=config, **DRAWN)
    assert torch.equal(got, same)
    assert not torch.equal(got, ours(num_return_sequences=4, seed=6, spec_config=config, **DRAWN))


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_scores_of_a_drawn_text_are_what_it_was_drawn_from(verifier):
    out = ours(
        seed=1,
        spec_config=SpecConfig(verifier=verifier),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **DRAWN,
    )
    text, width = out.sequences, IDS.shape[1]
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
        ]
    )
    with torch.no_grad():
        logits = toys.target()(input_ids=text).logits[0]
    assert len(out.scores) == len(out.logits) == NEW
    for t in range(NEW):
        raw = logits[width + t - 1][None]
        torch.testing.assert_close(out.logits[t], raw, atol=1e-4, rtol=1e-4)
        want = processors(text[:, : width + t], raw.clone())
        torch.testing.assert_close(out.scores[t], want, atol=1e-4, rtol=1e-4)
        assert torch.isfinite(out.scores[t][0, text[0, width + t]])


def test_scores_behind_a_processor_of_the_user_are_those_of_transformers():
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want = theirs(logits_processor=LogitsProcessorList([Rotate()]), **options)
    got = ours(k=4, logits_processor=LogitsProcessorList([Rotate()]), **options)
    assert torch.equal(got.sequences, want.sequences)
    for mine, other in zip((*got.scores, *got.logits), (*want.scores, *want.logits), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draft", ["self", "unrelated"])
def test_a_processor_is_not_called_past_a_stop(draft):
    """Also where the stop lies inside a block."""

    def third(ids, scores):
        return torch.full((len(ids),), ids.shape[1] >= IDS.shape[1] + 3)

    calls = []
    for run, options in ((theirs, {}), (ours, {"draft": draft, "k": 6})):
        processor = Rotate(ENDS)
        options |= {"logits_processor": LogitsProcessorList([processor])}
        text = run(stopping_criteria=[third], **options)
        calls.append((text.tolist(), processor.calls))
    assert calls[0] == calls[1] and calls[0][0][0][IDS.shape[1] + 3 :] == []


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_stopped_and_streamed_drawn_text_is_a_prefix_of_the_unstopped_one(k):
    ids, mask = toys.left_pad(toys.PROMPTS[1:4])
    options = {"seed": [7, 8, 9], "spec_config": COUPLED, "attention_mask": mask} | DRAWN
    plain = ours(ids, draft=None, **options)[:, ids.shape[1] :].tolist()
    stop = plain[0][6]
    tokenizer = tiny_checkpoints.word_tokenizer()
    streamer = BatchStreamer(tokenizer)
    got = ours(ids, k=k, eos_token_id=stop, pad_token_id=0, streamer=streamer, **options)
    got = got[:, ids.shape[1] :].tolist()
    texts = [""] * len(ids)
    for row, text in streamer:
        texts[row] += text
    for row, (mine, whole) in enumerate(zip(got, plain)):
        end = whole.index(stop) + 1 if stop in whole else NEW
        assert mine[:end] == whole[:end] and not any(mine[end:])
        assert texts[row] == tokenizer.decode(whole[:end], skip_special_tokens=True)
    assert "stop" in gaudi_spec.last_report().finish_reasons


def test_the_next_turn_of_a_drawn_chat_is_what_it_is_without_kept_caches():
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], COUPLED)
    sampling = Sampling(do_sample=True, seed=3, temperature=0.9)
    turn, texts = toys.PROMPTS[2], []
    for reuse in (False, True):
        prompt = turn
        for _ in range(3):
            new = engine.generate([prompt], 9, sampling=sampling, reuse=reuse)[0]
            prompt = torch.cat([prompt, new, turn[:3]])
        texts.append(prompt.tolist())
        assert (engine.report.reused_tokens > 0) == reuse
    assert texts[0] == texts[1]
