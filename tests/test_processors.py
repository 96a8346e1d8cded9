"""Greedy decoding with every processor is `model.generate` with it, at every K and draft."""

from __future__ import annotations

import functools
import warnings

import pytest
import tables
import torch
import toys

import gaudi_spec
from gaudi_spec import SpecConfig, SpeculativeEngine, UnsupportedOptionError
from gaudi_spec.device import standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.sampling.options import Sampling
from gaudi_spec.sampling.processors import Text, new_token_penalties
from gaudi_spec.schedule import Constant

NEW = 30
PROMPTS = toys.PROMPTS[1:]
TEXTS = [text.tolist() for text in toys.references()[1:]]
ENDS = (46, 67)


@pytest.fixture(autouse=True)
def _no_stand_in_left():
    yield
    standin.remove()


# Values that change the text of some row, taken from the unprocessed text where that is needed.
OPTIONS = {
    "repetition": dict(repetition_penalty=1.3),
    "repetition below 1": dict(repetition_penalty=0.7),
    "encoder repetition": dict(encoder_repetition_penalty=2.5),
    "1-grams": dict(no_repeat_ngram_size=1),
    "2-grams": dict(no_repeat_ngram_size=2, repetition_penalty=0.6),
    "3-grams": dict(no_repeat_ngram_size=3, repetition_penalty=0.5),
    "encoder 1-grams": dict(encoder_no_repeat_ngram_size=1),
    "encoder 2-grams": dict(encoder_no_repeat_ngram_size=2, encoder_repetition_penalty=4.0),
    "one bad word": dict(bad_words_ids=[[TEXTS[0][3]]]),
    "bad words": dict(
        bad_words_ids=[[TEXTS[1][0]], TEXTS[0][4:6], TEXTS[2][2:5], TEXTS[3][7:12], [ENDS[0]]]
    ),
    "bias": dict(sequence_bias={(11,): 4.0, tuple(TEXTS[0][1:3]): -9.0, (11, 12): 30.0}),
    "bias as pairs": dict(sequence_bias=[[[11], 4.0], [[11, 12, 13], 30.0]]),
    "suppress": dict(suppress_tokens=[TEXTS[0][1], TEXTS[3][9], 500]),
    "begin suppress": dict(begin_suppress_tokens=[text[0] for text in TEXTS]),
    "forced end": dict(forced_eos_token_id=5),
    "minimum": dict(min_new_tokens=12, sequence_bias={(ENDS[0],): 40.0}),
    "decay": dict(exponential_decay_length_penalty=(4, 1.4)),
    "invalid": dict(remove_invalid_values=True, suppress_tokens=[TEXTS[1][1]]),
    "many": dict(
        repetition_penalty=1.2,
        encoder_repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=[TEXTS[0][:1], [9, 8]],
        sequence_bias={(20,): 3.0, (20, 21): -3.0},
        suppress_tokens=[30, 31],
        begin_suppress_tokens=[TEXTS[1][0]],
        exponential_decay_length_penalty=(10, 1.1),
        min_new_tokens=5,
        forced_eos_token_id=[5, 6],
        remove_invalid_values=True,
    ),
}
# Known differences of Transformers 4.55 from 5 do not matter here: no prompt is shorter than two.


@functools.cache
def theirs(name: str) -> list[list[int]]:
    """Returns the texts of Transformers, one unpadded row at a time."""
    return [plain(prompt, **OPTIONS[name]) for prompt in PROMPTS]


@torch.no_grad()
def plain(prompt, **options) -> list[int]:
    options = dict(eos_token_id=list(ENDS), pad_token_id=0, max_new_tokens=NEW) | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = toys.target().generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, **options
        )
    return out[0, len(prompt) :].tolist()


def cut(text: list[int]) -> list[int]:
    """Returns a reference of `toys` up to its end of text or the budget."""
    at = next((i + 1 for i, token in enumerate(text) if token in ENDS), NEW)
    return text[: min(at, NEW)]


@functools.cache
def engine(draft: str) -> SpeculativeEngine:
    config = SpecConfig(num_assistant_tokens=6)
    return SpeculativeEngine(toys.target(), toys.drafts()[draft], config)


def ours(running, name, k, ends=ENDS) -> list[list[int]]:
    options = dict(OPTIONS[name])
    least = options.pop("min_new_tokens", 0)
    texts = running.generate(
        PROMPTS,
        NEW,
        eos_token_ids=ends,
        min_new_tokens=least,
        sampling=Sampling(**options),
        schedule=Constant(k),
    )
    return [text.tolist() for text in texts]


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_with_a_processor_is_transformers_with_it(name):
    """Position i of a block sees the candidates before it.

    D10: vllm-project/vllm#6718, #18902
    """
    want = theirs(name)
    unprocessed = [cut(text) for text in TEXTS]
    assert want != unprocessed or name == "forced end"
    for draft, k in (("self", 6), ("noisy", 3), ("unrelated", 1), ("noisy", 0)):
        toys.assert_equal_rows(ours(engine(draft), name, k), want)
    assert engine("self").generate(PROMPTS, NEW, eos_token_ids=ENDS)[0].tolist() == unprocessed[0]


@pytest.mark.parametrize("name", ["repetition", "2-grams", "bad words", "many"])
def test_a_draft_under_the_same_processors_keeps_its_acceptance(name):
    """The target as its own draft: it must see the same history at the same place."""
    running = engine("self")
    ours(running, name, 6, ends=())
    assert running.report.acceptance_rate == 1.0


