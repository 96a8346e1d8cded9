"""What holds for every call of the engine, whatever the models: end of text, budgets, batches,
lengths, vocabularies, counts, shapes, soundness. Each law has a control that can break it."""

from __future__ import annotations

import copy
import functools
import math
import threading
import warnings

import pytest
import torch
import toys

from gaudi_spec import (
    ConfigError,
    InputError,
    NumericalError,
    SpecConfig,
    SpeculativeEngine,
    checker,
    cycle,
    verify,
)
from gaudi_spec.models import hf
from gaudi_spec.schedule import Constant

K = 5
LOOKING_UP = ["ngram", "combined-noisy"]


def engine_for(draft="self", family="llama", k=K, **config):
    """Returns an engine on a family's toys; `draft` is a `toys.drafted` name, a model or None."""
    drafter = "auto"
    if isinstance(draft, str):
        draft, drafter = toys.drafted(draft, family)
    config = SpecConfig(num_assistant_tokens=k, drafter=drafter, **config)
    return SpeculativeEngine(toys.target(family), draft, config)


def cut(text, eos):
    """Returns `text` up to its first end-of-text token, that one included."""
    tokens = text.tolist()
    return tokens[: next((i + 1 for i, t in enumerate(tokens) if t in eos), len(tokens))]


def references(new, family="llama"):
    """Returns the references cut to `new` tokens."""
    return [text[:new] for text in toys.references(family)]


# End of text ---------------------------------------------------------------------------------


def end_at_offset(offset):
    """Returns (row, token) where the token first occurs at this offset of a block of K + 1."""
    for row, text in enumerate(toys.references()):
        for at in range(offset, toys.NEW - 1, K + 1):
            if text[at] not in text[:at]:
                return row, at, int(text[at])
    raise AssertionError("the references have no such token")


@pytest.mark.parametrize("draft", ["self", "noisy", *LOOKING_UP, None])
@pytest.mark.parametrize("offset", range(K + 1))
def test_end_of_text_stops_its_row_at_every_block_offset(offset, draft):
    """The bonus token included; the end token is returned; other rows go on to their own end."""
    row, at, token = end_at_offset(offset)
    engine = engine_for(draft)
    got = engine.generate(toys.PROMPTS, toys.NEW, eos_token_ids=[token])
    want = [cut(text, {token}) for text in toys.references()]
    assert len(want[row]) == at + 1 and max(map(len, want)) > at + 1
    toys.assert_equal_rows(got, want)
    assert engine.report.finish_reasons == [
        "stop" if text[-1] == token else "length" for text in want
    ]
    assert engine.report.emitted == [len(text) for text in want]


@pytest.mark.parametrize("count", [2, 8, 12])
def test_first_of_several_end_tokens_stops(count):
    """Also of more than the state has room for, given twice, in any order."""
    ends = list(dict.fromkeys(toys.references()[3].tolist()))[-count:]
    engine = engine_for("noisy")
    want = [cut(text, set(ends)) for text in toys.references()]
    assert len({len(text) for text in want}) > 1
    for ids in (ends, ends[::-1] + ends):
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW, eos_token_ids=ids), want)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())


def test_end_tokens_of_a_prompt_do_not_count():
    """Only new tokens end a row."""
    ends = [int(toys.PROMPTS[2][0])]
    want = [cut(text, set(ends)) for text in toys.references()]
    engine = engine_for("noisy")
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW, eos_token_ids=ends), want)


@pytest.mark.parametrize("least", [1, 4, 20])
def test_minimum_keeps_end_tokens_out(least):
    """As Transformers does it: an end token is no candidate before, so the text differs."""
    model, ends = toys.target(), sorted(set(toys.references()[3][:3].tolist()))
    want = []
    for prompt in toys.PROMPTS:
        out = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=24,
            min_new_tokens=least,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
        want.append(out[0, len(prompt) :])
    got = engine_for("noisy").generate(toys.PROMPTS, 24, eos_token_ids=ends, min_new_tokens=least)
    assert min(map(len, want)) >= least
    toys.assert_equal_rows(got, want)


