"""What is streamed, returned beside the tokens, and kept for the next turn."""

from __future__ import annotations

import asyncio
import threading
import warnings

import pytest
import tiny_checkpoints
import torch
import toys
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

import gaudi_spec
from gaudi_spec import BatchStreamer, SpecConfig, SpeculativeEngine, TextDecoder
from gaudi_spec.errors import ConfigError, GaudiSpecError, InputError

ROW = 3
IDS = toys.PROMPTS[ROW][None]
TEXT = toys.references()[ROW].tolist()
TOKENIZER = tiny_checkpoints.byte_tokenizer(TEXT)
NEW = 30


def theirs(ids=IDS, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return toys.target().generate(ids, do_sample=False, **dict(max_new_tokens=NEW) | options)


def ours(ids=IDS, draft="noisy", k=5, **options):
    options = dict(max_new_tokens=NEW, assistant_model=toys.drafts()[draft]) | options
    return gaudi_spec.generate(toys.target(), ids, num_assistant_tokens=k, **options)


class Recorder:
    """A streamer that remembers its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((value.shape, value.tolist(), value.device.type))

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize("k, draft", [(1, "self"), (3, "noisy"), (5, "self"), (8, "unrelated")])
def test_streamers_get_the_calls_of_plain_decoding_whatever_ends_the_text(k, draft):
    """Prompt, one token a step, one end; the end of text at every offset of a block.

    J3: vllm-project/vllm#26027, #30204
    """
    stops = [[TEXT[at]] for at in range(0, NEW, 1 if k == 5 else 7)]
    for stop in [None, *stops]:
        want, got = Recorder(), Recorder()
        theirs(streamer=want, eos_token_id=stop)
        ours(k=k, draft=draft, streamer=got, eos_token_id=stop)
        assert got.calls == want.calls


def test_streamers_of_batches_get_what_plain_decoding_gives_them():
    ids, mask = toys.left_pad(toys.PROMPTS)
    options = {"attention_mask": mask, "eos_token_id": [67, 46]}
    want, got = Recorder(), Recorder()
    theirs(ids, streamer=want, **options)
    ours(ids, streamer=got, **options)
    assert got.calls == want.calls and len({tuple(c[1]) for c in got.calls[1:-1]}) > 8


@pytest.mark.parametrize("skip", [False, True])
def test_text_streamers_print_the_same(skip, capsys):
    texts = []
    for run in (theirs, ours):
        run(streamer=TextStreamer(TOKENIZER, skip_prompt=skip))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "\N{GRINNING FACE}" in texts[0]


def test_iterators_of_text_concatenate_to_the_text():
    for options in ({}, {"eos_token_id": TEXT[13]}):
        streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=ours, kwargs={"streamer": streamer, **options})
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert text == TOKENIZER.decode(theirs(**options)[0, IDS.shape[1] :])

    async def gather():
        streamer = AsyncTextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=ours, kwargs={"streamer": streamer})
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return "".join(pieces)

    assert asyncio.run(gather()) == TOKENIZER.decode(TEXT[:NEW])


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_a_batch_streamer_concatenates_to_every_text(k):
    """Of rows that end at different tokens, inside of characters too.

    J3: turboderp-org/exllamav2#108
    """
    ids, mask = toys.left_pad(toys.PROMPTS)
    for stop in ([], [TEXT[11]], [TEXT[20], 46]):
        streamer = BatchStreamer(TOKENIZER, timeout=60)
        options = {"attention_mask": mask, "eos_token_id": stop, "streamer": streamer, "k": k}
        got = ours(ids, **options)
        texts = [""] * len(ids)
        for row, text in streamer:
            texts[row] += text
        lengths = gaudi_spec.last_report().emitted
        want = [row[ids.shape[1] :][:n] for row, n in zip(got, lengths)]
        assert texts == [TOKENIZER.decode(row, skip_special_tokens=True) for row in want]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, tiny_checkpoints.word_tokenizer()])
def test_decoded_pieces_concatenate_and_hold_no_half_characters(tokenizer):
    for ids in [*(text.tolist() for text in toys.references()), TEXT[:11], TEXT[:12]]:
        decoder = TextDecoder(tokenizer)
        pieces = [decoder.add(token) for token in ids]
        assert "".join([*pieces, decoder.flush()]) == tokenizer.decode(ids)
        assert decoder.flush() == ""
        assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces)


def test_events_say_row_token_origin_and_end():
    """J5: vllm-project/vllm#45678"""
    config = SpecConfig(num_assistant_tokens=5)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config)
    events = list(engine.stream(toys.PROMPTS, NEW, eos_token_ids=[67, 46]))
    for row, text in enumerate(toys.references()):
        own = [event for event in events if event.row == row]
        stop = next((i + 1 for i, t in enumerate(text[:NEW].tolist()) if t in (67, 46)), NEW)
        assert [event.token for event in own] == text[:stop].tolist()
        assert [event.finish_reason for event in own[:-1]] == [None] * (stop - 1)
        assert own[-1].finish_reason == engine.report.finish_reasons[row]
        assert own[-1].logits is None and own[-1].scores is None
    assert sum(event.from_draft for event in events) == engine.report.accepted > 0


