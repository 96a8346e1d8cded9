"""Sampling: statistics with planted faults, noise, seeds, and coupled texts."""

from __future__ import annotations

import itertools

import pytest
import tables
import torch
import toys
from transformers.generation import logits_process as theirs

import gaudi_spec
from gaudi_spec import ConfigError, InputError, SpecConfig, SpeculativeEngine, verify
from gaudi_spec.device import standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.drafters import model
from gaudi_spec.drafters.model import ModelDrafter
from gaudi_spec.drafters.ngram import CombinedDrafter, NgramDrafter
from gaudi_spec.graphs import GraphRunner
from gaudi_spec.sampling import noise
from gaudi_spec.sampling.options import Sampling
from gaudi_spec.sampling.rules import Rules
from gaudi_spec.schedule import Constant

NEW = 24
SEEDS = (11, 12, 13)
# The chance that any of the chi-square tests below fails although all is right.
FAMILY = 1e-3


@pytest.fixture(autouse=True)
def _no_stand_in_left():
    yield
    standin.remove()


# Statistics --------------------------------------------------------------------------------------


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the p-value of Pearson's test; bins that expect less than 8 are merged."""
    order = expected.argsort()
    observed, expected = observed[order].double(), expected[order].double()
    small = int((expected.cumsum(0) < 8).sum()) + 1  # these together expect 8 at least
    small = max(small, int((expected < 8).sum()))
    observed = torch.cat([observed[:small].sum()[None], observed[small:]])
    expected = torch.cat([expected[:small].sum()[None], expected[small:]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(len(expected) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def p_values(tokens: torch.Tensor, joint: torch.Tensor) -> list[float]:
    """Returns the p-values of tokens 1, 2, 3 and of all three, for `[N, 3]` ids.

    Args:
        tokens: What was drawn.
        joint: `[V, V, V]`, the law.
    """
    vocab, n = len(joint), len(tokens)
    found = []
    for place in range(3):
        others = [axis for axis in range(3) if axis != place]
        counts = torch.bincount(tokens[:, place], minlength=vocab)
        found.append(chi_square(counts, joint.sum(others) * n))
    code = (tokens[:, 0] * vocab + tokens[:, 1]) * vocab + tokens[:, 2]
    counts = torch.bincount(code, minlength=vocab**3)
    return [*found, chi_square(counts, joint.flatten() * n)]


VOCAB, ROWS, K = 8, 8000, 3
WARPED = dict(temperature=0.8, top_k=6, top_p=0.95)


def table_bench(seed, verifier="rejection", kind=ModelDrafter, **rules):
    """Returns many rows over tables, each with noise of its own."""
    target, draft = (tables.random_logits(VOCAB, s).float() for s in (1, 2))
    sampling = Sampling(do_sample=True, seed=seed, **rules)
    prompt = [1, 2, 1, 3, 1, 2, 3]  # look-up finds something behind most of its tokens
    return tables.Bench(target, draft, ROWS, K + 3, prompt, sampling, verifier, kind=kind)


def drawn(seed, verifier="rejection", **rules):
    """Returns `[ROWS, 3]` tokens of whole cycles, and their law by plain steps."""
    b = table_bench(seed, verifier, **rules)
    prompt = b.state.tokens[0, : b.prompt].tolist()
    for _ in range(3):
        b.step(K)
    joint = torch.zeros(VOCAB, VOCAB, VOCAB)
    for first, p in enumerate(b.process(prompt, b.target.logits)):
        for second, q in enumerate(b.process([*prompt, first], b.target.logits)):
            joint[first, second] = p * q * b.process([*prompt, first, second], b.target.logits)
    return b.state.tokens[:, b.prompt : b.prompt + 3], joint


def least_p(verifier="rejection", **rules):
    """Returns the smallest p-value over all seeds, and the level that each is held to."""
    values = [p for seed in SEEDS for p in p_values(*drawn(seed, verifier, **rules))]
    return min(values), FAMILY / len(values)


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("rules", [WARPED, dict(repetition_penalty=1.6, min_p=0.02)], ids=str)
def test_three_tokens_follow_the_targets_law(verifier, rules):
    """Each of them and all together, with merged bins, at a level for the whole family."""
    worst, level = least_p(verifier, **rules)
    assert worst > level


@pytest.mark.parametrize("kind", [NgramDrafter, CombinedDrafter])
def test_what_is_looked_up_keeps_the_law(kind):
    """A looked-up token is certain, q = 1, also among tokens that a model drew."""
    worst, level = least_p(kind=kind, **WARPED)
    assert worst > level


def test_looked_up_tokens_that_pass_for_drawn_ones_are_noticed(monkeypatch):
    """The control: they are tested with the model's distribution."""
    monkeypatch.setattr(model, "_certain", lambda ids, like: like)
    worst, level = least_p(kind=CombinedDrafter, **WARPED)
    assert worst < level


REAL = {name: getattr(verify, name) for name in ("accepted", "remainder")}


def accept_all(patch):
    """Every proposal that counts is taken."""
    patch.setattr(verify, "accepted", lambda d, p, q, n, u: n)


def wrong_side(patch):
    """The residual is max(q - p, 0)."""
    patch.setattr(
        verify,
        "remainder",
        lambda d, p, q, n, a: REAL["remainder"](
            d, torch.cat([q, p[:, -1:]], 1), torch.cat([p[:, :-1]], 1), n, a
        ),
    )


def residual_not_normalised(patch):
    """What the residual lacks to 1 falls to its last token, as in a walk along its sums."""

    def remainder(d, p, q, n, a):
        left = REAL["remainder"](d, p, q, n, a).clone()
        left[..., -1] += 1 - left.sum(-1)
        return left

    patch.setattr(verify, "remainder", remainder)


def warped_not_normalised(patch):
    """The test compares shares of the unfiltered target with a filtered draft."""
    patch.setattr(verify, "accepted", lambda d, p, q, n, u: REAL["accepted"](d, p * 0.8, q, n, u))


def greedy_drafts(patch):
    """The draft takes its best token and says it drew it."""
    draw = Rules.draw
    patch.setattr(
        Rules,
        "draw",
        lambda self, p, index, stream: (
            p.argmax(-1) if stream == noise.DRAFT else draw(self, p, index, stream)
        ),
    )


def bonus_from_the_draft(patch):
    """Behind a block that was accepted whole stands a token of the draft's last distribution."""
    patch.setattr(
        verify,
        "remainder",
        lambda d, p, q, n, a: torch.where(
            (a == d.shape[1])[:, None, None], q[:, -1:], REAL["remainder"](d, p, q, n, a)
        ),
    )


@pytest.mark.parametrize(
    "fault",
    [
        accept_all,
        wrong_side,
        residual_not_normalised,
        warped_not_normalised,
        greedy_drafts,
        bonus_from_the_draft,
    ],
    ids=lambda fault: fault.__name__,
)
def test_planted_faults_are_noticed(monkeypatch, fault):
    """By the same test at the same level."""
    if fault is bonus_from_the_draft:  # it comes fourth: three tokens need a shorter block
        monkeypatch.setattr(__import__(__name__), "K", 2)
    fault(monkeypatch)
    worst, level = least_p(**WARPED)
    assert worst < level


@pytest.mark.parametrize("draft", ["noisy", "unrelated"])
def test_the_engine_follows_the_law_of_transformers(draft):
    """Warpers on both sides of the test; that a wrong q is noticed, the planted faults show.

    D2: huggingface/transformers#47932
    """
    target = toys.build("llama", 5, vocab=10, scale=0.25)
    small = {"noisy": toys.noisy(target, 0.4), "unrelated": toys.build("llama", 78, vocab=10)}[
        draft
    ]
    options = dict(temperature=0.7, top_k=4, top_p=0.8)
    warp = [theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(4)]
    warp.append(theirs.TopPLogitsWarper(0.8))
    rows, prompt = 2500, [5, 6]
    joint = torch.zeros(10, 10, 10)
    pairs = list(itertools.product(range(10), repeat=2))
    with torch.no_grad():
        every = target(torch.tensor([[*prompt, *pair] for pair in pairs])).logits[:, 1:]
    for (first, second), logits in zip(pairs, every):
        for step in warp:
            logits = step(None, logits)
        p = logits.softmax(-1)
        joint[first, second] = p[0, first] * p[1, second] * p[2]
    engine = SpeculativeEngine(target, small, SpecConfig(num_assistant_tokens=3))
    texts = engine.generate([prompt] * rows, 3, sampling=Sampling(True, 3, **options))
    assert min(p_values(torch.stack(texts), joint)) > FAMILY / 8
    assert 0.02 < engine.report.acceptance_rate < 0.98
    # The control: the law without the warpers is another one.
    other = engine.generate([prompt] * rows, 3, sampling=Sampling(True, 3))
    assert min(p_values(torch.stack(other), joint)) < 1e-9


# Noise -------------------------------------------------------------------------------------------


def test_noise_is_the_same_for_ever():
    """Its bits are fixed: a stored seed gives a stored text on every device and version."""
    keys = torch.tensor(noise.row_keys(27, 2)).int()
    assert keys.tolist() == [[744464144, -542743665], [-1599221605, -1047119662]]
    place = torch.tensor([[0, 9], [0, 9]])
    test = noise.uniform(keys, place, noise.ACCEPT)
    assert torch.allclose(test, torch.tensor([[0.2623764, 0.5270996], [0.8159019, 0.8181381]]))
    clocks = noise.exponential(keys, place, noise.TARGET, 4)[:, 1]
    want = [
        [0.5905110, 0.8755972, 0.7906206, 0.0964381],
        [0.2845601, 1.3392994, 0.253663, 0.9540879],
    ]
    assert torch.allclose(clocks, torch.tensor(want))


def test_noise_is_uniform_and_independent():
    """Over tokens, places, rows, streams and seeds; 200 bins and pairs of neighbours."""
    keys = torch.tensor(noise.row_keys(1, 40)).int()
    index = torch.arange(50).expand(40, 50)
    streams = [
        (-noise.exponential(keys, index, stream, 60)).expm1().neg()
        for stream in (noise.TARGET, noise.DRAFT)
    ]
    u = torch.stack(streams)
    assert u.min() > 0 and u.max() <= 1
    pairs = {
        "itself": (u.flatten(), None),
        "tokens": (u[..., :-1].flatten(), u[..., 1:].flatten()),
        "places": (u[:, :, :-1].flatten(), u[:, :, 1:].flatten()),
        "rows": (u[:, :-1].flatten(), u[:, 1:].flatten()),
        "streams": (u[0].flatten(), u[1].flatten()),
    }
    for name, (x, y) in pairs.items():
        cells = (x * 200).long().clamp(max=199)
        if y is not None:
            cells = (x * 14).long().clamp(max=13) * 14 + (y * 14).long().clamp(max=13)
        counts = torch.bincount(cells)
        expected = torch.full_like(counts, len(cells) / len(counts), dtype=torch.float64)
        assert chi_square(counts, expected) > 1e-4, name


def test_no_place_has_the_shifted_noise_of_another():
    """The vocabulary of one place would else predict that of another."""
    keys = torch.tensor(noise.row_keys(5, 1)).int()
    clocks = noise.exponential(keys, torch.arange(300)[None], noise.TARGET, 500)[0]
    assert len(clocks.flatten().unique()) > 0.99 * clocks.numel()


def test_a_race_draws_from_a_sharp_distribution_too():
    """Also where one token has it all, and where some are impossible."""
    rules = tables.Bench(
        torch.zeros(2, 2), torch.zeros(2, 2), 3, 3, [0], Sampling(True, 1), "rejection"
    ).state.rules
    index = torch.arange(20000).expand(3, 20000)
    p = torch.tensor([[1.0, 0.0], [0.999, 0.001], [0.0, 1.0]])[:, None].expand(3, 20000, 2)
    ones = rules.draw(p, index, noise.TARGET).sum(1).tolist()
    assert ones[0] == 0 and 5 <= ones[1] <= 45 and ones[2] == 20000


# Seeds -------------------------------------------------------------------------------------------


def sample(engine=None, prompts=toys.PROMPTS, k=3, **options):
    """Returns sampled texts as lists."""
    options = dict(do_sample=True, temperature=1.5, top_k=40) | options
    engine = engine or engine_for()
    texts = engine.generate(prompts, NEW, sampling=Sampling(**options), schedule=Constant(k))
    return [text.tolist() for text in texts]


def engine_for(draft="noisy", verifier="rejection", **settings):
    """Returns an engine over the toys."""
    draft = toys.drafts()[draft] if draft else None
    settings.setdefault("num_assistant_tokens", 5)
    return SpeculativeEngine(toys.target(), draft, SpecConfig(verifier=verifier, **settings))


def test_seeds_decide_and_nothing_else_does():
    """The same seed, another call, other draws in between.

    D13: vllm-project/vllm#6038, #13196
    """
    engine = engine_for()
    first = sample(engine, seed=1)
    before = torch.get_rng_state()
    again = sample(engine, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    assert first == again == sample(engine, seed=1)
    assert len({str(sample(engine, seed=s)) for s in (2, -3, 1 << 62, 1 << 70)} | {str(first)}) == 5


def test_rows_of_one_seed_differ_and_rows_with_their_own_stand_alone():
    """In any company and slot, the same text."""
    engine, prompt = engine_for(), toys.PROMPTS[3]
    assert len(set(map(tuple, sample(engine, [prompt] * 5, seed=4)))) == 5
    seeds = [7, 8, 9]
    together = sample(engine, [prompt, toys.PROMPTS[1], prompt], seed=seeds)
    turned = sample(engine, [toys.PROMPTS[1], prompt, prompt], seed=[8, 9, 7])
    alone = [sample(engine, [p], seed=[s])[0] for p, s in zip([prompt, toys.PROMPTS[1]], seeds)]
    assert together[:2] == alone
    assert turned == [together[1], together[2], together[0]]
    assert together[0] != together[2]


def test_torch_seeds_the_default_and_a_generator_its_own():
    """A call takes one number: the next one differs, a fresh generator gives the same."""
    target, ids = toys.target(), toys.PROMPTS[3][None]

    def text(**options):
        out = gaudi_spec.generate(
            target,
            ids,
            assistant_model=toys.drafts()["noisy"],
            max_new_tokens=NEW,
            do_sample=True,
            temperature=1.5,
            **options,
        )
        return out[0, ids.shape[1] :].tolist()

    torch.manual_seed(3)
    first, second = text(), text()
    torch.manual_seed(3)
    assert [text(), text()] == [first, second] and first != second
    state = torch.get_rng_state()
    own = [text(generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert own[0] == own[1] != text(generator=torch.Generator().manual_seed(6))
    assert text(seed=5) == text(seed=5)
    gaudi_spec.generate(target, ids, max_new_tokens=3)  # greedy draws nothing
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ConfigError, match="generator"):
        text(seed=1, generator=torch.Generator())


def test_sampling_returns_every_token_of_the_support():
    """Not warped, and then the best token after all.

    D7: EricLBuehler/mistral.rs#2424
    """
    b = tables.Bench(
        torch.zeros(12, 12),
        torch.zeros(12, 12),
        300,
        6,
        [1],
        Sampling(True, 1, temperature=3.0),
        "rejection",
    )
    b.run(3)
    assert set(b.state.tokens[:, 1].tolist()) == set(range(12))


def test_unsound_drafts_do_not_spoil_the_law():
    """A draft of NaN proposes at random, which costs acceptance only."""
    target = tables.random_logits(VOCAB, 1).float()
    draft = torch.full((VOCAB, VOCAB), float("nan"))
    b = tables.Bench(target, draft, ROWS, 6, [3], Sampling(True, 2), "rejection")
    b.run(2)
    p = b.process([3], target)
    counts = torch.bincount(b.state.tokens[:, 1], minlength=VOCAB)
    assert chi_square(counts, p * ROWS) > 1e-3


# Coupled -----------------------------------------------------------------------------------------

MANY = dict(
    temperature=1.3,
    top_k=30,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    no_repeat_ngram_size=2,
    bad_words_ids=[[3, 4], [5]],
    frequency_penalty=0.3,
)


def test_coupled_equals_plain_sampling_of_the_same_seed():
    """Whatever the draft, K, cycle graphs and company; the control is another verifier."""
    plain = engine_for(None, "coupled")
    want = sample(plain, seed=6, **MANY)
    assert len({str(row) for row in want}) == 5
    for draft, k in itertools.product(toys.drafts(), (1, 3, 6)):
        engine = engine_for(draft, "coupled", num_assistant_tokens=6)
        assert sample(engine, seed=6, k=k, **MANY) == want
    assert sample(engine_for(None), seed=6, **MANY) == want  # plain rejection is plain sampling
    assert sample(engine_for("noisy"), seed=6, **MANY) != want
    rates = [
        sample(engine := engine_for(draft, "coupled"), seed=6) and engine.report.acceptance_rate
        for draft in ("self", "noisy", "unrelated")
    ]
    assert rates[0] > 0.99 and rates[0] > rates[1] > rates[2]


@pytest.mark.parametrize(
    "option",
    [
        dict(temperature=0.4),
        dict(top_k=2),
        dict(top_p=0.3),
        dict(min_p=0.6),
        dict(typical_p=0.2),
        dict(epsilon_cutoff=0.2),
        dict(eta_cutoff=0.6),
        dict(bad_words_ids=[[i] for i in range(0, 97, 2)]),
        dict(sequence_bias={(11,): 20.0, (11, 12): -20.0}),
        dict(suppress_tokens=list(range(50))),
        dict(forced_eos_token_id=5),
    ],
    ids=lambda option: next(iter(option)),
)
def test_d12_an_option_holds_for_every_drawn_token(option):
    """It changes the text, and drafts do not dilute that.

    vllm-project/vllm#42802, skyzh/tiny-llm#299
    """
    free = dict(seed=6, temperature=1.5, top_k=0)
    plain = sample(engine_for(None, "coupled"), **free | option)
    assert sample(engine_for("noisy", "coupled"), **free | option) == plain
    assert sample(engine_for(None, "coupled"), **free) != plain


@pytest.mark.parametrize(("verifier", "fuse"), [("coupled", True), ("rejection", False)])
def test_graphs_of_sampling_are_replayed_for_every_value(verifier, fuse):
    """On the emulated card: the eager text, and no recipe for another seed or temperature."""
    settings = dict(verifier=verifier, num_assistant_tokens=3, fuse_cycle=fuse)
    device = EmulatedHpuDevice()
    config = SpecConfig(strict_shapes=True, bucket_size=32, **settings)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, device)
    options = dict(do_sample=True, top_k=40) | MANY
    engine.warm_up(5, 64, quiet=True, sampling=Sampling(**options))
    recipes, eager = device.recipes(), engine_for("noisy", **settings)
    seen = set()
    for seed, change in (
        (1, {}),
        (2, dict(temperature=0.7)),
        (2, dict(top_p=0.5, top_k=3, min_p=0.2)),
        ([5, 4, 3, 2, 1], dict(repetition_penalty=2.0, bad_words_ids=[[9], [8, 7]])),
    ):
        got = sample(engine, seed=seed, **MANY | change)
        assert got == sample(eager, seed=seed, **MANY | change)
        seen.add(str(got))
    assert len(seen) == 4
    assert device.recipes() == recipes and device.fallbacks() == 0


@pytest.mark.slow
def test_coupled_text_is_the_same_compiled(monkeypatch):
    """By `torch.compile`, whose integers must wrap around too; only whole blocks are compiled."""
    run = GraphRunner.run

    def compile_blocks(self, key, work):
        with monkeypatch.context() as patch:
            if (key.role, key.width) != ("cycle", 2):
                patch.setattr(self, "_capture", False)
            return run(self, key, work)

    monkeypatch.setattr(GraphRunner, "run", compile_blocks)
    target = toys.build("llama", 3, num_hidden_layers=1)
    settings = dict(verifier="coupled", num_assistant_tokens=2, bucket_size=None)
    options = dict(seed=6, k=2, prompts=toys.PROMPTS[:3], temperature=1.3, min_p=0.01)
    options |= dict(top_k=0, repetition_penalty=1.2, frequency_penalty=0.3)
    texts = []
    for compile in ("eager", "graph"):
        config = SpecConfig(compile=compile, prefill_chunks=(16,), **settings)
        engine = SpeculativeEngine(target, toys.noisy(target), config)
        texts.append(sample(engine, **options))
        assert 0.1 < engine.report.acceptance_rate < 0.95
    assert texts[0] == texts[1] and engine.report.graphs.warmup > 0


def test_other_processors_build_their_own_graphs_once():
    """Which are active is structure; going back to known ones builds nothing."""
    device = EmulatedHpuDevice()
    config = SpecConfig(num_assistant_tokens=3, bucket_size=None)
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, device)
    counts = []
    for options in ({}, dict(top_p=0.5), {}, dict(top_p=0.9), dict(min_p=0.1)):
        sample(engine, seed=1, **options)
        counts.append(device.recipes())
    greedy = engine.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(greedy, [text[:NEW] for text in toys.references()])
    assert counts[0] < counts[1] == counts[2] == counts[3] < counts[4]


# Warpers -----------------------------------------------------------------------------------------

ALL = dict(
    temperature=(theirs.TemperatureLogitsWarper, (0.3, 1.7)),
    top_k=(theirs.TopKLogitsWarper, (1, 5, 64, 400)),
    top_p=(theirs.TopPLogitsWarper, (0.0, 0.1, 0.6, 0.95, 0.999)),
    min_p=(theirs.MinPLogitsWarper, (0.0, 0.05, 0.5, 1.0)),
    typical_p=(theirs.TypicalLogitsWarper, (0.1, 0.5, 0.95)),
    epsilon_cutoff=(theirs.EpsilonLogitsWarper, (1e-4, 0.01, 0.3)),
    eta_cutoff=(theirs.EtaLogitsWarper, (1e-4, 0.01, 0.3)),
    top_h=(getattr(theirs, "TopHLogitsWarper", None), (0.2, 0.7, 1.0)),
)


@pytest.mark.parametrize("name", ALL)
def test_a_warper_is_that_of_transformers(name):
    """On flat, sharp and partly forbidden logits of two sizes."""
    warper, values = ALL[name]
    if warper is None:
        pytest.skip("this Transformers has no such warper")
    changed = 0
    for value, spread, vocab in itertools.product(values, (0.1, 1.0, 6.0), (7, 300)):
        torch.manual_seed(1)
        logits = torch.randn(4, vocab) * spread
        logits[:, ::3] = float("-inf")
        want = warper(value)(None, logits.clone())
        state = tables.Bench(
            torch.zeros(vocab, vocab),
            torch.zeros(2, 2),
            1,
            2,
            [0],
            Sampling(True, 0, **{name: value}),
            "rejection",
        ).state
        got = state.rules.process(logits[:, None], None, state.rules.part(2))
        assert torch.equal(got[:, 0], want), (value, spread, vocab)
        changed += not torch.equal(want, logits)
    assert changed > 3


def test_all_warpers_together_are_those_of_transformers():
    """In the same order: `_get_logits_processor` of a model makes the list."""
    options = {name: values[1] for name, (_, values) in ALL.items()}
    if ALL["top_h"][0] is None:
        del options["top_h"]
    target = toys.target()
    config, _ = target._prepare_generation_config(
        None, do_sample=True, renormalize_logits=True, max_new_tokens=4, **options
    )
    target._prepare_special_tokens(config, True, device=torch.device("cpu"))
    list_of_theirs = target._get_logits_processor(config, 3, torch.zeros(1, 3), device="cpu")
    assert len(list_of_theirs) >= 8
    torch.manual_seed(0)
    logits = torch.randn(6, 97) * 2
    sampling = Sampling(True, 0, renormalize_logits=True, **options)
    b = tables.Bench(torch.zeros(97, 97), torch.zeros(97, 97), 6, 2, [0], sampling, "rejection")
    text = b.state.text(b.state.tokens[:, :0], b.state.length[:, None])
    got = b.state.rules.process(logits[:, None], text)[:, 0]
    assert torch.equal(got, list_of_theirs(torch.zeros(6, 3, dtype=torch.long), logits))


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (0, -1.0, float("inf"), "hot", True)),
        *(("top_p", v) for v in (-0.1, 1.1)),
        *(("top_k", v) for v in (-1, 2.5, 50.0, float("inf"))),
        *(("min_p", v) for v in (-0.1, 2)),
        *(("typical_p", v) for v in (0, 1.5)),
        ("epsilon_cutoff", 1.0),
        ("eta_cutoff", -1.0),
        ("repetition_penalty", 0),
        ("frequency_penalty", float("nan")),
        ("no_repeat_ngram_size", -2),
        ("exponential_decay_length_penalty", 3),
        ("exponential_decay_length_penalty", (3,)),
        ("exponential_decay_length_penalty", (3, -1.0)),
        ("seed", 1.5),
        ("seed", ["x"]),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    """When the options are made."""
    with pytest.raises(ConfigError, match=name):
        Sampling(do_sample=True, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[97]]),
        ("bad_words_ids", [[]]),
        ("sequence_bias", {(1, -2): 1.0}),
        ("sequence_bias", {3: 1.0}),
        ("sequence_bias", [[[1], "x"]]),
        ("suppress_tokens", [-1]),
        ("forced_eos_token_id", 97),
        ("seed", [1, 2]),
    ],
)
def test_a_value_that_does_not_fit_the_model_is_refused_by_name(name, value):
    """When the vocabulary or the number of rows is known."""
    with pytest.raises(ConfigError, match=name):
        engine_for().generate(toys.PROMPTS, 4, sampling=Sampling(True, **{name: value}))


def test_a_verifier_that_does_not_exist_is_refused():
    """By the names of those that do."""
    with pytest.raises(ConfigError, match="rejection or coupled"):
        SpecConfig(verifier="typical")
    assert issubclass(InputError, ConfigError)