def test_end_of_text_in_the_last_place_is_a_stop():
    """The text ended; the budget had nothing to do with it."""
    row, at, token = end_at_offset(3)
    engine = engine_for()
    engine.generate([toys.PROMPTS[row]], at + 1, eos_token_ids=[token])
    assert engine.report.finish_reasons == ["stop"]


# Budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated", *LOOKING_UP, None])
def test_each_row_gets_exactly_its_budget(draft):
    """1 .. K + 3 new tokens side by side, and long beside short."""
    budgets = list(range(1, K + 4))
    engine = engine_for(draft)
    prompts = [toys.PROMPTS[i % 5] for i in range(len(budgets))]
    want = [toys.references()[i % 5][:n] for i, n in enumerate(budgets)]
    toys.assert_equal_rows(engine.generate(prompts, budgets), want)
    assert engine.report.finish_reasons == ["length"] * len(budgets)
    mixed = [40, 1, 7, 2, 13]
    want = [text[:n] for text, n in zip(toys.references(), mixed)]
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, mixed), want)


@pytest.mark.parametrize("new", range(1, 2 * K + 4))
def test_perfect_draft_needs_the_fewest_cycles(new):
    """N tokens in ceil(N / (K + 1)) verifications, all that is proposed accepted."""
    engine = engine_for()
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, new), references(new))
    assert engine.report.cycles == math.ceil(new / (K + 1))
    assert engine.report.acceptance_rate in ((1.0, None) if new == 1 else (1.0,))
    assert engine.report.accepted == engine.report.proposed


def test_one_token_needs_no_draft():
    """Neither its prompt nor its steps are run."""
    engine = engine_for()
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 1), references(1))
    assert (engine.report.draft_forwards, engine.report.cycles) == (0, 1)
    assert engine.report.acceptance_rate is None


@pytest.mark.parametrize("draft", ["self", "noisy", *LOOKING_UP])
def test_largest_block_equals_greedy(draft):
    """K = 32, and a budget below the block."""
    engine = engine_for(draft, k=32)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 20), references(20))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
def test_perfect_draft_is_accepted_over_a_long_text(family):
    """200 tokens: a slot that drifts by one would show as a rejection."""
    model, prompt = toys.target(family), toys.PROMPTS[3]
    want = toys.greedy(model, prompt, 200)
    toys.assert_sound(want)
    engine = engine_for(family=family, k=7)
    toys.assert_equal_rows(engine.generate([prompt], 200), [want])
    assert engine.report.acceptance_rate == 1.0 and engine.report.cycles == 25


@pytest.mark.parametrize(
    ("prompts", "budget", "more"),
    [
        ([], 5, {}),
        ([[]], 5, {}),
        ([[3, 97]], 5, {}),
        ([[-1, 3]], 5, {}),
        ([[3]], 0, {}),
        ([[3]], -1, {}),
        ([[3]], [2.5], {}),
        ([[3], [4]], [5], {}),
        ([[3]], 5, {"min_new_tokens": 6}),
        ([[3]], 5, {"min_new_tokens": -1}),
        ([[3]], 256, {}),
    ],
    ids=str,
)
def test_impossible_request_is_refused_before_any_compute(prompts, budget, more):
    """And the engine still serves the next one."""
    engine = engine_for()
    with pytest.raises(InputError):
        engine.generate(prompts, budget, **more)
    assert engine.runtime is None
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 3), references(3))


# Batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-moe"])
def test_a_row_does_not_depend_on_its_batch(family):
    """Alone, among others, permuted, or in an engine built for more rows."""
    want = references(24, family)
    draft = toys.drafts(family)["noisy"]
    for row, prompt in enumerate(toys.PROMPTS):
        alone = engine_for(draft, family).generate([prompt], 24)
        toys.assert_equal_rows(alone, want[row : row + 1])
    order = [3, 0, 4, 2, 1]
    permuted = engine_for(draft, family).generate([toys.PROMPTS[r] for r in order], 24)
    toys.assert_equal_rows(permuted, [want[r] for r in order])
    wide = engine_for(draft, family, batch_size=4)
    toys.assert_equal_rows(wide.generate(toys.PROMPTS[3:], 24), want[3:])
    assert wide.runtime.state.batch == 4 and len(wide.report.emitted) == 2
    toys.assert_equal_rows(wide.generate(toys.PROMPTS[:4], 24), want[:4])
    with pytest.raises(InputError, match="batch_size=4"):
        wide.generate(toys.PROMPTS, 24)