def test_streamers_that_cannot_work_are_refused_before_any_compute():
    ids, _ = toys.left_pad(toys.PROMPTS)
    handle = toys.target().register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(InputError, match="BatchStreamer"):
            ours(ids, streamer=TextStreamer(TOKENIZER))
        with pytest.raises(ConfigError, match="put"):
            ours(streamer=object())
    finally:
        handle.remove()


def test_a_streamer_that_fails_ends_the_call_as_it_does_plain_decoding():
    class Failing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 4:
                raise RuntimeError("full")

    streamers = Failing(), Failing()
    for run, streamer in zip((theirs, ours), streamers):
        with pytest.raises(RuntimeError, match="full"):
            run(streamer=streamer)
    assert streamers[0].calls == streamers[1].calls
    assert ours()[0, 17:].tolist() == TEXT[:NEW]


def test_a_batch_streamer_raises_an_error_before_the_first_token_too():
    streamer = BatchStreamer(TOKENIZER, timeout=5)
    with pytest.raises(GaudiSpecError, match="num_beams"):
        ours(streamer=streamer, num_beams=2)
    with pytest.raises(GaudiSpecError, match="num_beams"):
        next(streamer)


def test_a_batch_streamer_raises_the_error_of_the_call():
    streamer = BatchStreamer(TOKENIZER, timeout=60)
    with pytest.raises(InputError):
        ours(streamer=streamer, max_new_tokens=10**6)
    with pytest.raises(InputError):
        list(streamer)


# Results


@pytest.mark.parametrize("k, stop", [(1, None), (5, None), (5, TEXT[13]), (8, TEXT[6])])
def test_scores_and_logits_are_those_of_plain_decoding(k, stop):
    options = dict(
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        eos_token_id=stop,
        min_new_tokens=9 if k == 8 else None,
    )
    want, got = theirs(**options), ours(k=k, draft="self", **options)
    assert type(got) is type(want) and got.sequences.tolist() == want.sequences.tolist()
    for name in ("scores", "logits"):
        ours_, theirs_ = torch.stack(got[name]), torch.stack(want[name])
        assert ours_.shape == theirs_.shape and ours_.dtype == theirs_.dtype
        torch.testing.assert_close(ours_, theirs_, atol=2e-4, rtol=1e-4)
    assert (got.scores[0] != got.logits[0]).any() == (k == 8)
    assert not torch.allclose(got.logits[0], want.logits[1], atol=1e-2)


def test_scores_of_a_batch_end_with_each_row():
    ids, mask = toys.left_pad(toys.PROMPTS)
    options = dict(attention_mask=mask, eos_token_id=[67, 46], return_dict_in_generate=True)
    want, got = theirs(ids, **options, output_logits=True), ours(ids, **options, output_logits=True)
    assert got.scores is None and len(got.logits) == len(want.logits)
    for step, (one, other) in enumerate(zip(got.logits, want.logits)):
        for row, count in enumerate(gaudi_spec.last_report().emitted):
            if step < count:
                torch.testing.assert_close(one[row], other[row], atol=2e-4, rtol=1e-4)
            else:
                assert not one[row].any()


def test_logits_are_copied_only_where_they_are_asked_for():
    ours(return_dict_in_generate=True)
    (engine,) = gaudi_spec.hf._engines.values()
    assert (
        engine.runtime.blocks.kept(2) is None and engine.report.host_reads == engine.report.cycles
    )


