"""The law of the output, enumerated over every path of the package's own cycle, is the target's.

Vocabularies are small, models are tables, and noise is replaced by every value it can matter by.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tables import Bench, random_logits

from gaudi_spec import verify
from gaudi_spec.drafters import model
from gaudi_spec.drafters.base import Proposal
from gaudi_spec.sampling import noise
from gaudi_spec.sampling.options import Sampling
from gaudi_spec.sampling.rules import Rules

RULES = {
    "plain": {},
    "warped": dict(temperature=0.7, top_k=3, top_p=0.9),
    "penalties": dict(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.2),
    "ngrams": dict(no_repeat_ngram_size=3, bad_words_ids=[[1, 2], [2, 2, 0]], min_p=0.02),
    "bias": dict(sequence_bias={(2,): 1.0, (1, 1): -1.5}, typical_p=0.9, eta_cutoff=0.01),
    "lengths": dict(exponential_decay_length_penalty=(1, 1.4), begin_suppress_tokens=[1]),
}
PROMPT = [2, 1, 2]
ENDS = {"lengths": (0,)}


def bench(rows, k, vocab, rules, verifier, target=None, draft=None, threshold=None):
    """Returns a bench whose budget no block can pass."""
    target = random_logits(vocab, 1) if target is None else target
    draft = random_logits(vocab, 2) if draft is None else draft
    sampling = Sampling(do_sample=True, seed=0, **RULES[rules])
    ends, least = ENDS.get(rules, ()), 1 if rules in ENDS else 0
    return Bench(
        target, draft, rows, k + 2, PROMPT, sampling, verifier, ends, least, threshold=threshold
    )


def reference(b, k, logits, ends=()):
    """Returns the plain joint law of k + 1 tokens, `{tokens: probability}`; an end stays."""
    law = {(): 1.0}
    for _ in range(k + 1):
        new: dict[tuple, float] = {}
        for tokens, mass in law.items():
            if tokens and tokens[-1] in ends:
                new[tokens] = new.get(tokens, 0.0) + mass
                continue
            for token, p in enumerate(b.process([*PROMPT, *tokens], logits).tolist()):
                if p:
                    new[(*tokens, token)] = mass * p
        law = new
    return law


def enumerated(monkeypatch, k, vocab, rules, counted=None, target=None, draft=None, threshold=None):
    """Runs one rejection cycle for every draft path and every outcome of every test.

    Returns:
        The joint law of k + 1 tokens, where what a cycle leaves open is drawn plainly, and the
        probability that the first proposal is accepted.
    """
    paths = list(itertools.product(range(vocab), repeat=k))
    cells = list(itertools.product((0, 1), repeat=k))
    rows = len(paths) * len(cells)
    b = bench(rows, k, vocab, rules, "rejection", target, draft, threshold)
    p_of, q_of = b.target.logits, b.drafter.model.logits
    q_of = torch.nn.functional.pad(q_of, (0, max(0, vocab - q_of.shape[1])), value=-torch.inf)
    weights, uniforms, draws = [], torch.empty(rows, k, dtype=torch.float64), {}
    table: dict[tuple, tuple] = {}
    for row, (path, cell) in enumerate(itertools.product(paths, cells)):
        weight = 1.0
        for i, (token, above) in enumerate(zip(path, cell)):
            if path[:i] not in table:
                context = [*PROMPT, *path[:i]]
                table[path[:i]] = (b.process(context, p_of), b.process(context, q_of[:, :vocab]))
            p, q = (float(x[token]) for x in table[path[:i]])
            edge = min(1.0, p / q) if q else 0.0
            # The test is met at the very edge of its cell, so that another threshold shows.
            uniforms[row, i] = edge * (1 + 1e-12) + 1e-300 if above else edge * (1 - 1e-12)
            weight *= q * (1 - edge if above else edge)
        weights.append(weight)
    drafted = torch.tensor([path for path in paths for _ in cells])

    def draw(self, p, index, stream):
        draws[stream] = p
        if stream == noise.DRAFT:
            return drafted.gather(1, index - len(PROMPT))
        return p.argmax(-1)

    monkeypatch.setattr(Rules, "draw", draw)
    monkeypatch.setattr(noise, "uniform", lambda keys, index, stream: uniforms)
    if counted is not None:
        b.drafter.model.slots = len(PROMPT) + counted - 1  # room for so many proposals
    outcomes = b.run(k)
    b.proposed = {outcome.n_proposed for outcome in outcomes}
    left = draws[noise.TARGET][:, 0]
    left = (left / left.sum(-1, keepdim=True)).tolist()
    law: dict[tuple, float] = {}
    accepted = 0.0
    for outcome, path, weight, own in zip(outcomes, drafted.tolist(), weights, left):
        if not weight:
            continue
        accepted += weight * (outcome.n_accepted > 0)
        n = outcome.n_accepted
        ended = n == outcome.n_emitted  # by an accepted end of text
        for token, mass in [(None, 1.0)] if ended else enumerate(own):
            tokens = (*path[:n],) if ended else (*path[:n], token)
            if mass:
                law[tokens] = law.get(tokens, 0.0) + weight * mass
    monkeypatch.undo()
    return b, complete(b, law, k, ENDS.get(rules, ())), accepted, table[()]


def complete(b, law, k, ends):
    """Extends every text to k + 1 tokens by plain draws."""
    done: dict[tuple, float] = {}
    for tokens, mass in law.items():
        if len(tokens) == k + 1 or tokens[-1] in ends:
            done[tokens] = done.get(tokens, 0.0) + mass
            continue
        p = b.process([*PROMPT, *tokens], b.target.logits).tolist()
        more = {(*tokens, t): mass * x for t, x in enumerate(p) if x}
        for text, part in complete(b, more, k, ends).items():
            done[text] = done.get(text, 0.0) + part
    return done


def distance(law, want):
    """Returns the largest difference of two laws."""
    return max(abs(law.get(t, 0.0) - want.get(t, 0.0)) for t in law.keys() | want.keys())


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("k", "vocab"), [(1, 6), (2, 4), (3, 3)])
def test_rejection_gives_exactly_the_targets_law(monkeypatch, k, vocab, rules):
    """And accepts the first proposal as often as any exact method can: 1 - TV(p, q)."""
    b, law, accepted, (p, q) = enumerated(monkeypatch, k, vocab, rules)
    assert distance(law, reference(b, k, b.target.logits, ENDS.get(rules, ()))) < 1e-10
    assert abs(accepted - float(torch.minimum(p, q).sum())) < 1e-10
    assert accepted > 0.01 and len(law) > vocab


@pytest.mark.parametrize("counted", [0, 1, 2, 3])
def test_proposals_that_do_not_count_change_nothing(monkeypatch, counted):
    """Behind the last that counts nothing was rejected: the token comes from p, not a residual."""
    b, law, _, _ = enumerated(monkeypatch, 3, 3, "penalties", counted)
    assert distance(law, reference(b, 3, b.target.logits)) < 1e-10


@pytest.mark.parametrize("rules", ["plain", "warped", "penalties"])
@pytest.mark.parametrize("threshold", [0.3, 0.45])
def test_proposals_cut_by_confidence_change_nothing(monkeypatch, threshold, rules):
    """How many are proposed depends on what was drawn, but at no place on what is drawn there."""
    b, law, _, _ = enumerated(monkeypatch, 3, 3, rules, threshold=threshold)
    assert len(b.proposed) > 1
    assert distance(law, reference(b, 3, b.target.logits)) < 1e-10


def test_a_doubtful_token_that_is_taken_back_would_be_noticed(monkeypatch):
    """Cut before the token that is doubtful, it would be rarer than the target makes it."""

    def before(sure, threshold):
        return (sure >= threshold).long().cumprod(1).sum(1)

    with monkeypatch.context() as patch:
        patch.setattr(model, "_confident", before)
        b, law, _, _ = enumerated(pytest.MonkeyPatch(), 2, 3, "plain", threshold=0.45)
    assert distance(law, reference(b, 2, b.target.logits)) > 1e-3


@pytest.mark.parametrize("columns", [2, 6])
def test_a_draft_vocabulary_of_another_size_is_exact(monkeypatch, columns):
    """Ids that the draft lacks have q = 0; ids that the target lacks are never proposed."""
    draft = random_logits(4, 2, columns=columns)
    b, law, _, (p, q) = enumerated(monkeypatch, 2, 4, "plain", draft=draft)
    assert distance(law, reference(b, 2, b.target.logits)) < 1e-10
    assert q.shape == p.shape and (q[2:].sum() == 0) == (columns == 2)


@pytest.mark.parametrize("path", [(0, 1), (2, 2), (1, 3)], ids=str)
def test_certain_proposals_are_tested_as_such(monkeypatch, path):
    """A look-up, or a greedy draft, has q = 1 for its token.

    D4: jaymody/speculative-sampling#3
    """
    cells = list(itertools.product((0, 1), repeat=2))
    b = bench(len(cells), 2, 4, "penalties", "rejection")
    p = [b.process([*PROMPT, *path[:i]], b.target.logits) for i in range(2)]
    edges = [float(p[i][token]) for i, token in enumerate(path)]
    uniforms = torch.tensor(
        [[e * (1 + (1e-12 if c else -1e-12)) for c, e in zip(cell, edges)] for cell in cells],
        dtype=torch.float64,
    )
    monkeypatch.setattr(noise, "uniform", lambda keys, index, stream: uniforms)
    left = []
    monkeypatch.setattr(Rules, "draw", lambda self, p, *_: left.append(p) or p.argmax(-1))
    tokens = torch.tensor([path] * len(cells))
    b.drafter.propose = lambda state, k: Proposal(tokens, torch.full_like(state.length, k))
    law: dict[tuple, float] = {}
    for outcome, cell, own in zip(b.run(2), cells, left[0][:, 0]):
        weight = 1.0
        for above, edge in zip(cell, edges):
            weight *= 1 - edge if above else edge
        n = outcome.n_accepted
        for token, mass in enumerate((own / own.sum()).tolist()):
            text = (*path[:n], token)
            law[text] = law.get(text, 0.0) + weight * mass
    monkeypatch.undo()
    law = complete(b, {text: mass for text, mass in law.items() if mass}, 2, ())
    assert distance(law, reference(b, 2, b.target.logits)) < 1e-10


def test_a_draft_that_is_the_target_is_always_accepted(monkeypatch):
    """TV is 0 then, and a residual does not exist."""
    same = random_logits(4, 1)
    b, law, accepted, _ = enumerated(monkeypatch, 2, 4, "penalties", target=same, draft=same)
    assert accepted == pytest.approx(1, abs=1e-12)
    assert distance(law, reference(b, 2, same)) < 1e-10


def faulty_remainder(wrong):
    """Returns a `verify.remainder` that goes wrong behind a rejected token."""

    def remainder(drafted, p, q, n_proposed, n_accepted):
        at = n_accepted[:, None, None]
        mine = p.gather(1, at.expand(-1, 1, p.shape[2]))
        theirs = q.gather(1, at.clamp(max=q.shape[1] - 1).expand(-1, 1, p.shape[2]))
        bad = wrong(mine, theirs)
        return torch.where(at < n_proposed[:, None, None], bad, mine)

    return remainder


ALGEBRA_FAULTS = {
    "accept all": ("accepted", lambda d, p, q, n, u: n),
    "strict": ("accepted", lambda d, p, q, n, u: verify_accepted(d, p * 0.999, q, n, u)),
    "wrong side": ("remainder", faulty_remainder(lambda p, q: (q - p).clamp(min=1e-9))),
    "no residual": ("remainder", faulty_remainder(lambda p, q: p)),
}
verify_accepted = verify.accepted


@pytest.mark.parametrize("fault", ALGEBRA_FAULTS)
def test_the_enumeration_notices_faults(monkeypatch, fault):
    """Even a threshold that is a thousandth off."""
    with monkeypatch.context() as patch:
        patch.setattr(verify, *ALGEBRA_FAULTS[fault])
        inner = pytest.MonkeyPatch()
        b, law, _, _ = enumerated(inner, 2, 4, "plain")
    assert distance(law, reference(b, 2, b.target.logits)) > 1e-5


# Coupled -----------------------------------------------------------------------------------------


def quantiles(monkeypatch, values, count, shared=True):
    """Replaces the race by an inverse distribution function of one of `count` noise values.

    Args:
        monkeypatch: Undoes it.
        values: `[B, W]`, the noise value of each row and index.
        count: How many there are, all equally likely.
        shared: False gives the draft, which looks at one index at a time, other noise.
    """

    def draw(self, p, index, stream):
        assert stream == noise.TARGET
        own = values.gather(1, index)
        if not shared and index.shape[1] == 1:
            own = (own + count // 2) % count
        u = (own + 0.5) / count
        return (p.cumsum(-1) < u[..., None]).sum(-1).clamp(max=p.shape[-1] - 1)

    monkeypatch.setattr(Rules, "draw", draw)


def coupled_texts(
    monkeypatch, k, vocab, rules, count, blocks, target=None, shared=True, threshold=None
):
    """Returns the first three tokens for every noise of three places, in blocks of K or plainly."""
    new = 3
    paths = torch.tensor(list(itertools.product(range(count), repeat=new)))
    values = torch.zeros(len(paths), len(PROMPT) + new + 8, dtype=torch.long)
    values[:, len(PROMPT) : len(PROMPT) + new] = paths
    b = bench(len(paths), k, vocab, rules, "coupled", target, threshold=threshold)
    quantiles(monkeypatch, values, count, shared)
    ends = ENDS.get(rules, ())
    accepted = 0
    for _ in range(new):
        accepted += sum(outcome.n_accepted for outcome in b.run(k if blocks else 0))
    tokens = b.state.tokens[:, len(PROMPT) : len(PROMPT) + new].tolist()
    lengths = (b.state.length - len(PROMPT)).tolist()
    texts = [tuple(row[:n]) for row, n in zip(tokens, lengths)]
    cut = [next((text[: i + 1] for i, t in enumerate(text) if t in ends), text) for text in texts]
    return cut, accepted


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_coupled_is_plain_sampling_for_every_noise(monkeypatch, k, rules):
    """Path by path, so the laws are the same whatever the law of the noise."""
    plain, _ = coupled_texts(monkeypatch, k, 5, rules, 9, False)
    blocks, accepted = coupled_texts(monkeypatch, k, 5, rules, 9, True)
    assert blocks == plain and len(set(plain)) > 7
    assert accepted > 20


@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_coupled_cut_by_confidence_is_plain_sampling_too(monkeypatch, threshold):
    plain, _ = coupled_texts(monkeypatch, 3, 5, "plain", 9, False)
    blocks, accepted = coupled_texts(monkeypatch, 3, 5, "plain", 9, True, threshold=threshold)
    assert blocks == plain and accepted > 20


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_law_of_coupled_is_the_targets(monkeypatch, k):
    """Counted over all noise, for probabilities that are multiples of 1/12."""
    counts = torch.tensor([[1, 2, 9, 0], [3, 3, 3, 3], [6, 1, 1, 4], [0, 0, 11, 1]])
    logits = (counts / 12).double().log()
    texts, _ = coupled_texts(monkeypatch, k, 4, "plain", 12, True, target=logits)
    for text in itertools.product(range(4), repeat=3):
        want, last = 1.0, PROMPT[-1]
        for token in text:
            want, last = want * float(counts[last, token]) / 12, token
        assert abs(texts.count(text) / 12**3 - want) < 1e-10


def test_coupled_without_shared_noise_is_still_exact_but_accepts_less(monkeypatch):
    """What is shared only buys acceptance: a control for the counts above."""
    shared = coupled_texts(monkeypatch, 2, 5, "plain", 9, True)
    unshared = coupled_texts(monkeypatch, 2, 5, "plain", 9, True, shared=False)
    assert unshared[0] == shared[0] and unshared[1] < shared[1]