def test_spare_rows_are_not_counted():
    """Counts of two prompts are the same in an engine for two rows and for seven."""
    reports = []
    for size in (None, 7):
        engine = engine_for("noisy", batch_size=size)
        engine.generate(toys.PROMPTS[2:4], 24)
        reports.append(engine.report.to_dict())
    same = "cycles proposed accepted emitted_tokens acceptance_by_position finish_reasons".split()
    assert [reports[0][key] for key in same] == [reports[1][key] for key in same]


def test_calls_do_not_influence_each_other():
    """Longer, shorter, wider, with other end tokens, on one engine that grows."""
    engine = engine_for("noisy")
    toys.assert_equal_rows(engine.generate(toys.PROMPTS[2:3], 8), references(8)[2:3])
    long = toys.prompts(100, 3)
    want = [toys.greedy(toys.target(), prompt, 40) for prompt in long]
    toys.assert_equal_rows(engine.generate(long, 40), want)
    engine.generate(toys.PROMPTS, 12, eos_token_ids=[int(toys.references()[0][2])])
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    toys.assert_equal_rows(engine.generate(long, 40, schedule=Constant(9)), want)


# Lengths -------------------------------------------------------------------------------------


@functools.cache
def full_rows(family):
    """Returns prompts, budgets and references that end exactly at the last position."""
    prompts = toys.prompts(226, 240, 251, 254, 255)
    budgets = [256 - len(prompt) for prompt in prompts]
    want = [toys.greedy(toys.target(family), p, n) for p, n in zip(prompts, budgets)]
    toys.assert_sound(want[0])
    return prompts, budgets, want


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("draft", ["self", "noisy", *LOOKING_UP])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_row_may_end_at_the_last_position(family, draft, k):
    """A learned position beyond it would be an index error."""
    prompts, budgets, want = full_rows(family)
    engine = engine_for(draft, family, k)
    toys.assert_equal_rows(engine.generate(prompts, budgets), want)
    if draft == "self":
        assert engine.report.acceptance_rate == 1.0


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_one_token_more_is_refused(family):
    """By the model's positions, or by a smaller max_length."""
    prompts, budgets, _ = full_rows(family)
    with pytest.raises(InputError, match="256 positions"):
        engine_for(family=family).generate(prompts, [*budgets[:-1], budgets[-1] + 1])
    with pytest.raises(InputError, match="256 positions"):
        engine_for(family=family, max_length=512).generate(prompts[:1], 31)
    with pytest.raises(InputError, match="48 positions"):
        engine_for(family=family, max_length=48).generate(toys.PROMPTS, 19)


def test_max_length_may_be_used_up_whole():
    """30 + 18 = 48 slots, none to spare; length_multiple does not matter then."""
    engine = engine_for("noisy", max_length=48, length_multiple=7)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 18), references(18))
    assert engine.runtime.state.slots == 48


@pytest.mark.parametrize("chunks", [(1,), (4,), (3, 5), (256,)], ids=str)
def test_prefill_chunks_do_not_change_the_output(chunks):
    """Odd widths, one token at a time, or wider than the cache."""
    engine = engine_for("noisy", prefill_chunks=chunks)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 16), references(16))
    clean = engine_for("noisy")
    clean.generate(toys.PROMPTS, 16)
    assert engine.report.accepted_at == clean.report.accepted_at


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_draft_with_fewer_positions_is_used_as_far_as_it_goes(family, k):
    """Target 256, draft 32: no index error, one warning, a slower but equal rest."""
    prompts = toys.prompts(10, 31, 32, 60)
    draft = toys.build(family, seed=5, max_position_embeddings=32)
    want = [toys.greedy(toys.target(family), prompt, 40) for prompt in prompts]
    engine = engine_for(draft, family, k)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toys.assert_equal_rows(engine.generate(prompts, 40), want)
        toys.assert_equal_rows(engine.generate(prompts, 40), want)
    about = [str(w.message) for w in caught if "maximum positions" in str(w.message)]
    assert len(about) == 1
    assert 0 < engine.report.proposed <= (32 - 9 + 2 + 1) * k
    assert engine.runtime.drafter.model.slots == 32


