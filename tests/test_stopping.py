"""Stop strings, stopping criteria and time limits end a row where plain `generate` ends it."""

from __future__ import annotations

import itertools
import warnings

import pytest
import tiny_checkpoints
import torch
import toys
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria

import gaudi_spec
from gaudi_spec import SpecConfig, SpeculativeEngine, Steps
from gaudi_spec.errors import ConfigError, InputError

ROW = 3
IDS = toys.PROMPTS[ROW][None]
TEXT = toys.references()[ROW].tolist()
TOKENIZER = tiny_checkpoints.byte_tokenizer(TEXT)
NEW = 24
# In none of the texts; with an end of text plain generate pads rows that have ended.
EOS = next(i for i in range(97) if not any(i in text[:NEW] for text in toys.references()))


def theirs(ids=IDS, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return toys.target().generate(ids, do_sample=False, **dict(max_new_tokens=NEW) | options)


def ours(ids=IDS, draft="self", k=5, **options):
    options = dict(max_new_tokens=NEW, assistant_model=toys.drafts()[draft]) | options
    return gaudi_spec.generate(toys.target(), ids, num_assistant_tokens=k, **options)


def batch() -> dict:
    ids, mask = toys.left_pad(toys.PROMPTS)
    return {"ids": ids, "attention_mask": mask, "eos_token_id": EOS}


def outcome(run, **options):
    """Returns ids, or which kind of error there was: old versions refuse some characters."""
    try:
        return run(**options).tolist()
    except ValueError:
        return ValueError


def assert_accounts() -> None:
    """Asserts that counts fit together."""
    report = gaudi_spec.last_report()
    assert report.accepted + report.target_tokens == report.emitted_tokens
    assert 0 <= report.accepted <= report.proposed


@pytest.mark.parametrize("k", [1, 3, 5])
def test_stop_strings_end_at_every_offset_of_a_block(k):
    """Of one token, of two, and of the end of one and the begin of the next.

    B7: huggingface/transformers#48039
    """
    lengths = set()
    for end in range(2, NEW, 1 if k == 3 else 4):
        whole = TOKENIZER.decode(TEXT[end - 2 : end])
        for text in {whole, whole[1:], whole[-1]} - {""}:
            if "\N{REPLACEMENT CHARACTER}" in text:
                continue
            options = {"stop_strings": text, "tokenizer": TOKENIZER}
            got = outcome(ours, k=k, **options)
            assert got == outcome(theirs, **options), text
            if got is ValueError:
                continue
            count = len(got[0]) - IDS.shape[1]
            lengths.add(count)
            report = gaudi_spec.last_report()
            assert report.finish_reasons == ["stop_string" if count < NEW else "length"]
            assert report.emitted == [count]
            assert_accounts()
    assert len(lengths) > 3


@pytest.mark.parametrize("text", ["\N{EURO SIGN}", "\u00e9", "\N{GRINNING FACE}kk", "p\u4f60"])
@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated"])
def test_stop_strings_of_characters_that_take_several_tokens(text, draft):
    assert text in TOKENIZER.decode(TEXT)
    options = dict(stop_strings=[text, "never"], tokenizer=TOKENIZER, max_new_tokens=40)
    assert outcome(ours, draft=draft, **options) == outcome(theirs, **options)


class Recorder(StoppingCriteria):
    """Has a memory: ends row r at its call number `ends[r]`, and remembers what it was shown."""

    def __init__(self, ends):
        self.ends, self.calls, self.shown = torch.tensor(ends), 0, []

    def __call__(self, input_ids, scores, **_):
        self.calls += 1
        self.shown.append(input_ids.tolist())
        self.shown.append(None if scores is None else len(scores))
        return self.calls >= self.ends


@pytest.mark.parametrize("sync", [1, 3])
@pytest.mark.parametrize("draft", ["self", "noisy"])
def test_criteria_see_what_plain_decoding_shows_them(draft, sync):
    """With a memory of their own, in a ragged batch; rows get ahead of each other in ours only."""
    theirs_seen, ours_seen = Recorder([2, 24, 9, 11, 5]), Recorder([2, 24, 9, 11, 5])
    want = theirs(**batch(), stopping_criteria=StoppingCriteriaList([theirs_seen]))
    config = SpecConfig(sync_every=sync)
    got = ours(draft=draft, **batch(), stopping_criteria=[ours_seen], spec_config=config)
    assert got.tolist() == want.tolist()
    assert ours_seen.shown == theirs_seen.shown
    report = gaudi_spec.last_report()
    assert report.emitted == [2, 24, 9, 11, 5]
    assert report.finish_reasons == ["criteria", "length", "criteria", "criteria", "criteria"]
    assert_accounts()


def test_criteria_see_scores_where_they_are_asked_for():
    seen = Recorder([4]), Recorder([4])
    options = dict(return_dict_in_generate=True, output_scores=True)
    want = theirs(**options, stopping_criteria=StoppingCriteriaList([seen[0]]))
    got = ours(**options, stopping_criteria=[seen[1]])
    assert seen[0].shown == seen[1].shown and seen[1].shown[1::2] == [1, 2, 3, 4]
    assert len(got.scores) == len(want.scores) == 4


@pytest.mark.parametrize("draft", ["self", "unrelated"])
def test_stop_strings_of_a_ragged_batch_with_ends_of_text(draft):
    """Each row ends in its own way; which, is reported."""
    ends = [EOS, TEXT[15]]
    options = batch() | {"eos_token_id": ends, "stop_strings": ["aa", "ll"]}
    options |= {"tokenizer": TOKENIZER, "pad_token_id": 0}
    got = ours(draft=draft, **options)
    assert got.tolist() == theirs(**options).tolist()
    assert len(set(gaudi_spec.last_report().finish_reasons)) > 1
    assert_accounts()


def test_a_time_limit_ends_all_rows_at_the_same_token(monkeypatch):
    """On a clock that moves one second a look."""
    for run in (theirs, ours):
        clock = itertools.count()
        monkeypatch.setattr(stopping_criteria.time, "time", lambda clock=clock: next(clock))
        got = run(**batch(), max_time=7)
        assert got.shape[1] == batch()["ids"].shape[1] + 8
    assert set(gaudi_spec.last_report().finish_reasons) == {"max_time"}


def test_criteria_of_the_caller_take_the_place_of_transformers_own():
    limit = stopping_criteria.MaxLengthCriteria(IDS.shape[1] + 7)
    end = stopping_criteria.EosTokenCriteria([TEXT[4]])
    for criteria in ([limit], [end], [limit, end]):
        options = {"stopping_criteria": StoppingCriteriaList(criteria), "eos_token_id": TEXT[9]}
        assert ours(**options).tolist() == theirs(**options).tolist()


def test_a_criterion_one_step_late_is_noticed():
    """The comparison with plain decoding has power."""

    class Late(Recorder):
        def __call__(self, input_ids, scores, **_):
            return super().__call__(input_ids[:, :-1], scores) & (self.calls > 5)

    want = theirs(stopping_criteria=StoppingCriteriaList([Recorder([5])]))
    assert ours(stopping_criteria=[Late([5])]).tolist() != want.tolist()


@pytest.mark.parametrize("draft", ["self", "noisy"])
def test_what_a_stop_cuts_off_is_rolled_back_in_both_caches(draft):
    """The next turn, which trusts what is kept, is right and feeds only what is new."""
    config = SpecConfig(num_assistant_tokens=5, max_length=96)
    engine = SpeculativeEngine(toys.target(), toys.drafts()[draft], config)
    ids, _ = toys.left_pad(toys.PROMPTS)
    ends = [3, 8, 13, 18, 23]
    step = Steps(ids, 0, [Recorder(ends)])
    got = engine.generate(toys.PROMPTS, NEW, step=step)
    toys.assert_equal_rows(got, [text[:n] for text, n in zip(toys.references(), ends)])
    lengths = [len(prompt) + n for prompt, n in zip(toys.PROMPTS, ends)]
    state = engine.runtime.state
    assert state.length.tolist() == lengths and state.done.all()
    assert all(covered <= n for covered, n in zip(engine.runtime.drafter._covered, lengths))
    # A next turn that says something else where the cut-off tokens were.
    news = toys.prompts(4, 9, 1, 2, 6, seed=9)
    turns = [torch.cat(parts) for parts in zip(toys.PROMPTS, got, news)]
    again = engine.generate(turns, 20, reuse=True)
    toys.assert_equal_rows(again, [toys.greedy(toys.target(), turn, 20) for turn in turns])
    assert engine.report.reused_tokens == sum(lengths) - 5


def test_stops_on_the_emulated_card_replay_captured_graphs_only():
    config = SpecConfig(num_assistant_tokens=3, prefill_chunks=(16,), strict_shapes=True)
    config = config.replace(keep_logits=True, bucket_size=None, max_length=64)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, "hpu-emulated")
    engine.warm_up(2, 64, quiet=True)
    recipes = engine.device.recipes()
    ids, _ = toys.left_pad(toys.PROMPTS[2:4])
    events = list(engine.stream(toys.PROMPTS[2:4], 12, step=Steps(ids, 0, [Recorder([3, 10])])))
    got = [[e.token for e in events if e.row == row] for row in (0, 1)]
    toys.assert_equal_rows(got, [toys.references()[2][:3], toys.references()[3][:10]])
    assert all(int(event.logits.argmax()) == event.token for event in events)
    assert engine.device.recipes() == recipes and engine.device.fallbacks() == 0
    assert engine.report.graphs.after_warmup == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stop_strings": "x"}, "tokenizer"),
        ({"stop_strings": ["x", ""], "tokenizer": TOKENIZER}, "empty"),
        ({"stop_strings": [3], "tokenizer": TOKENIZER}, "strings"),
        ({"stopping_criteria": [5]}, "callables"),
        ({"stopping_criteria": lambda *_: True}, "callables"),
        ({"stopping_criteria": [lambda *_: torch.zeros(3)]}, "one bool"),
        ({"stopping_criteria": [lambda *_: torch.zeros(3).bool()]}, "one bool"),
    ],
)
def test_bad_criteria_are_refused_in_one_sentence(options, message):
    with pytest.raises((InputError, ConfigError), match=message):
        ours(**options)
    assert ours()[0, 17:].tolist() == TEXT[:NEW]
