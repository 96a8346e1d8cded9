"""`gaudi_spec.generate` against `model.generate`: same tensor, or a refusal that names the option.

Transformers' option names and rules are the contract; the target's own greedy text the answer.
"""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import tiny_checkpoints
import torch
import toys
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import CompileConfig, WatermarkingConfig

import gaudi_spec
from gaudi_spec import hf
from gaudi_spec.errors import ConfigError, GaudiSpecError, InputError, UnsupportedOptionError

RAGGED = toys.PROMPTS[:4]
EOS = 67  # emitted by the toy target in the middle of several of its texts
EOS_LIST = [67, 46, 5]
TEXT = toys.references()[3].tolist()
FIELDS = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))


@pytest.fixture
def model():
    """A copy of the shared target that a test may change."""
    return copy.deepcopy(toys.target())


@pytest.fixture
def silent():
    """Turns every warning into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draft(name: str = "noisy"):
    return toys.drafts()[name]


def theirs(model, ids, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, **{"do_sample": False} | options)


def ours(model, ids, drafted_by="noisy", **options):
    """Drafts 5 tokens unless told otherwise; left to itself, so large a draft is turned off."""
    options.setdefault("spec_config", gaudi_spec.SpecConfig(num_assistant_tokens=5))
    return gaudi_spec.generate(model, ids, assistant_model=draft(drafted_by), **options)


def assert_same(model, ids, drafted_by="noisy", **options):
    want = theirs(model, ids, **options)
    got = ours(model, ids, drafted_by, **options)
    assert got.dtype == want.dtype and got.tolist() == want.tolist()
    return got


@contextlib.contextmanager
def no_forward(*models):
    """Fails if one of the models is run."""

    def fail(*_, **__):
        raise AssertionError("a forward was run before the request was checked")

    handles = [model.register_forward_pre_hook(fail) for model in models]
    handles += [model.model.register_forward_pre_hook(fail) for model in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Padding


@pytest.mark.parametrize("drafted_by", ["self", "noisy", "unrelated"])
def test_a_left_padded_batch_equals_transformers(drafted_by):
    ids, mask = toys.left_pad(RAGGED)
    assert_same(toys.target(), ids, drafted_by, attention_mask=mask, max_new_tokens=20)


@pytest.mark.parametrize("pad", [0, 5])
def test_a_missing_mask_is_inferred_from_the_pad_token(pad):
    ids, _ = toys.left_pad(RAGGED, pad)
    got = assert_same(toys.target(), ids, pad_token_id=pad, max_new_tokens=12)
    unmasked = theirs(
        toys.target(), ids, attention_mask=torch.ones_like(ids), pad_token_id=pad, max_new_tokens=12
    )
    assert got.tolist() != unmasked.tolist()  # so the mask mattered


@pytest.mark.parametrize("eos", [0, [67, 0]])
def test_a_missing_mask_is_all_ones_where_the_pad_token_ends_text(eos):
    ids, _ = toys.left_pad(RAGGED)
    options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": 12}
    got = assert_same(toys.target(), ids, **options)
    masked = theirs(toys.target(), ids, attention_mask=(ids != 0).long(), **options)
    assert got.tolist() != masked.tolist()


def test_no_pad_token_at_all_works(model):
    model.generation_config.pad_token_id = None
    model.config.pad_token_id = None
    assert_same(model, RAGGED[3][None], max_new_tokens=12)


def test_each_right_padded_row_equals_its_unpadded_run():
    ids, mask = toys.right_pad(RAGGED)
    got = ours(toys.target(), ids, attention_mask=mask, max_new_tokens=15)
    assert torch.equal(got[:, : ids.shape[1]], ids)
    for row, prompt in zip(got[:, ids.shape[1] :], RAGGED):
        assert torch.equal(row, toys.greedy(toys.target(), prompt, 15))


def test_zeros_inside_the_mask_equal_the_run_without_those_tokens():
    ids = toys.PROMPTS[3][None]
    mask = torch.ones_like(ids)
    mask[0, [4, 5, 9]] = 0
    got = assert_same(toys.target(), ids, attention_mask=mask, max_new_tokens=12)
    want = toys.greedy(toys.target(), ids[0][mask[0].bool()], 12)
    assert torch.equal(got[0, ids.shape[1] :], want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_may_have_any_dtype(dtype):
    ids, mask = toys.left_pad(RAGGED)
    want = theirs(toys.target(), ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(
        ours(toys.target(), ids, attention_mask=mask.to(dtype), max_new_tokens=8), want
    )


def test_a_row_of_pads_only_is_refused():
    ids, mask = toys.left_pad(RAGGED)
    mask[1] = 0
    with no_forward(toys.target()), pytest.raises(InputError, match="1"):
        ours(toys.target(), ids, attention_mask=mask, max_new_tokens=8)


@pytest.mark.parametrize(
    "ids",
    [None, torch.zeros(1, 0, dtype=torch.long), torch.ones(3), torch.ones(1, 3), [[1, 2]]],
    ids=["none", "empty", "flat", "float", "list"],
)
def test_ids_that_are_no_batch_of_tokens_are_refused(ids):
    with no_forward(toys.target()), pytest.raises(InputError):
        ours(toys.target(), ids, max_new_tokens=4)


@pytest.mark.parametrize("bad", [toys.VOCAB, -1])
def test_an_id_outside_the_vocabulary_is_refused(bad):
    with no_forward(toys.target()), pytest.raises(InputError, match=r"ids outside 0\.\.96"):
        ours(toys.target(), torch.tensor([[5, bad]]), max_new_tokens=4)


def test_a_mask_of_another_shape_is_refused():
    with no_forward(toys.target()), pytest.raises(InputError, match="attention_mask"):
        ours(toys.target(), RAGGED[1][None], attention_mask=torch.ones(1, 9), max_new_tokens=4)


# End of text


@pytest.mark.parametrize("drafted_by", ["self", "noisy"])
@pytest.mark.parametrize("eos", [EOS, EOS_LIST, torch.tensor(EOS_LIST), [EOS]], ids=repr)
def test_rows_end_at_the_first_end_token_and_are_padded(drafted_by, eos):
    ids, mask = toys.left_pad(RAGGED)
    got = assert_same(
        toys.target(), ids, drafted_by, attention_mask=mask, eos_token_id=eos, max_new_tokens=30
    )
    assert (got[:, -1] == 0).any() and gaudi_spec.last_report().finish_reasons.count("stop") > 1


def test_pad_may_be_the_end_token():
    ids, mask = toys.left_pad(RAGGED, EOS)
    options = {"eos_token_id": EOS, "pad_token_id": EOS, "max_new_tokens": 30}
    got = assert_same(toys.target(), ids, attention_mask=mask, **options)
    assert got.shape[1] > ids.shape[1] + 5 and (got[:, -1] == EOS).sum() > 1


def test_more_end_tokens_than_eight_work():
    ids, mask = toys.left_pad(RAGGED)
    eos = [2, 3, 4, 5, 6, 8, 9, 10, 12, EOS]
    assert_same(toys.target(), ids, attention_mask=mask, eos_token_id=eos, max_new_tokens=30)
    assert_same(toys.target(), ids, attention_mask=mask, eos_token_id=EOS, max_new_tokens=30)


def test_the_pad_token_defaults_to_the_first_end_token(model):
    model.generation_config.pad_token_id = None
    model.config.pad_token_id = None
    ids, mask = toys.left_pad(RAGGED)
    got = assert_same(model, ids, attention_mask=mask, eos_token_id=EOS_LIST, max_new_tokens=30)
    assert (got[:, -1] == EOS).any()


def test_the_end_tokens_of_the_targets_generation_config_decide(model):
    model.config.eos_token_id = 91
    model.generation_config.eos_token_id = EOS_LIST
    other = copy.deepcopy(draft())
    other.config.eos_token_id = other.generation_config.eos_token_id = int(toys.references()[3][0])
    ids, mask = toys.left_pad(RAGGED)
    want = theirs(model, ids, attention_mask=mask, max_new_tokens=30)
    got = gaudi_spec.generate(
        model, ids, attention_mask=mask, max_new_tokens=30, assistant_model=other
    )
    assert torch.equal(got, want)
    assert "stop" in gaudi_spec.last_report().finish_reasons


# Lengths


@pytest.mark.parametrize(
    "lengths",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 7},
        {"max_length": 18},
        {"max_length": 40},
        {"max_length": 20},
        {"max_length": 25, "max_new_tokens": 11},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafted_by", ["self", "unrelated"])
def test_the_length_follows_transformers(lengths, drafted_by):
    ids, mask = toys.left_pad(RAGGED)
    assert_same(toys.target(), ids, drafted_by, attention_mask=mask, **lengths)


def test_without_a_length_twenty_new_tokens_come():
    ids = toys.PROMPTS[4][None]
    assert ours(toys.target(), ids).shape[1] == ids.shape[1] + 20


@pytest.mark.parametrize(
    "values", [{"max_length": 33}, {"max_length": 20}, {"max_new_tokens": 9}, {}], ids=str
)
@pytest.mark.parametrize("where", ["call", "model"])
def test_the_length_may_come_from_a_generation_config(model, values, where):
    ids, mask = toys.left_pad(RAGGED)
    options = {}
    if where == "model":
        for name, value in values.items():
            setattr(model.generation_config, name, value)
    else:
        options["generation_config"] = GenerationConfig(pad_token_id=0, **values)
    assert_same(model, ids, attention_mask=mask, **options)


@pytest.mark.parametrize("extra", [{"max_length": 30}, {"max_new_tokens": 5}], ids=str)
def test_a_call_argument_beats_the_model_s_generation_config(model, extra):
    model.generation_config.max_new_tokens = None
    model.generation_config.max_length = 24
    ids, mask = toys.left_pad(RAGGED)
    assert_same(model, ids, attention_mask=mask, **extra)


@pytest.mark.parametrize("length", [17, 3])
def test_a_max_length_that_the_prompt_fills_is_refused(length):
    with no_forward(toys.target()), pytest.raises(InputError, match=f"max_length={length}"):
        ours(toys.target(), toys.PROMPTS[3][None], max_length=length)


@pytest.mark.parametrize("count", [0, -3])
def test_a_budget_below_one_is_refused(count):
    with no_forward(toys.target()), pytest.raises(InputError, match="max_new_tokens"):
        ours(toys.target(), toys.PROMPTS[3][None], max_new_tokens=count)


def test_a_sequence_beyond_the_targets_positions_is_refused():
    with no_forward(toys.target()), pytest.raises(InputError, match="256 positions"):
        ours(toys.target(), toys.PROMPTS[3][None], max_new_tokens=240)


@pytest.mark.parametrize(
    "least",
    [
        {"min_new_tokens": 1},
        {"min_new_tokens": 12},
        {"min_new_tokens": 30},
        {"min_length": 25},
        {"min_length": 10},
        {"min_length": 40, "min_new_tokens": 3},
        {"min_length": 40, "min_new_tokens": 0},
        {"min_new_tokens": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafted_by", ["self", "noisy"])
def test_the_minimum_length_follows_transformers(least, drafted_by):
    ids, mask = toys.left_pad(RAGGED)
    eos = [7, 11, 22, 56, 67, 71]
    options = dict(attention_mask=mask, eos_token_id=eos, max_new_tokens=30)
    assert_same(toys.target(), ids, drafted_by, **options, **least)


# Where settings come from


def test_a_generation_config_is_used_and_left_unchanged():
    given = GenerationConfig(
        max_new_tokens=14, eos_token_id=EOS_LIST, pad_token_id=9, num_assistant_tokens=3
    )
    before = given.to_dict()
    ids, mask = toys.left_pad(RAGGED)
    assert_same(toys.target(), ids, attention_mask=mask, generation_config=given)
    assert given.to_dict() == before
    assert len(gaudi_spec.last_report().proposed_at) == 3


def test_arguments_beat_the_generation_config():
    given = GenerationConfig(max_new_tokens=14, pad_token_id=0)
    ids, mask = toys.left_pad(RAGGED)
    got = assert_same(
        toys.target(), ids, attention_mask=mask, generation_config=given, max_new_tokens=6
    )
    assert got.shape[1] == ids.shape[1] + 6


@pytest.mark.parametrize("where", ["argument", "config", "model", "spec"])
def test_k_may_come_from(where, model):
    other = copy.deepcopy(draft())
    options = {"max_new_tokens": 20}
    if where == "argument":
        options["num_assistant_tokens"] = 3
        other.generation_config.num_assistant_tokens = 7
        model.generation_config.num_assistant_tokens = 6
    elif where == "config":
        options["generation_config"] = GenerationConfig(num_assistant_tokens=3, max_new_tokens=20)
        other.generation_config.num_assistant_tokens = 7
    elif where == "spec":
        options["spec_config"] = gaudi_spec.SpecConfig(num_assistant_tokens=3)
    else:
        model.generation_config.num_assistant_tokens = 3
    got = gaudi_spec.generate(model, toys.PROMPTS[3][None], assistant_model=other, **options)
    assert torch.equal(got[0, 17:], toys.references()[3][:20])
    assert len(gaudi_spec.last_report().proposed_at) == 3


@pytest.mark.parametrize(
    ("own", "options", "most", "policy"),
    [
        ({}, {}, 5, "auto"),
        ({"k": 3}, {}, 5, "auto"),
        ({"k": 9}, {}, 9, "auto"),
        ({"k": 3}, {"schedule": "constant"}, 3, "constant"),
        ({"schedule": "heuristic"}, {}, 5, "heuristic"),
        (
            {"schedule": "heuristic"},
            {"k": 4},
            4,
            "heuristic",
        ),
        ({"threshold": 0.7}, {}, 5, "auto"),
        ({}, {"threshold": 0.7}, 5, "confidence"),
        ({}, {"threshold": 0.4}, 5, "confidence"),
        ({}, {"schedule": "auto", "k": 20}, 20, "auto"),
        ({}, {"lookup": 7}, 7, "auto"),
    ],
    ids=str,
)
def test_schedule_and_k_come_from_the_call_and_then_from_the_draft(own, options, most, policy):
    """What the draft suggests does not keep `auto` from going further."""
    names = {
        "k": "num_assistant_tokens",
        "schedule": "num_assistant_tokens_schedule",
        "threshold": "assistant_confidence_threshold",
        "lookup": "prompt_lookup_num_tokens",
    }
    other = copy.deepcopy(draft())
    for name, value in own.items():
        setattr(other.generation_config, names[name], value)
    options = {names[name]: value for name, value in options.items()} | {"max_new_tokens": 9}
    got = gaudi_spec.generate(
        toys.target(), toys.PROMPTS[3][None], assistant_model=other, **options
    )
    assert torch.equal(got[0, 17:], toys.references()[3][:9])
    (engine,) = engines()
    assert (engine.config.most_drafts, engine.config.policy) == (most, policy)
    assert gaudi_spec.last_report().schedule == policy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"assistant_confidence_threshold": 0.5, "num_assistant_tokens_schedule": "auto"},
            "one of",
        ),
        ({"assistant_confidence_threshold": 2}, "from 0 to 1"),
        ({"num_assistant_tokens_schedule": "cosine"}, "auto, constant"),
    ],
    ids=str,
)
def test_bad_settings_of_drafts_are_refused(options, said):
    with no_forward(toys.target()), pytest.raises(GaudiSpecError, match=said):
        ours(toys.target(), toys.PROMPTS[3][None], max_new_tokens=4, **options)


@pytest.mark.parametrize("k", [0, 33, -1, 2.5])
@pytest.mark.parametrize("where", ["argument", "config"])
def test_k_outside_its_range_is_refused(k, where):
    options = {"num_assistant_tokens": k}
    if where == "config":
        options = {"generation_config": GenerationConfig(**options)}
    with no_forward(toys.target()), pytest.raises(GaudiSpecError, match="num_assistant_tokens"):
        ours(toys.target(), toys.PROMPTS[3][None], max_new_tokens=4, **options)


@pytest.mark.parametrize("who", ["target", "draft", "both", "argument"])
def test_use_cache_false_still_decodes_cached_with_one_warning(who, model):
    other, options = copy.deepcopy(draft()), {}
    for name, changed in (("target", model), ("draft", other)):
        if who in (name, "both"):
            changed.config.use_cache = False
            changed.generation_config.use_cache = False
    if who == "argument":
        options["use_cache"] = False
    with pytest.warns(UserWarning, match="use_cache") as caught:
        got = gaudi_spec.generate(
            model, toys.PROMPTS[3][None], assistant_model=other, max_new_tokens=20, **options
        )
    assert len(caught) == 1
    assert torch.equal(got[0, 17:], toys.references()[3][:20])


def test_int32_ids_give_what_transformers_gives():
    ids, mask = toys.left_pad(RAGGED)
    assert_same(toys.target(), ids.int(), attention_mask=mask, max_new_tokens=8)


def test_inputs_is_another_name_for_input_ids():
    got = gaudi_spec.generate(toys.target(), inputs=toys.PROMPTS[3][None], max_new_tokens=8)
    assert torch.equal(got[0, 17:], toys.references()[3][:8])


@pytest.mark.parametrize("drafted_by", ["self", None])
def test_the_draft_may_be_the_target_or_missing(drafted_by):
    ids, mask = toys.left_pad(RAGGED)
    model = toys.target()
    got = gaudi_spec.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        assistant_model=model if drafted_by else None,
    )
    assert torch.equal(got, theirs(model, ids, attention_mask=mask, max_new_tokens=12))


@pytest.mark.parametrize("option", ["temperature", "top_k", "top_p", "typical_p", "min_p"])
def test_sampling_options_have_no_effect_on_greedy_text(option, silent):
    got = ours(toys.target(), toys.PROMPTS[3][None], max_new_tokens=12, **{option: 0.5})
    assert torch.equal(got[0, 17:], toys.references()[3][:12])


# Prompt lookup


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("row", [3, 4])
def test_prompt_lookup_runs_the_target_as_often_as_transformers(row, k, size):
    """So the same tokens were proposed; the text is that of plain decoding."""
    model, ids, calls = toys.repetitive(), toys.PROMPTS[row][None], []
    unused = min(
        {*range(toys.VOCAB)} - {*toys.greedy(model, ids[0], 60).tolist(), *ids[0].tolist()}
    )
    options = {"max_new_tokens": 60, "eos_token_id": unused}  # 4.55 fails without an end of text
    options |= {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": size}
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        want = theirs(model, ids, **options)
    finally:
        handle.remove()
    text = toys.greedy(model, ids[0], 60)
    got = gaudi_spec.generate(model, ids, num_assistant_tokens_schedule="constant", **options)
    assert got[0, ids.shape[1] :].tolist() == text.tolist()
    assert want[0, ids.shape[1] :][:60].tolist() == text.tolist()  # it may overrun its budget
    report = gaudi_spec.last_report()
    assert report.cycles == len(calls) < 60
    assert (report.drafter, report.draft_forwards) == ("ngram", 0) and report.accepted > 0


@pytest.mark.parametrize("where", ["call", "generation_config", "model"])
@pytest.mark.parametrize("drafted_by", [None, "noisy"])
def test_prompt_lookup_is_read_where_transformers_reads_it(where, drafted_by, model):
    """Ragged; with a draft model, both are used; the draft's own K does not contradict it."""
    ids, mask = toys.left_pad(RAGGED)
    other = copy.deepcopy(draft(drafted_by)) if drafted_by else None
    if other is not None:
        other.generation_config.num_assistant_tokens = 7
    values = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4}
    given = GenerationConfig(pad_token_id=0, **values)
    options = values if where == "call" else {}
    if where == "generation_config":
        options = {"generation_config": given}
    elif where == "model":
        model.generation_config = given
    got = gaudi_spec.generate(
        model, ids, attention_mask=mask, assistant_model=other, max_new_tokens=20, **options
    )
    assert got[:, ids.shape[1] :].tolist() == [t[:20].tolist() for t in toys.references()[:4]]
    (engine,) = engines()
    assert engine.config.drafter == ("combined" if drafted_by else "ngram")
    assert (engine.config.num_assistant_tokens, engine.config.max_matching_ngram_size) == (3, 4)
    assert gaudi_spec.last_report().drafter == engine.config.drafter
    assert len(gaudi_spec.last_report().proposed_at) <= 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens must be .* 1 to 32, not 0"),
        ({"prompt_lookup_num_tokens": 33}, "prompt_lookup_num_tokens must be"),
        ({"prompt_lookup_num_tokens": 2.5}, "prompt_lookup_num_tokens must be"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1}, "max_matching_ngram_size"),
        ({"prompt_lookup_num_tokens": 3, "num_assistant_tokens": 4}, "num_assistant_tokens=4"),
        (
            {"prompt_lookup_num_tokens": 3, "spec_config": gaudi_spec.SpecConfig(drafter="model")},
            "'combined', the settings for 'model'",
        ),
        ({"spec_config": gaudi_spec.SpecConfig(drafter="ngram")}, "uses no draft model"),
    ],
    ids=str,
)
def test_a_contradiction_about_drafts_is_refused(options, words):
    with no_forward(toys.target(), draft()), pytest.raises(GaudiSpecError, match=words):
        ours(toys.target(), toys.PROMPTS[3][None], max_new_tokens=4, **options)