def test_short_draft_that_is_right_is_accepted_up_to_its_end():
    """Its last slots hold what they should: the same weights, 32 positions, rotary."""
    draft = copy.deepcopy(toys.target())
    draft.config.max_position_embeddings = 32
    engine = engine_for(draft)
    with pytest.warns(UserWarning, match="maximum positions"):
        got = engine.generate(toys.PROMPTS[:4], toys.NEW)
    toys.assert_equal_rows(got, toys.references()[:4])
    assert engine.report.acceptance_rate == 1.0 and engine.report.proposed > 40


# Vocabularies and dtypes ---------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(97, 128), (128, 97), (97, 97)])
def test_vocabularies_may_be_padded_differently(target, draft):
    """No proposal leaves the target's vocabulary, no id the draft's table."""
    models = toys.build("llama", 3, vocab=target), toys.build("llama", 4, vocab=draft)
    want = [toys.greedy(models[0], prompt, 24) for prompt in toys.PROMPTS]
    toys.assert_sound(torch.cat(want), 20)
    engine = SpeculativeEngine(*models, SpecConfig(num_assistant_tokens=5))
    engine.generate(toys.PROMPTS, 2)
    proposed, propose = [], engine.runtime.drafter.propose

    def spy(state, k):
        proposed.append(propose(state, k))
        return proposed[-1]

    engine.runtime.drafter.propose = spy
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 24), want)
    assert max(int(block.tokens.max()) for block in proposed) < min(target, draft)
    if draft > target:  # control: left alone, this draft does use its larger vocabulary
        assert max(int(toys.greedy(models[1], p, 24).max()) for p in toys.PROMPTS) >= target
    if target > draft:  # control: the draft did meet ids that its table lacks
        assert max(int(text[:-1].max()) for text in want) >= draft


def test_draft_may_be_of_another_dtype():
    """A bfloat16 draft beside a float32 target."""
    draft = copy.deepcopy(toys.target()).to(torch.bfloat16)
    engine = engine_for(draft)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
    assert engine.report.acceptance_rate > 0.5


def test_bfloat16_text_leaves_greedy_only_at_near_ties():
    """A wide forward rounds differently from a narrow one; the checker says so."""
    model = copy.deepcopy(toys.target()).to(torch.bfloat16)
    got = SpeculativeEngine(model, toys.drafts()["noisy"]).generate(toys.PROMPTS, 24)
    for prompt, text in zip(toys.PROMPTS, got):
        assert all(d.near_tie for d in checker.greedy_differences(model, prompt, text))
        said = checker.explain(model, prompt, text, toys.greedy(model, prompt, 24))
        assert said == "identical" or "a near-tie" in said


@pytest.mark.parametrize("kind", ["dynamic", "linear", "longrope"])
def test_scaled_rotary_positions_equal_greedy(kind):
    """Where frequencies change with length, the model is served up to there only."""
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        scaling |= {"long_factor": [3.0] * 4, "short_factor": [1.0] * 4}
    model = toys.build("llama", 1, rope_scaling=scaling)
    want = [toys.greedy(model, prompt, 24) for prompt in toys.PROMPTS]
    toys.assert_sound(torch.cat(want), 20)
    engine = SpeculativeEngine(model, toys.noisy(model), SpecConfig(length_multiple=64))
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 24), want)
    if kind != "linear":
        with pytest.raises(InputError, match="64 positions"):
            engine.generate(toys.prompts(60), 5)


# Counts --------------------------------------------------------------------------------------


def scripted(rows, right, k, **config):
    """Returns an engine for prompts of `rows` whose draft follows a script."""
    engine = engine_for(k=k, **config)
    engine.generate([toys.PROMPTS[r] for r in rows], toys.NEW)
    texts = [torch.cat([toys.PROMPTS[r], toys.references()[r]]) for r in rows]
    engine.runtime.drafter = engine.runtime.parts.drafter = toys.ScriptedDrafter(texts, right)
    return engine