def test_the_next_turn_feeds_only_what_is_new():
    """Also where the user took a part of the answer back.

    F7: huggingface/transformers#31644
    """
    ids, mask = toys.left_pad(toys.PROMPTS[2:4])
    options = dict(return_dict_in_generate=True, spec_config=SpecConfig(max_length=128))
    turn = ours(ids, attention_mask=mask, **options)
    kept = turn[gaudi_spec.outputs.CACHE_FIELD]
    for back in (0, 7):
        said = toys.prompts(5, 5, seed=4 + back)
        told = turn.sequences[:, : turn.sequences.shape[1] - back]
        longer = torch.cat([told, torch.stack(said)], 1)
        new = torch.ones_like(longer[:, ids.shape[1] :])
        mask = torch.cat([toys.left_pad(toys.PROMPTS[2:4])[1], new], 1)
        again = ours(longer, attention_mask=mask, past_key_values=kept, **options)
        assert again.sequences.tolist() == theirs(longer, attention_mask=mask).tolist()
        report = gaudi_spec.last_report()
        assert report.reused_tokens == int(mask.sum()) - 10 - (2 if back == 0 else 0)
        assert report.target_prefill_forwards <= 1


def test_caches_of_other_models_are_refused():
    kept = ours(return_dict_in_generate=True)[gaudi_spec.outputs.CACHE_FIELD]
    with pytest.raises(ConfigError, match="past_key_values"):
        ours(draft="self", past_key_values=kept)


# Threads and interrupts


def test_threads_with_streams_get_the_serial_results():
    """M9: huggingface/transformers#48286"""
    want = [toys.references()[row][:NEW].tolist() for row in range(5)]
    got = {}

    def work(row):
        streamer = BatchStreamer(TOKENIZER)
        got[row] = ours(toys.PROMPTS[row][None], streamer=streamer)[0, -NEW:].tolist()
        assert "".join(t for _, t in streamer) == TOKENIZER.decode(got[row], True)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[row] for row in range(5)] == want


def test_a_stream_that_another_call_interrupts_says_so():
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"])
    stream = engine.stream(toys.PROMPTS, NEW)
    next(stream)
    engine.generate(toys.PROMPTS, 3)
    with pytest.raises(GaudiSpecError, match="Another call"):
        list(stream)


def test_a_row_that_ended_without_the_draft_is_not_taken_for_one_the_draft_has_read():
    engine = SpeculativeEngine(toys.target(), toys.target(), SpecConfig(num_assistant_tokens=3))
    first = engine.generate(toys.PROMPTS[2:4], [2, 20], schedule=toys.Turns(0, 0, 3, 3))
    turns = [torch.cat(pair) for pair in zip(toys.PROMPTS[2:4], first)]
    got = engine.generate([torch.cat([turn, turn[:1]]) for turn in turns], 20, reuse=True)
    assert engine.report.reused_tokens and engine.report.acceptance_rate == 1.0
    again = [toys.greedy(toys.target(), torch.cat([turn, turn[:1]]), 20) for turn in turns]
    toys.assert_equal_rows(got, again)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("phase", ["draft", "verify", "prefill"])
def test_an_interrupt_leaves_engine_and_caches_usable(at, phase, reuse):
    """Inside of a cycle, between draft and target, and while prompts are read."""
    config = SpecConfig(max_length=96, num_assistant_tokens=5)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config)
    engine.generate(toys.PROMPTS, 4)
    runtime, calls = engine.runtime, []
    target, name = runtime.target, "fill" if phase == "prefill" else "forward"
    model = runtime.drafter.model if phase == "draft" else target
    original = getattr(model, name)

    def interrupted(*args, **kwargs):
        calls.append(name)
        result = original(*args, **kwargs)  # what it writes is there
        if len(calls) > (0 if phase == "prefill" else at):
            raise KeyboardInterrupt
        return result

    setattr(model, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(toys.PROMPTS[::-1], NEW)
    setattr(model, name, original)
    got = engine.generate(toys.PROMPTS[::-1], NEW, reuse=reuse)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references()[::-1]])
    assert engine.runtime is runtime


@pytest.mark.parametrize("count", [1, 9, 40])
def test_a_consumer_that_stops_leaves_engine_and_caches_usable(count):
    config = SpecConfig(max_length=96, num_assistant_tokens=5)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config)
    stream = engine.stream(toys.PROMPTS, NEW)
    for _ in range(count):
        next(stream)
    stream.close()
    got = engine.generate(toys.PROMPTS, NEW, reuse=True)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references()])