def test_a_processor_that_misses_the_block_is_noticed(monkeypatch):
    """The control: history that ends where the block begins."""
    from gaudi_spec.state import State

    text = State.text

    def committed_only(self, candidates, index):
        return text(self, candidates[:, :0], index)

    monkeypatch.setattr(State, "text", committed_only)
    with pytest.raises(AssertionError, match="row"):
        toys.assert_equal_rows(ours(engine("self"), "repetition", 6), theirs("repetition"))


def test_d11_no_text_drifts_under_a_weak_penalty():
    """vllm-project/vllm#22987: 50 prompts, none differs."""
    prompts = toys.prompts(*([5, 9, 14, 20, 3] * 10), seed=8)
    want = [
        plain(prompt, eos_token_id=None, repetition_penalty=1.05, max_new_tokens=10)
        for prompt in prompts
    ]
    got = engine("noisy").generate(prompts, 10, sampling=Sampling(repetition_penalty=1.05))
    toys.assert_equal_rows(got, want)


@pytest.mark.parametrize("name", ["many", "2-grams", "bias", "decay", "forced end"])
def test_processors_are_captured(name):
    """On the emulated card, with other values of the same options in between."""
    device = EmulatedHpuDevice()
    config = SpecConfig(num_assistant_tokens=3, strict_shapes=True, bucket_size=None)
    running = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, device)
    want = theirs(name)
    toys.assert_equal_rows(ours(running, name, 3), want)
    recipes = device.recipes()
    toys.assert_equal_rows(ours(running, name, 3), want)
    assert device.recipes() == recipes and device.fallbacks() == 0


def test_forced_first_token_follows_a_prompt_of_one():
    """And tokens suppressed at the beginning are then those of the second place."""
    prompt = toys.PROMPTS[0]
    for options in (
        dict(forced_bos_token_id=7),
        dict(forced_bos_token_id=7, begin_suppress_tokens=[7, *range(20, 60)]),
        dict(begin_suppress_tokens=list(range(20, 60))),
    ):
        want = plain(prompt, eos_token_id=None, max_new_tokens=12, **options)
        for k in (1, 4):
            got = engine("noisy").generate(
                [prompt], 12, sampling=Sampling(**options), schedule=Constant(k)
            )
            assert got[0].tolist() == want


def test_penalties_on_new_tokens_count_as_in_vllm():
    """Occurrences in prompts do not count, those in the block do."""
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 9)
    tokens = torch.tensor([[1, 1, 2, 3, 3, 4, 3, 0]])
    text = Text(tokens, torch.tensor([[5, 6, 7]]), torch.tensor([3]), *(torch.ones(1),) * 3)
    got = new_token_penalties(logits, text, torch.tensor([0.5]), torch.tensor([0.25]))
    for t, end in enumerate((5, 6, 7)):
        for token in range(9):
            n = tokens[0, 3:end].tolist().count(token)
            want = logits[0, t, token] - 0.5 * n - 0.25 * (n > 0)
            assert abs(got[0, t, token] - want) < 1e-6


@pytest.mark.parametrize("options", [dict(frequency_penalty=1.5), dict(presence_penalty=4.0)])
def test_penalties_on_new_tokens_are_those_of_a_plain_loop(options):
    """Through `gaudi_spec.generate`, for every K."""
    model, prompt = toys.target(), PROMPTS[2]
    ids = prompt.tolist()
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.long), minlength=97)
        logits = logits - options.get("frequency_penalty", 0) * counts
        logits = logits - options.get("presence_penalty", 0) * (counts > 0)
        ids.append(int(logits.argmax()))
    assert ids[len(prompt) :] != TEXTS[2][:NEW]
    for k in (1, 5):
        got = gaudi_spec.generate(
            model,
            prompt[None],
            assistant_model=toys.drafts()["noisy"],
            num_assistant_tokens=k,
            max_new_tokens=NEW,
            **options,
        )
        assert got[0].tolist() == ids


def test_history_is_each_rows_own():
    """Ragged rows at ragged progress: a batch is its rows."""
    options = dict(repetition_penalty=1.4, no_repeat_ngram_size=2)
    running = engine("noisy")
    together = running.generate(PROMPTS, NEW, sampling=Sampling(**options))
    for prompt, text in zip(PROMPTS, together):
        alone = running.generate([prompt], NEW, sampling=Sampling(**options))
        assert text.tolist() == alone[0].tolist()


def test_an_end_that_is_forbidden_stays_so_under_length_decay():
    """In Transformers minus infinity plus infinity is NaN, and NaN the best token."""
    running = engine("noisy")
    sampling = Sampling(exponential_decay_length_penalty=(0, 2.0))
    texts = running.generate(PROMPTS, 20, eos_token_ids=ENDS, min_new_tokens=15, sampling=sampling)
    assert all(len(text) > 15 for text in texts)


def test_invalid_values_are_removed_where_that_is_asked_for():
    """Otherwise unsound logits are an error."""
    target = tables.random_logits(8, 1).float()
    target[2, 3], target[2, 4] = float("nan"), float("inf")
    for options, unsound in ((dict(remove_invalid_values=True), 0), ({}, 1)):
        b = tables.Bench(target, target, 1, 4, [2], Sampling(**options), "rejection")
        (row,) = b.run(0)
        assert row.n_unsound == unsound
        assert unsound or row.tokens == [4]


@pytest.mark.parametrize(
    ("name", "value"), [("guidance_scale", 1.5), ("watermarking_config", {"bias": 2.0})]
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    """D12: vllm-project/vllm#38467"""
    with pytest.raises(UnsupportedOptionError, match=name):
        gaudi_spec.generate(
            toys.target(), PROMPTS[0][None], max_new_tokens=3, do_sample=True, **{name: value}
        )
