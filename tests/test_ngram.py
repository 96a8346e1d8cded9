"""Prompt lookup against a plain reference and Transformers' own class; look-up before a model."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from test_cache import assert_holds
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from gaudi_spec import SpecConfig, SpeculativeEngine, verify
from gaudi_spec.drafters.base import Proposal
from gaudi_spec.drafters.model import ModelDrafter
from gaudi_spec.drafters.ngram import NgramDrafter
from gaudi_spec.state import State

VOCAB = 6


def reference(history, k, longest, ends=(), leftmost=True, longest_first=True):
    """Returns what plain Python finds; the last two arguments are for controls."""
    size = len(history)
    sizes = range(1, min(longest, size - 1) + 1)
    for n in reversed(sizes) if longest_first else sizes:
        begins = range(n, size)  # where a continuation may begin
        for begin in begins if leftmost else reversed(begins):
            if history[begin - n : begin] == history[size - n :]:
                found = history[begin : begin + k]
                at = next((i for i, token in enumerate(found) if token in ends), len(found))
                return found[:at]
    return []


def transformers_own(history, k, longest, ends):
    """Returns what the installed Transformers proposes."""
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(list(ends) or [-1]),
        num_output_tokens=k,
        max_matching_ngram_size=longest,
        max_length=len(history) + k + 2,
    )
    ids, _ = generator.get_candidates(torch.tensor([history]))
    return ids[0, len(history) :].tolist()


def looked_up(rows, k, longest, ends=(), window=None, stale=0):
    """Returns what our drafter proposes for `rows`, behind which lie `stale` tokens."""
    slots = max(map(len, rows)) + 3
    state = State(len(rows), slots, k + 1, VOCAB, torch.device("cpu"))
    state.reset([torch.tensor(row) for row in rows], [1] * len(rows), 0, ends)
    for row, history in enumerate(rows):
        state.tokens[row, len(history) :] = stale
    drafter = NgramDrafter(
        types.SimpleNamespace(config=SpecConfig(max_matching_ngram_size=longest))
    )
    drafter.window = window or slots
    tokens, n_proposed, _ = drafter.propose(state, k)
    assert tokens.shape == (len(rows), k) and tokens.dtype == n_proposed.dtype == torch.long
    return [row[:n] for row, n in zip(tokens.tolist(), n_proposed.tolist())]


histories = st.integers(1, VOCAB).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, size - 1), min_size=1, max_size=24), min_size=1, max_size=4
    )
)


@given(
    rows=histories,
    k=st.integers(1, 7),
    longest=st.integers(1, 5),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    stale=st.integers(0, VOCAB - 1),
    tight=st.booleans(),
)
def test_look_up_equals_plain_python_and_transformers(rows, k, longest, ends, stale, tight):
    """Ragged rows; what is stale behind a row, or beyond the window, does not count."""
    window = max(map(len, rows)) if tight else None
    got = looked_up(rows, k, longest, sorted(ends), window, stale)
    assert got == [reference(row, k, longest, ends) for row in rows]
    assert got == [transformers_own(row, k, longest, ends) for row in rows]


@pytest.mark.parametrize(
    ("history", "k", "longest", "ends", "found"),
    [
        ([1, 2, 3, 1, 2], 2, 2, (), [3, 1]),
        ([1, 2, 3, 1, 2], 9, 2, (), [3, 1, 2]),  # up to the end of the text, not beyond
        ([4, 2, 5, 1, 2, 3, 1, 2], 1, 2, (), [3]),  # the longest, not the leftmost of any
        ([4, 2, 5, 1, 2, 3, 1, 2], 1, 1, (), [5]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, 2, (), [3]),  # the leftmost, not the last
        ([1, 1], 3, 2, (), [1]),
        ([1, 1, 1], 3, 2, (), [1]),  # overlapping its own end
        ([1], 3, 2, (), []),
        ([1, 2, 3], 3, 2, (), []),
        ([1, 2, 3, 1], 3, 2, (3,), [2]),
        ([1, 3, 2, 1], 3, 2, (3,), []),  # an end comes first: nothing, and no other place
    ],
)
def test_rules_by_example(history, k, longest, ends, found):
    """Each is one sentence of Transformers' rules."""
    assert looked_up([history], k, longest, ends) == [found]
    assert transformers_own(history, k, longest, ends) == found


@pytest.mark.parametrize(
    ("control", "history"),
    [("leftmost", [1, 2, 3, 1, 2, 4, 1, 2]), ("longest_first", [4, 2, 5, 1, 2, 3, 1, 2])],
)
def test_comparison_notices_another_rule(control, history):
    """The rightmost match, or the shortest n-gram, is another proposal."""
    assert looked_up([history], 2, 2) == [reference(history, 2, 2)]
    assert looked_up([history], 2, 2) != [reference(history, 2, 2, **{control: False})]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            self.elements = max(self.elements, tensor.numel())
        return out


def test_memory_grows_with_the_text_only():
    """Nothing of batch x slots x slots, or of slots x K."""
    rows = [[i % VOCAB for i in range(4000)]] * 2
    with Largest() as largest:
        looked_up(rows, 8, 4)
    assert 2 * 4000 <= largest.elements <= 2 * (4000 + 3 + 9)


# In the engine -------------------------------------------------------------------------------

NEW = 2 * toys.NEW


def repetitive(draft=None, k=5, **config):
    """Returns an engine, and its right texts, on a target whose texts run in circles."""
    drafter = "ngram" if draft is None else "combined"
    config = SpecConfig(num_assistant_tokens=k, drafter=drafter, **config)
    want = [toys.greedy(toys.repetitive(), prompt, NEW) for prompt in toys.PROMPTS]
    return SpeculativeEngine(toys.repetitive(), draft, config), want


