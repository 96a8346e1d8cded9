"""Processors in Python: called once for each token that is returned, as plain generation does."""

from __future__ import annotations

import warnings

import pytest
import tables
import torch
import toys
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import gaudi_spec
from gaudi_spec import ConfigError, InputError, SpecConfig, SpeculativeEngine
from gaudi_spec.device import standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.sampling.options import Sampling
from gaudi_spec.schedule import Constant

NEW = 24
ENDS = [46, 67]


@pytest.fixture(autouse=True)
def _no_stand_in_left():
    yield
    standin.remove()


class Rotate(LogitsProcessor):
    """Depends on its whole history: bans a token that follows from all ids, and raises another.

    It raises if the ids do not grow by one column, or if every row has ended.
    """

    def __init__(self, ends=()) -> None:
        self.calls: list[list[list[int]]] = []
        self.ends = set(ends)

    def __call__(self, input_ids, scores):
        rows = input_ids.tolist()
        if self.calls:
            assert [row[:-1] for row in rows] == self.calls[-1]
            assert not all(self.ends & set(row[len(self.calls[0][0]) :]) for row in rows)
        self.calls.append(rows)
        scores = scores.clone()
        for row, ids in enumerate(rows):
            scores[row, sum(ids) % scores.shape[1]] = float("-inf")
            scores[row, (sum(ids) + len(self.calls)) % scores.shape[1]] += 6.0
        return scores


def allowed(row, ids):
    """Allows three quarters of the ids, other ones after every id and in every row."""
    return [token for token in range(toys.VOCAB) if (token + int(ids[-1]) + row) % 4]


def generate(model, ids, mask, **options):
    """Returns new tokens, by us with an `assistant_model`, by Transformers without."""
    ours = "assistant_model" in options
    options = dict(eos_token_id=ENDS, pad_token_id=0, max_new_tokens=NEW) | options
    options.setdefault("do_sample", False)
    call = gaudi_spec.generate if ours else type(model).generate
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(model, ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()


BATCHES = {"one row": toys.PROMPTS[3:4], "ragged": toys.PROMPTS[1:4]}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("draft", "k"), [("self", 6), ("noisy", 3), ("unrelated", 1)])
def test_a_stateful_processor_sees_what_it_sees_in_transformers(batch, draft, k):
    """Call for call the same ids, and none past the last end.

    D16: openvinotoolkit/openvino.genai#4081
    """
    ids, mask = toys.left_pad(BATCHES[batch])
    seen = []
    for options in ({}, dict(assistant_model=toys.drafts()[draft], num_assistant_tokens=k)):
        processor = Rotate(ENDS)
        options |= dict(logits_processor=LogitsProcessorList([processor]), min_new_tokens=4)
        seen.append((generate(toys.target(), ids, mask, **options), processor.calls))
    assert seen[0] == seen[1]
    plain = generate(toys.target(), ids, mask, assistant_model=toys.drafts()[draft])
    assert plain != seen[0][0]


def test_a_prefix_constraint_is_that_of_transformers():
    """Between the processors that stand before and behind it there, and with warpers behind."""
    ids, mask = toys.left_pad(BATCHES["ragged"])
    options = dict(prefix_allowed_tokens_fn=allowed, suppress_tokens=[7], forced_eos_token_id=5)
    want = generate(toys.target(), ids, mask, **options)
    for draft, k in (("self", 5), ("noisy", 2)):
        small = toys.drafts()[draft]
        got = generate(
            toys.target(), ids, mask, assistant_model=small, num_assistant_tokens=k, **options
        )
        assert got == want


def test_an_early_end_of_one_row_does_not_stop_the_others():
    """Ended rows go on as padding in what a processor sees, as in Transformers."""
    ids, mask = toys.left_pad(toys.PROMPTS[1:])
    options = dict(logits_processor=[Rotate()], eos_token_id=list(range(0, 97, 6)))
    want = generate(toys.target(), ids, mask, **options)
    options["logits_processor"] = [Rotate()]
    got = generate(toys.target(), ids, mask, assistant_model=toys.drafts()["noisy"], **options)
    assert got == want and len({row.index(0) if 0 in row else NEW for row in want}) > 1


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_sampling_with_a_processor_is_exact(verifier):
    """A banned id never comes, the rest keeps its law.

    D1: huggingface/transformers#28166
    """

    def ban(ids, scores):
        return scores.index_fill(1, torch.tensor([3]), float("-inf"))

    target, draft = (tables.random_logits(6, s).float() for s in (1, 2))
    rows, prompt = 4000, [2]
    sampling = Sampling(True, 1, temperature=0.9, logits_processor=(ban,))
    b = tables.Bench(target, draft, rows, 8, prompt, sampling, verifier)
    for _ in range(3):
        b.run_on_host(2)
    p = (target.index_fill(1, torch.tensor([3]), float("-inf")) / 0.9).softmax(-1)
    tokens = b.state.tokens[:, 1:4]
    assert (tokens != 3).all()
    for place in range(3):
        law = torch.eye(6)[2]
        for _ in range(place + 1):
            law = law @ p
        share = torch.bincount(tokens[:, place], minlength=6) / rows
        assert (share - law).abs().max() < 4.5 * (0.25 / rows) ** 0.5
    wrong = torch.eye(6)[2] @ (target / 0.9).softmax(-1)  # the control: without the ban
    assert (torch.bincount(tokens[:, 0], minlength=6) / rows - wrong).abs().max() > 0.05