# What stays, what is left alone, what is reported


def engines():
    return list(hf._engines.values())


def buffers(runtime):
    caches = runtime.target.cache, runtime.drafter.model.cache
    return [*(t for c in caches for t in (*c.keys, *c.values)), runtime.state.tokens]


def test_calls_of_the_same_size_share_engine_and_buffers():
    model, (ids, mask) = toys.target(), toys.left_pad(RAGGED)
    ours(model, ids, attention_mask=mask, max_new_tokens=12)
    (engine,) = engines()
    before = [buffer.data_ptr() for buffer in buffers(engine.runtime)]
    ours(model, ids.flip(0), attention_mask=mask.flip(0), max_new_tokens=9, eos_token_id=EOS)
    assert engines() == [engine]
    assert [buffer.data_ptr() for buffer in buffers(engine.runtime)] == before
    gaudi_spec.release()
    assert engines() == []


def test_engines_of_different_models_do_not_mix_and_few_are_kept():
    ids = toys.PROMPTS[3][None]
    models = [toys.build(seed=seed) for seed in range(6)]
    for model in models * 2:
        got = gaudi_spec.generate(model, ids, assistant_model=models[0], max_new_tokens=4)
        assert torch.equal(got[0, 17:], toys.greedy(model, ids[0], 4))
    assert len(engines()) <= 4