def test_counts_equal_hand_computed_ones():
    """K = 3, eight tokens for each of two rows; the last block of row 0 has room for one."""
    engine = scripted([2, 3], [[3, 0], [1, 2], [3, 3]], 3)
    got = [[], []]
    emitted = []
    for outcome in engine.cycles(toys.PROMPTS[2:4], 8):
        emitted.append([(r.n_proposed, r.n_accepted, r.n_emitted, r.done) for r in outcome])
        for row, facts in zip(got, outcome):
            row.extend(facts.tokens)
    toys.assert_equal_rows(got, references(8)[2:4])
    assert emitted == [
        [(3, 3, 4, 0), (3, 0, 1, 0)],
        [(3, 1, 2, 0), (3, 2, 3, 0)],
        [(1, 1, 2, 1), (3, 3, 4, 1)],
    ]
    report = engine.report
    assert (report.cycles, report.target_forwards, report.drafts) == (3, 3, 6)
    assert (report.proposed_at, report.accepted_at) == ([6, 5, 5], [5, 3, 2])
    assert (report.proposed, report.accepted) == (16, 10)
    assert (report.emitted, report.emitted_tokens, report.target_tokens) == ([8, 8], 16, 6)
    assert report.acceptance_rate == 10 / 16
    assert report.mean_acceptance_length == 1 + 10 / 6
    assert report.acceptance_by_position == [5 / 6, 3 / 5, 2 / 5]
    assert report.draft_forwards == 9


def test_accepted_tokens_past_the_end_of_text_do_not_count():
    """Row 0: all three are right, but the second ends the text; a done row proposes nothing."""
    first, second = toys.references()[2:4]
    end = int(first[1])
    assert end != first[0] and end not in second[:9]
    engine = scripted([2, 3], [[3, 0]] + [[3, 1]] * 4, 3)
    got = engine.generate(toys.PROMPTS[2:4], 9, eos_token_ids=[end])
    toys.assert_equal_rows(got, [first[:2], second[:9]])
    report = engine.report
    assert (report.cycles, report.drafts, report.emitted) == (5, 6, [2, 9])
    assert (report.proposed_at, report.accepted_at) == ([6, 5, 5], [5, 1, 0])
    assert (report.accepted, report.target_tokens) == (6, 5)
    assert report.finish_reasons == ["stop", "length"]


@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated", *LOOKING_UP, None])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_counts_are_consistent(draft, k):
    """Identities that hold for every run, with end of text in it."""
    engine = engine_for(draft, k=k)
    ends = [int(toys.references()[1][9])]
    got = engine.generate(toys.PROMPTS, 24, eos_token_ids=ends)
    report = engine.report
    assert report.drafter == {None: None, "ngram": "ngram", "combined-noisy": "combined"}.get(
        draft, "model"
    )
    assert (report.draft_forwards > 0) == (draft not in (None, "ngram"))
    assert report.emitted == [len(row) for row in got]
    assert report.emitted_tokens == report.accepted + report.target_tokens
    assert 0 <= report.target_tokens <= report.cycles * len(got)
    assert report.target_forwards == report.cycles <= 24
    assert len(report.proposed_at) == len(report.accepted_at) <= k
    assert report.proposed_at == sorted(report.proposed_at, reverse=True)
    assert report.accepted_at == sorted(report.accepted_at, reverse=True)
    assert all(0 <= a <= p for a, p in zip(report.accepted_at, report.proposed_at))
    assert report.proposed <= report.drafts * k and report.drafts <= report.cycles * len(got)
    if draft is None:
        assert report.acceptance_rate is report.mean_acceptance_length is None
    else:
        assert 0 <= report.acceptance_rate <= 1
        assert 1 <= report.mean_acceptance_length <= k + 1
    assert set(report.to_dict()) >= {"proposed", "accepted", "acceptance_rate", "seconds"}


# Schedules and shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [(3, 0, 0), (0, 3), (5, 1, 0, 2), (0,), (0, 0, 0, 0, 0, 8)])
@pytest.mark.parametrize("draft", ["self", "noisy", *LOOKING_UP])
def test_schedule_with_plain_cycles_equals_greedy(draft, turns):
    """The draft catches up on what was decoded without it, so a perfect one stays perfect."""
    engine = engine_for(draft)
    got = engine.generate(toys.PROMPTS, toys.NEW, schedule=toys.Turns(*turns))
    toys.assert_equal_rows(got, toys.references())
    if draft == "self" and any(turns):
        assert engine.report.acceptance_rate == 1.0