def test_coupled_sampling_with_a_processor_is_plain_sampling():
    """For every draft and K."""
    ids, mask = toys.left_pad(BATCHES["ragged"])
    config = SpecConfig(verifier="coupled")
    texts = [
        generate(
            toys.target(),
            ids,
            mask,
            assistant_model=toys.drafts()[draft] if draft else None,
            spec_config=config,
            num_assistant_tokens=k,
            logits_processor=[Rotate()],
            do_sample=True,
            seed=3,
            top_p=0.9,
        )
        for draft, k in ((None, 1), ("self", 4), ("noisy", 2))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_processor_runs_between_graphs():
    """On the emulated card nothing is compiled for another processor, and the text is right."""
    device = EmulatedHpuDevice()
    config = SpecConfig(num_assistant_tokens=3, strict_shapes=True, bucket_size=None)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, device)
    ids, mask = toys.left_pad(toys.PROMPTS[1:4])
    recipes = []
    for _ in range(2):
        got = engine.generate(
            toys.PROMPTS[1:4], NEW, sampling=Sampling(logits_processor=(Rotate(),))
        )
        want = generate(toys.target(), ids, mask, logits_processor=[Rotate()], eos_token_id=None)
        toys.assert_equal_rows(got, want)
        recipes.append(device.recipes())
    assert recipes[0] == recipes[1] and device.fallbacks() == 0
    greedy = engine.generate(toys.PROMPTS[1:4], NEW, schedule=Constant(3))
    toys.assert_equal_rows(greedy, [text[:NEW] for text in toys.references()[1:4]])


@pytest.mark.parametrize("compile", ["eager", "graph"])
@pytest.mark.parametrize("fuse", [True, False])
def test_calls_with_and_without_processors_take_turns(compile, fuse):
    """Their cycles are other works over the same buffers."""
    config = SpecConfig(num_assistant_tokens=3, bucket_size=None, fuse_cycle=fuse, compile=compile)
    device = EmulatedHpuDevice(check=False)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, device)
    plain = [text[:8].tolist() for text in toys.references()[1:3]]
    banned = torch.tensor([plain[0][2]])
    ban = Sampling(logits_processor=(lambda ids, scores: scores.index_fill(1, banned, -1e9),))
    texts = []
    for sampling in (None, ban, None, ban):
        rows = engine.generate(toys.PROMPTS[1:3], 8, sampling=sampling)
        texts.append([row.tolist() for row in rows])
    assert texts[0] == texts[2] == plain != texts[1] == texts[3]
    assert int(banned) not in texts[1][0]


def test_counts_stay_true():
    """Everything returned is counted once; the target's own tokens are one a row and cycle."""
    engine = SpeculativeEngine(
        toys.target(), toys.drafts()["self"], SpecConfig(num_assistant_tokens=5)
    )
    same = Sampling(logits_processor=(lambda ids, scores: scores,))
    texts = engine.generate(toys.PROMPTS, NEW, sampling=same)
    toys.assert_equal_rows(texts, [text[:NEW] for text in toys.references()])
    report = engine.report
    assert report.emitted == [NEW] * 5 and report.acceptance_rate == 1.0
    assert report.target_tokens == 5 * report.cycles and report.cycles == NEW // 6


def test_the_cost_is_told_once_and_doubles_are_refused():
    """By the names of what runs on the host, and of what an option asks for already."""
    ids = toys.PROMPTS[2][None]
    with pytest.warns(UserWarning, match="Rotate runs on the host") as caught:
        gaudi_spec.generate(toys.target(), ids, max_new_tokens=9, logits_processor=[Rotate()])
    assert len(caught) == 1
    twice = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)])
    with pytest.raises(ConfigError, match="RepetitionPenaltyLogitsProcessor"):
        gaudi_spec.generate(
            toys.target(), ids, max_new_tokens=9, logits_processor=twice, repetition_penalty=1.3
        )
    with warnings.catch_warnings(), pytest.raises(InputError, match="no token in row 0"):
        warnings.simplefilter("ignore")
        gaudi_spec.generate(
            toys.target(), ids, max_new_tokens=9, prefix_allowed_tokens_fn=lambda row, ids: []
        )


@pytest.mark.parametrize("draft", [None, "noisy"])
def test_an_end_within_cycles_that_are_not_read_calls_nothing_more(draft):
    text, calls = toys.references()[2].tolist(), []
    model = draft and toys.drafts()[draft]
    engine = SpeculativeEngine(
        toys.target(), model, SpecConfig(sync_every=3, num_assistant_tokens=2)
    )
    sampling = Sampling(logits_processor=[lambda ids, scores: calls.append(1) or scores])
    got = engine.generate(toys.PROMPTS[2:3], 30, eos_token_ids=text[1], sampling=sampling)
    assert got[0].tolist() == text[:2] and len(calls) == 2