def test_a_call_after_a_failed_one_is_right(model):
    ids = toys.PROMPTS[3][None]
    handle = draft().register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            ours(model, ids, max_new_tokens=12)
    finally:
        handle.remove()
    assert torch.equal(ours(model, ids, max_new_tokens=12)[0, 17:], toys.references()[3][:12])


def test_a_model_changed_between_calls_is_used_as_it_is_now(model):
    ids = toys.PROMPTS[3][None]
    ours(model, ids, max_new_tokens=8)
    model.to(torch.float64)
    assert_same(model, ids, max_new_tokens=8)


def test_models_configs_and_tensors_of_the_caller_are_not_modified(model):
    other = copy.deepcopy(draft())
    model.train()
    ids, mask = toys.left_pad(RAGGED)
    kept = ids.clone(), mask.clone()
    facts = [
        (m.config.to_dict(), m.generation_config.to_dict(), set(vars(m)), m.training)
        for m in (model, other)
    ]
    weights = [w.clone() for m in (model, other) for w in m.state_dict().values()]
    gaudi_spec.generate(model, ids, attention_mask=mask, assistant_model=other, max_new_tokens=9)
    assert torch.equal(ids, kept[0]) and torch.equal(mask, kept[1])
    assert facts == [
        (m.config.to_dict(), m.generation_config.to_dict(), set(vars(m)), m.training)
        for m in (model, other)
    ]
    now = [w for m in (model, other) for w in m.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(now, weights))
    assert all(w.grad is None for m in (model, other) for w in m.parameters())