def test_schedule_out_of_range_is_refused():
    """Before any compute."""
    for k in (-1, 33):
        with pytest.raises(ConfigError, match=rf"\[{k}\]"):
            engine_for().generate(toys.PROMPTS, 5, schedule=Constant(k))


def shapes(engine):
    """Returns every (method, B, T) that either model was called with."""
    return engine.runtime.target.shapes | {
        ("draft", *shape) for shape in engine.runtime.drafter.shapes
    }


@pytest.mark.parametrize("draft", ["noisy", *LOOKING_UP])
def test_no_shape_is_new_after_the_first_cycle(draft):
    """The last block is clipped by masking."""
    engine = engine_for(draft)
    counts = []
    for _ in engine.cycles(toys.PROMPTS, [40, 39, 38, 37, 20]):
        counts.append((len(engine.runtime.target.shapes), len(engine.runtime.drafter.shapes)))
    assert len(set(counts[:-1])) == 1 and len(counts) > 5
    assert counts[-1][0] - counts[0][0] <= 1  # a last cycle that nothing can be drafted for


def test_the_set_of_shapes_is_closed():
    """Twenty mixed calls after K, 0 and every prefill width were seen once."""
    engine = engine_for("noisy", batch_size=3, max_length=256, prefill_chunks=(4, 16))
    engine.generate(toys.prompts(19), 12)
    engine.generate(toys.prompts(3), 1)
    engine.generate(toys.prompts(4, 2), 9)
    seen = shapes(engine)
    assert len(seen) == 2 + 2 + 2 + 2
    for call in range(20):
        lengths = [1 + (7 * call + 11 * row) % 60 for row in range(1 + call % 3)]
        turns = toys.Turns(0, K) if call % 4 == 0 else None
        budgets = [1 + (5 * call + row) % 14 for row in range(len(lengths))]
        engine.generate(
            toys.prompts(*lengths, seed=call), budgets, eos_token_ids=[call], schedule=turns
        )
        assert shapes(engine) == seen
    assert (engine.report.target_shapes, engine.report.draft_shapes) == (4, 4)


# The caller's things -------------------------------------------------------------------------


def test_nothing_of_the_caller_is_changed():
    """Weights, buffers, configs, prompts, budgets; the mode of every module is put back."""
    target, draft = toys.build("gpt2", 0, attn_pdrop=0.3, resid_pdrop=0.3), toys.build("gpt2", 5)
    want = [toys.greedy(target, prompt, 12) for prompt in toys.PROMPTS]
    target.train()
    target.transformer.h[0].eval()
    prompts, budgets = [prompt.clone() for prompt in toys.PROMPTS], [12] * 5

    def snapshot():
        kept = [prompts, budgets]
        for model in (target, draft):
            kept += [copy.deepcopy(model.state_dict()), model.config.to_dict()]
            kept += [model.generation_config.to_dict(), [m.training for m in model.modules()]]
            kept += [[p.grad for p in model.parameters()]]
            kept += [[p.requires_grad for p in model.parameters()]]
            kept += [sorted(vars(m)) for m in model.modules()]
        return copy.deepcopy(kept)

    before = snapshot()
    toys.assert_equal_rows(SpeculativeEngine(target, draft).generate(prompts, budgets), want)
    assert_same(snapshot(), before)
    assert target.training and not target.transformer.h[0].training and not draft.training