@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_repetition_is_looked_up(k):
    """All that a circle holds is proposed and accepted; no draft model is run."""
    engine, want = repetitive(k=k)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, NEW), want)
    report = engine.report
    assert report.acceptance_rate > 0.7
    assert report.cycles < 0.75 * NEW
    assert (report.drafter, report.draft_forwards, report.draft_shapes) == ("ngram", 0, 0)


def test_look_up_that_is_believed_is_noticed(monkeypatch):
    """Control: without verification, what was looked up would be returned."""
    engine, want = repetitive()
    monkeypatch.setattr(
        verify, "greedy", lambda d, c, n: verify.Verdict(n, torch.cat([d, c[:, -1:]], 1))
    )
    with pytest.raises(AssertionError, match="row"):
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, NEW), want)


def test_longer_ngrams_are_a_setting():
    """Fewer proposals are wrong in a text of many single repetitions."""
    rates = []
    for size in (1, 3):
        config = SpecConfig(num_assistant_tokens=5, drafter="ngram", max_matching_ngram_size=size)
        engine = SpeculativeEngine(toys.target(), None, config)
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
        rates.append(engine.report.accepted)
    assert rates[0] != rates[1]


def follow(engine, prompts, new):
    """Yields, for each cycle, each row's text before it and the row's outcome."""
    texts = [prompt.tolist() for prompt in prompts]
    for outcome in engine.cycles(prompts, new):
        for text, row in zip(texts, outcome):
            yield list(text), row
            text.extend(row.tokens)


def kinds(engine, k, prompts=toys.PROMPTS, new=NEW):
    """Asserts that a perfect draft model is right wherever look-up was not wrong before it.

    Returns how often nothing, a wrong piece and a right piece was looked up.
    """
    seen = {"nothing": 0, "wrong": 0, "right": 0}
    for text, row in follow(engine, prompts, new):
        if row.n_proposed:
            found = len(reference(text, k, 2))
            wrong = row.n_accepted < min(found, row.n_proposed)
            seen["wrong" if wrong else "right" if found else "nothing"] += 1
            assert wrong or row.n_accepted == row.n_proposed
    return seen


@pytest.mark.parametrize("fuse", [True, False])
def test_a_perfect_model_behind_a_look_up_is_always_right(fuse):
    """Also right behind a look-up that ends early, and after cycles that looked up."""
    engine, want = repetitive(toys.repetitive(), fuse_cycle=fuse)
    seen = kinds(engine, 5)
    assert seen["nothing"] > 9 and seen["right"] > 9
    toys.assert_equal_rows(engine.generate(toys.PROMPTS, NEW), want)
    config = SpecConfig(num_assistant_tokens=5, drafter="combined", fuse_cycle=fuse)
    seen = kinds(SpeculativeEngine(toys.target(), toys.target(), config), 5, new=toys.NEW)
    assert seen["nothing"] > 9 and seen["wrong"] > 5


def draft_cache_follows(engine, want):
    """Asserts that after every cycle the draft's slots are those of a fresh prefill."""
    got = [[] for _ in toys.PROMPTS]
    for outcome in engine.cycles(toys.PROMPTS, 30):
        for row, (prompt, facts) in enumerate(zip(toys.PROMPTS, outcome)):
            got[row].extend(facts.tokens)
            text = torch.tensor([*prompt.tolist(), *got[row]])
            if facts.n_emitted and facts.n_proposed and len(text) > 2:
                assert_holds(engine.runtime.drafter.model, row, text[:-2])
    toys.assert_equal_rows(got, [text[:30] for text in want])


def test_the_draft_cache_holds_what_was_looked_up():
    """With a model that would have chosen otherwise, so that its own choices would be wrong."""
    engine, want = repetitive(toys.build("llama", 77))
    draft_cache_follows(engine, want)
    assert engine.report.accepted > 40


def test_a_model_that_reads_its_own_choices_is_noticed():
    """Control: looked-up tokens are proposed, but the model is fed what it chose itself."""
    engine, want = repetitive(toys.build("llama", 77))
    engine.generate(toys.PROMPTS, 2)
    drafter = engine.runtime.drafter

    def propose(state, k):
        drafter._lookup.window = drafter.window
        found, own = drafter._lookup.propose(state, k), ModelDrafter.propose(drafter, state, k)
        looked = torch.arange(k) < found.n_proposed[:, None]
        return Proposal(torch.where(looked, found.tokens, own.tokens), own.n_proposed)

    drafter.propose = propose
    with pytest.raises(AssertionError, match="Tensor-likes"):
        draft_cache_follows(engine, want)


@pytest.mark.parametrize("k", [1, 5])
def test_look_up_goes_on_where_the_draft_has_no_positions_left(k):
    """Without a warning, since something is still proposed there."""
    draft = toys.build("gpt2", seed=5, max_position_embeddings=32)
    engine, want = repetitive(draft, k)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, NEW), want)
    assert engine.runtime.drafter.model.slots == 32
    assert engine.report.acceptance_rate > 0.5
    late = [row.n_accepted for text, row in follow(engine, toys.PROMPTS, NEW) if len(text) > 40]
    assert sum(late) > 20


def test_a_row_of_one_token_has_nothing_to_look_up():
    """The report says so, and nothing fails."""
    config = SpecConfig(num_assistant_tokens=5, drafter="ngram")
    engine = SpeculativeEngine(toys.target(), None, config)
    toys.assert_equal_rows(engine.generate(toys.PROMPTS[:1], 2), [toys.references()[0][:2]])
    assert (engine.report.proposed, engine.report.acceptance_rate) == (0, None)
    assert engine.report.drafts == 0 and engine.report.mean_acceptance_length is None