def test_a_result_is_the_callers_own():
    ids = toys.PROMPTS[3][None].clone()
    first = ours(toys.target(), ids, max_new_tokens=8)
    kept = first.clone()
    ours(toys.target(), ids.flip(1), max_new_tokens=8)
    assert torch.equal(first, kept)
    first.fill_(5)
    assert torch.equal(ids, toys.PROMPTS[3][None])
    assert torch.equal(ours(toys.target(), ids, max_new_tokens=8), kept)


def test_the_last_report_counts_what_was_returned():
    ids, mask = toys.left_pad(RAGGED)
    options = {"attention_mask": mask, "eos_token_id": EOS, "num_assistant_tokens": 5}
    got = ours(toys.target(), ids, "self", max_new_tokens=30, **options)
    report = gaudi_spec.last_report()
    new = got[:, ids.shape[1] :].tolist()
    lengths = [row.index(EOS) + 1 if EOS in row else len(row) for row in new]
    assert report.emitted == lengths and report.emitted_tokens == sum(lengths)
    assert report.finish_reasons == ["stop" if EOS in row else "length" for row in new]
    assert report.accepted + report.target_tokens == report.emitted_tokens
    assert 0 < report.acceptance_rate <= 1


def test_a_perfect_draft_is_always_accepted_and_an_unrelated_one_hardly():
    ids = toys.PROMPTS[4][None]
    ours(toys.target(), ids, "self", max_new_tokens=36, num_assistant_tokens=5)
    report = gaudi_spec.last_report()
    assert (report.acceptance_rate, report.cycles, report.proposed) == (1.0, 6, 30)
    assert report.target_forwards == report.cycles
    ours(toys.target(), ids, "unrelated", max_new_tokens=36, num_assistant_tokens=5)
    assert gaudi_spec.last_report().acceptance_rate < 0.3