def assert_same(one, other):
    """Asserts that nested lists and dicts of tensors and plain values are equal."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_same(left, right)
    else:
        assert one == other


def test_a_model_in_train_mode_stays_so_and_is_run_without_dropout():
    """Also while a stream is open, and when it is dropped half way."""
    model = copy.deepcopy(toys.target()).train()
    engine = SpeculativeEngine(model, model)
    stream = engine.cycles(toys.PROMPTS, 24)
    next(stream)
    assert model.training
    stream.close()
    assert model.training and all(module.training for module in model.modules())


def test_model_that_is_being_trained_with_checkpointing_is_served():
    """A sample in the middle of training."""
    model = copy.deepcopy(toys.target())
    model.gradient_checkpointing_enable()
    model.train()
    got = SpeculativeEngine(model, model).generate(toys.PROMPTS, 12)
    toys.assert_equal_rows(got, references(12))


# Unsound logits ------------------------------------------------------------------------------


def broken(value, where):
    """Returns a copy of the target with one bad weight."""
    model = copy.deepcopy(toys.target())
    weights = {
        "head": model.lm_head.weight,
        "embedding": model.model.embed_tokens.weight,
        "layer": model.model.layers[1].mlp.down_proj.weight,
    }
    weights[where].data[:, 3] = value
    return model


@pytest.mark.parametrize("where", ["head", "embedding", "layer"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_unsound_target_is_an_error_and_unsound_draft_is_not(value, where):
    """The draft only proposes."""
    for draft in (None, toys.target()):
        with pytest.raises(NumericalError, match="row"):
            SpeculativeEngine(broken(value, where), draft).generate(toys.PROMPTS, 12)
    got = engine_for(broken(value, where)).generate(toys.PROMPTS, 12)
    toys.assert_equal_rows(got, references(12))


# Interruptions and threads -------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [1, 2])
def test_call_after_an_interrupted_one_is_right(cycles):
    """Whatever the interrupted one left in the buffers."""
    engine = engine_for("noisy")
    stream = engine.cycles(toys.PROMPTS[::-1], 40)
    for _ in range(cycles):
        next(stream)
    stream.close()
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())


def test_stream_yields_what_generate_returns():
    """Cycle by cycle, one outcome for each prompt."""
    engine = engine_for("noisy", batch_size=6)
    got = [[] for _ in toys.PROMPTS]
    for outcome in engine.cycles(toys.PROMPTS, toys.NEW):
        assert len(outcome) == len(got)
        for row, facts in zip(got, outcome):
            assert len(facts.tokens) == facts.n_emitted
            row.extend(facts.tokens)
    toys.assert_equal_rows(got, toys.references())


def test_threads_share_an_engine_one_at_a_time():
    """Each gets its own right output."""
    engine, got = engine_for("noisy", batch_size=5), {}

    def work(row):
        got[row] = engine.generate([toys.PROMPTS[row]], toys.NEW)[0]

    threads = [threading.Thread(target=work, args=(row,)) for row in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    toys.assert_equal_rows([got[row] for row in range(5)], toys.references())


# The checker ---------------------------------------------------------------------------------


def test_checker_finds_nothing_in_right_text_and_the_token_in_wrong_text():
    """With its gap; what follows a wrong token is judged given that token."""
    model, prompt, text = toys.target(), toys.PROMPTS[2], toys.references()[2]
    assert checker.greedy_differences(model, prompt, text) == []
    wrong = text.clone()
    wrong[-1] = (wrong[-1] + 1) % toys.VOCAB
    (found,) = checker.greedy_differences(model, prompt, wrong)
    assert (found.index, found.token, found.best) == (39, int(wrong[-1]), int(text[-1]))
    assert found.gap > 1e-3 > found.tolerance and not found.near_tie
    wrong[5] = (wrong[5] + 1) % toys.VOCAB
    assert checker.greedy_differences(model, prompt, wrong)[0].index == 5


def test_checker_explains():
    """Equal, of other length, a near-tie, and a real difference."""
    model, prompt, text = copy.deepcopy(toys.target()), toys.PROMPTS[2], toys.references()[2]
    explain = functools.partial(checker.explain, model, prompt)
    assert explain(text, text) == "identical"
    assert explain(text, text[:30]) == "different lengths: 40 and 30 tokens"
    wrong = text.clone()
    wrong[7] = twin = (int(text[7]) + 1) % toys.VOCAB
    assert explain(text, wrong).startswith("first difference at token 7: NOT a near-tie (gap ")
    assert twin not in text[:7]
    model.lm_head.weight.data[twin] = model.lm_head.weight.data[text[7]]
    assert explain(text, wrong).startswith("first difference at token 7: a near-tie")


# Controls: each of these breaks one rule of the engine, and a law above must notice -----------


def test_comparison_notices_one_wrong_token():
    """And a missing or surplus one, and a missing row."""
    want = toys.references()
    toys.assert_equal_rows(want, want)
    for row in range(len(want)):
        wrong = [text.clone() for text in want]
        wrong[row][-1] += 1
        with pytest.raises(AssertionError, match=f"row {row}, token 39"):
            toys.assert_equal_rows(wrong, want)
    for wrong in (want[:-1], [text[:-1] for text in want]):
        with pytest.raises(AssertionError):
            toys.assert_equal_rows(wrong, want)


def shift_verification(monkeypatch):
    """Positions of wide forwards are one too high."""
    forward = hf.HFCausalLM.forward
    monkeypatch.setattr(
        hf.HFCausalLM,
        "forward",
        lambda self, ids, positions, last=False: forward(
            self, ids, positions + (ids.shape[1] > 1 and not last), last
        ),
    )


def shift_prefill(monkeypatch):
    """Prompts are stored one slot too late."""
    fill = hf.HFCausalLM.fill
    monkeypatch.setattr(
        hf.HFCausalLM,
        "fill",
        lambda self, ids, at: fill(self, ids, (at + 1).clamp(max=self.slots - 1)),
    )


def see_the_future(monkeypatch):
    """The mask lets a token see the slot after its own."""
    bias = hf.attention_bias
    monkeypatch.setattr(hf, "attention_bias", lambda p, *rest: bias(p + 1, *rest))


def widen_window(monkeypatch):
    """Sliding windows are one token too long."""
    bias = hf.attention_bias
    monkeypatch.setattr(
        hf, "attention_bias", lambda p, s, w, d: bias(p, s, None if w is None else w + 1, d)
    )


def accept_everything(monkeypatch):
    """Every drafted token is taken for the target's."""
    monkeypatch.setattr(
        verify,
        "greedy",
        lambda drafted, chosen, n: verify.Verdict(n, torch.cat([drafted, chosen[:, -1:]], 1)),
    )