# Refusals

IDS = toys.PROMPTS[3][None]
REFUSED = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "assistant_early_exit": 1,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "cache_implementation": "quantized",
    "watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash"),
    "dola_layers": "high",
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "token_healing": True,
    "num_beam_groups": 2,
}
REFUSED_ARGUMENTS = {
    "past_key_values": DynamicCache(),
    "inputs_embeds": torch.zeros(1, 3, 32),
    "position_ids": torch.arange(17)[None],
    "negative_prompt_ids": torch.ones(1, 3, dtype=torch.long),
    "assistant_tokenizer": object(),
    "custom_generate": lambda *_, **__: None,
    "output_attention": True,
    "max_new_token": 8,
    "an_option_of_the_future": 0.5,
    "a_scalar_tensor": torch.tensor(3),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_ARGUMENTS])
def test_an_unsupported_argument_is_refused_by_name_before_any_compute(name):
    value = (REFUSED | REFUSED_ARGUMENTS)[name]
    with no_forward(toys.target(), draft()), pytest.raises(UnsupportedOptionError, match=name):
        ours(toys.target(), IDS, **{"max_new_tokens": 8, name: value})


@pytest.mark.parametrize("name", [n for n in REFUSED if n in FIELDS])
@pytest.mark.parametrize("where", ["call", "model"])
def test_an_unsupported_field_of_a_generation_config_is_refused_by_name(name, where, model):
    given = GenerationConfig(max_new_tokens=8, pad_token_id=0)
    setattr(given, name, REFUSED[name])
    options = {"generation_config": given}
    if where == "model":
        model.generation_config, options = given, {}
    with no_forward(model, draft()), pytest.raises(UnsupportedOptionError, match=name):
        ours(model, IDS, **options)


@pytest.mark.parametrize(
    "name",
    """max_new_tokens max_length min_new_tokens min_length num_return_sequences pad_token_id
    max_time stop_strings bad_words_ids suppress_tokens begin_suppress_tokens logits_processor
    prefix_allowed_tokens_fn eos_token_id""".split(),
)
@pytest.mark.parametrize("value", [2.5, object()], ids=["float", "object"])
def test_a_value_of_the_wrong_kind_is_refused_by_name(name, value):
    if (name, value) == ("max_time", 2.5):
        return
    with no_forward(toys.target()), pytest.raises(ConfigError, match=name.partition("_token")[0]):
        ours(toys.target(), IDS, **{"tokenizer": TOKENIZER, name: value})


def test_inputs_embeds_without_ids_are_refused_by_name():
    with pytest.raises(UnsupportedOptionError, match="inputs_embeds"):
        gaudi_spec.generate(toys.target(), inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        {"streamer": None},
        {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList()},
        {"synced_gpus": False, "prefix_allowed_tokens_fn": None, "past_key_values": None},
        {"num_beams": 1, "repetition_penalty": 1.0, "do_sample": False, "use_cache": True},
        {"bad_words_ids": None, "stop_strings": None, "return_dict_in_generate": False},
        {"tokenizer": object()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_ask_for_nothing_are_accepted(options):
    got = ours(toys.target(), IDS, max_new_tokens=8, **options)
    assert torch.equal(got[0, 17:], toys.references()[3][:8])


PROCESSED = {
    "bad_words_ids": [[TEXT[0]], TEXT[4:6]],
    "begin_suppress_tokens": [TEXT[0]],
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 3.0,
    "exponential_decay_length_penalty": (2, 1.5),
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "no_repeat_ngram_size": 1,
    "remove_invalid_values": True,
    "repetition_penalty": 1.5,
    "sequence_bias": {(5,): 2.0, tuple(TEXT[2:4]): -50.0},
    "suppress_tokens": [TEXT[3]],
}
TOKENIZER = tiny_checkpoints.byte_tokenizer(toys.references()[3].tolist())

# A telling value of every field that Transformers has: one that changes greedy text if it can.
TELLING = {
    **REFUSED,
    **PROCESSED,
    "do_sample": False,
    "assistant_confidence_threshold": 0.9,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "bos_token_id": 7,
    "cache_config": {"max_cache_len": 64},
    "compile_config": CompileConfig(),
    "continuous_batching_config": {"block_size": 16},
    "decoder_start_token_id": 7,
    "disable_compile": True,
    "diversity_penalty": 5.0,
    "early_stopping": True,
    "eos_token_id": EOS,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.2,
    "is_assistant": True,
    "length_penalty": 3.0,
    "low_memory": True,
    "max_cache_len": 64,
    "max_length": 30,
    "max_matching_ngram_size": 3,
    "max_new_tokens": 9,
    "max_time": 1e-9,
    "min_length": 30,
    "min_new_tokens": 13,
    "min_p": 0.9,
    "num_assistant_tokens": 4,
    "num_assistant_tokens_schedule": "heuristic",
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 8,
    "prompt_lookup_num_tokens": 3,
    "prefill_chunk_size": 5,
    "renormalize_logits": True,
    "return_dict_in_generate": True,
    "return_legacy_cache": True,
    "speculation_type": "dflash",
    "stop_strings": ["never", TOKENIZER.decode(toys.references()[3][2:4])],
    "target_lookbehind": 3,
    "temperature": 5.0,
    "top_h": 0.1,
    "top_k": 1,
    "top_p": 0.1,
    "transformers_version": "4.30.0",
    "typical_p": 0.1,
    "use_cache": False,
    "use_mtp": True,
}


def with_field(name, value):
    given = GenerationConfig(max_new_tokens=20, pad_token_id=0, eos_token_id=[13, 67])
    if name == "max_length":
        given.max_new_tokens = None
    setattr(given, name, value)
    return given


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["argument", "call", "model"])
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_generation_config_is_honoured_or_refused(name, where, model):
    """D12: sgl-project/sglang#10617"""
    assert name in TELLING, f"{name} is new in Transformers: add a value that changes greedy text"
    given = with_field(name, TELLING[name])
    options = {"generation_config": given}
    if where == "model":
        model.generation_config, options = given, {}
    elif where == "argument":
        names = {"max_new_tokens", "pad_token_id", "eos_token_id", name}
        options = {key: value for key, value in vars(given).items() if key in names}
    # Transformers 4.55 forgets the padding when it prefills in chunks, look-up takes one row only,
    # and its processors take padding for text.
    alone = name in ("prefill_chunk_size", "prompt_lookup_num_tokens", *PROCESSED)
    ids, mask = toys.left_pad(RAGGED[3:] if alone else RAGGED)
    options["tokenizer"] = TOKENIZER
    try:
        got = ours(model, ids, attention_mask=mask, **options)
    except UnsupportedOptionError as refusal:
        assert name in str(refusal)
        return
    want = theirs(model, ids, attention_mask=mask, **options)
    if name == "return_dict_in_generate":
        got, want = got.sequences, want.sequences
    assert got.tolist() == want.tolist()


HONOURED = """max_length min_length min_new_tokens eos_token_id max_time stop_strings""".split()
SILENT = {"forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"}  # on this prompt


@pytest.mark.parametrize("name", HONOURED + [name for name in PROCESSED if name not in SILENT])
def test_the_honoured_fields_of_the_table_do_change_the_text(name):
    given, plain = with_field(name, TELLING[name]), with_field("max_new_tokens", 20)
    ids, mask = toys.left_pad(RAGGED[3:] if name in PROCESSED else RAGGED)
    texts = [
        ours(
            toys.target(),
            ids,
            attention_mask=mask,
            generation_config=config,
            tokenizer=TOKENIZER,
        ).tolist()
        for config in (given, plain)
    ]
    assert texts[0] != texts[1]