def accept_after_a_mismatch(monkeypatch):
    """Matches are counted, not leading matches."""
    monkeypatch.setattr(
        verify,
        "greedy",
        lambda drafted, chosen, n: verify.Verdict((drafted == chosen[:, :-1]).sum(1), chosen),
    )


def forget_prefill(monkeypatch):
    """Prompts are not stored at all."""
    monkeypatch.setattr(hf.HFCausalLM, "fill", lambda self, ids, positions: None)


@pytest.mark.parametrize(
    "break_it",
    [
        shift_verification,
        shift_prefill,
        see_the_future,
        widen_window,
        accept_everything,
        accept_after_a_mismatch,
        forget_prefill,
    ],
    ids=lambda f: f.__name__,
)
def test_broken_engine_is_noticed(break_it, monkeypatch):
    """The equality with greedy fails on a windowed model with a partly right draft."""
    family = "mistral-window"
    want = references(24, family)
    draft = toys.drafts(family)["noisy"]
    toys.assert_equal_rows(engine_for(draft, family).generate(toys.PROMPTS, 24), want)
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="row"):
        toys.assert_equal_rows(engine_for(draft, family).generate(toys.PROMPTS, 24), want)


def test_proposals_beyond_the_budget_would_be_returned(monkeypatch):
    """Without the n_proposed mask, a row gets more tokens than it asked for."""
    greedy = verify.greedy
    monkeypatch.setattr(verify, "greedy", lambda d, c, n: greedy(d, c, torch.full_like(n, K)))
    with pytest.raises(AssertionError, match="row 0, token 3"):
        toys.assert_equal_rows(engine_for().generate(toys.PROMPTS, 3), references(3))


def test_draft_one_position_off_would_lose_acceptance(monkeypatch):
    """Output stays right, so only the perfect draft's 100 % can show it."""
    engine = engine_for()
    engine.generate(toys.PROMPTS, 2)
    model = engine.runtime.drafter.model
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda ids, positions, last: forward(ids, positions + 1, last)
    )
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, 24), references(24))
    assert engine.report.acceptance_rate < 0.9


def test_cycle_reads_one_tensor():
    """`unpack` keeps of each row what was emitted."""
    packed = torch.tensor([[2, 1, 3, 0, 0, 7, 8, 9, 9], [0, 0, 0, 1, 0, 7, 8, 9, 9]])
    (rows,) = cycle.unpack(packed[None])
    assert rows[0].tokens == [7, 8] and rows[1].tokens == []
    assert rows[0][:5] == (2, 1, 3, 0, 0)
