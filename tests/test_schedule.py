"""What chooses K: never much slower than plain decoding, near the best K, and never another text.

Time is counted in plain steps, given for each K; no clock is read here.
"""

import random

import pytest
import torch
import toys

from gaudi_spec import SpecConfig, SpeculativeEngine
from gaudi_spec.buckets import drafts
from gaudi_spec.cycle import RowOutcome
from gaudi_spec.errors import ConfigError
from gaudi_spec.estimates import Pace, estimate
from gaudi_spec.schedule import Auto, Constant, Costs, Heuristic, Schedule, schedule_of
from gaudi_spec.timing import StepTimes

MOST = 8


def line(draft, wider):
    """Returns plain steps by K: a draft step, and what each further verified token adds."""
    return {k: 1 + k * (draft + wider) for k in range(MOST + 1)}


# A small draft on a card, a larger one, one on a processor on which verification is dear, and one
# as large as the target.
CHEAP, CARD, CPU, LARGE = line(0.1, 0), line(0.24, 0.01), line(0.11, 0.13), line(1, 0)


class Run:
    """A batch under a schedule, in simulated time.

    Args:
        schedule: Chooses K.
        times: Plain steps by K.
        cold: Times become known as they are measured, which a first use is not.
        lag: Plain steps for each token that the draft reads when it has to catch up.
        foreseen: Share of that lag that is told beforehand.
        prompt: Tokens that the draft has to read at first in each call.
        slow: What a measurement is multiplied by, given the cycle and K.
    """

    def __init__(
        self,
        schedule,
        times,
        cold=False,
        lag=0.0,
        foreseen=1.0,
        seed=0,
        prompt=0,
        slow=lambda cycle, k: 1.0,
    ):
        self.schedule, self.times, self.lag, self.foreseen = schedule, times, lag, foreseen
        self.known, self.used, self.slow = StepTimes(), set(), slow
        for k, seconds in {} if cold else times.items():
            for _ in range(3):
                self.known.add(k, seconds, 256, "greedy")
        self.draw, self.prompt, self.behind = random.Random(seed), prompt, 0
        self.chosen: list[int] = []

    def go(self, tokens, *acceptances, found=1.0):
        """Decodes so many tokens a row with a draft that is right so often in it, if it finds any.

        Returns the plain steps that plain decoding takes, by those that this took.
        """
        self.schedule.begin()
        left, time = [tokens for _ in acceptances], 0.0
        self.behind = self.prompt or self.behind
        while any(left):
            known = self.known.at(256, "greedy")
            costs = Costs(known, self.foreseen * self.lag * self.behind, max(left))
            k = self.schedule.choose(len(self.chosen), costs)
            rows = []
            for row, acceptance in enumerate(acceptances):
                if left[row]:
                    rows.append(self._row(k, left[row], acceptance, found))
                    left[row] -= rows[-1].n_emitted
            seconds = self.times[k] * self.slow(len(self.chosen), k)
            if k in self.used:
                self.known.add(k, seconds, 256, "greedy")
            self.used.add(k)
            late = self.lag * self.behind if k else 0.0
            self.schedule.learn(k, rows, seconds + late)
            self.behind = 0 if k else self.behind + 1
            time += self.times[k] + late
            self.chosen.append(k)
        return tokens / time

    def _row(self, k, left, acceptance, found):
        proposed = min(k, left - 1) if found == 1 or self.draw.random() < found else 0
        n = next((i for i in range(proposed) if self.draw.random() >= acceptance), proposed)
        return RowOutcome(n + 1, n, proposed, int(n + 1 == left), 0, [])


def mean_of(count, run):
    """Returns the harmonic mean of the gains of `count` seeds, which is that of their times."""
    return count / sum(1 / run(seed) for seed in range(count))


def constant(k, times, tokens, *acceptances, count=10):
    """Returns what a constant K gains, as a mean over seeds."""
    return mean_of(count, lambda s: Run(Constant(k), times, seed=s).go(tokens, *acceptances))


def fastest(times, acceptance):
    """Returns the most tokens per plain step that a constant K reaches."""
    gains = {k: sum(acceptance**i for i in range(k + 1)) / times[k] for k in [0, *drafts(MOST)]}
    return max(gains.values())


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("times", [CHEAP, CARD, CPU], ids=["cheap", "card", "cpu"])
def test_a_perfect_draft_reaches_the_best_constant_k(times, cold):
    run = Run(Auto(MOST), times, cold)
    assert run.go(512 if cold else 256, 1.0) >= 0.95 * fastest(times, 1.0)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("times", [CHEAP, CARD, CPU, LARGE], ids=["cheap", "card", "cpu", "large"])
def test_an_unrelated_draft_is_turned_off(times, cold):
    """And that is said; with 5 % at most for finding it out, and for trying again."""
    schedule = Auto(MOST)
    run = Run(schedule, times, cold, lag=0.005)
    assert run.go(256, 0.01) >= 0.95
    assert run.chosen[-50:].count(0) >= 35
    assert schedule.reason.startswith("off, since with K = 1 a cycle takes")
    assert any(run.chosen[60:])  # it is tried again
    assert run.go(1000, 0.01) >= 0.96


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cold", [False, True])
def test_a_draft_as_large_as_the_target_is_turned_off(cold, acceptance):
    """However often it is right, since verifying costs a little too."""
    run = Run(Auto(MOST), line(1, 0.05), cold, lag=0.3)
    assert run.go(256, acceptance) >= 0.95
    assert run.chosen[-1] == 0


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("times", [CHEAP, CARD, CPU], ids=["cheap", "card", "cpu"])
def test_a_draft_in_between_comes_near_the_best_k(times, acceptance):
    gain = Run(Auto(MOST), times, cold=True).go(2000, acceptance)
    assert gain >= 0.95 * fastest(times, acceptance)
    assert gain >= 0.97


def test_a_draft_that_turns_good_comes_back_and_one_that_turns_bad_goes():
    run = Run(Auto(MOST), CPU, lag=0.01)
    assert run.go(500, 0.0) > 0.97
    run.go(300, 1.0)
    assert run.go(300, 1.0) > 0.95 * fastest(CPU, 1.0)
    run.go(100, 0.0)
    assert run.go(300, 0.0) > 0.95


@pytest.mark.parametrize(("found", "acceptance"), [(0.2, 1.0), (0.2, 0.5), (0.05, 0.9), (0.5, 0.8)])
def test_a_look_up_that_seldom_finds_something_is_judged_by_what_it_finds(found, acceptance):
    """Proposals that were not made are not accepted either."""
    times = line(0, 0.13)
    best = max(
        (1 + found * sum(acceptance**i for i in range(1, k + 1))) / times[k]
        for k in [0, *drafts(MOST)]
    )
    gains = [Run(Auto(MOST), times, seed=s).go(2000, acceptance, found=found) for s in range(10)]
    assert 10 / sum(1 / gain for gain in gains) >= 0.9 * best and min(gains) >= 0.96


@pytest.mark.parametrize("foreseen", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("lag", [0.0, 0.01, 0.02])
def test_trying_again_is_paid_from_what_was_saved(lag, foreseen):
    """Catching up counts, also where it takes longer than was foreseen."""
    run = Run(Auto(MOST), LARGE, lag=lag, foreseen=foreseen)
    run.go(100, 0.0)
    assert run.go(2000, 0.0) > 0.965


@pytest.mark.parametrize("lag", [0.1, 1.0])
def test_where_catching_up_costs_more_than_can_be_saved_nothing_is_tried_again(lag):
    run = Run(Auto(MOST), LARGE, lag=lag)
    run.go(100, 0.0)
    tried = sum(map(bool, run.chosen))
    assert run.go(1000, 0.0) == 1 and sum(map(bool, run.chosen)) == tried


def test_the_plain_step_is_measured_again_while_drafting():
    """Or a time that was once too long would never be corrected."""
    run = Run(Auto(MOST), CARD)
    run.go(2000, 0.9)
    assert 5 < run.chosen.count(0) < len(run.chosen) / 50


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("times", [CHEAP, CARD, CPU, LARGE], ids=["cheap", "card", "cpu", "large"])
@pytest.mark.parametrize("disturbed", ["the first plain step", "two", "the first draft", "some"])
def test_a_disturbed_measurement_does_no_lasting_harm(times, acceptance, disturbed):
    """Whatever is measured five times too long: as good as undisturbed, within 5 %."""

    def run(seed):
        noise = random.Random(seed)
        slow = {
            "the first plain step": lambda cycle, k: 5.0 if cycle == 1 else 1.0,
            "two": lambda cycle, k: 5.0 if cycle in (1, 2) else 1.0,
            "the first draft": lambda cycle, k: 5.0 if cycle == 4 else 1.0,
            "some": lambda cycle, k: 5.0 if noise.random() < 0.1 else 1.0,
        }[disturbed]
        return Run(Auto(MOST), times, cold=True, slow=slow, seed=seed).go(512, acceptance)

    calm = mean_of(8, lambda s: Run(Auto(MOST), times, cold=True, seed=s).go(512, acceptance))
    assert mean_of(8, run) >= 0.95 * calm


# Batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [CARD, CPU, line(0, 0.22)], ids=["card", "cpu", "look-up"])
def test_a_draft_that_is_bad_for_one_row_of_two_does_not_slow_the_batch(times):
    """On average it is right often enough to pay; but the batch ends with the other row."""
    assert 1.28 / times[1] > 1
    assert max(constant(k, times, 64, 0.15, 0.41) for k in (1, 2)) < 0.96

    def calls(seed):
        run = Run(Auto(MOST), times, seed=seed)
        return 3 / sum(1 / run.go(64, 0.15, 0.41) for _ in range(3))

    assert mean_of(20, calls) >= 0.97


@pytest.mark.parametrize("acceptances", [[0.7] * 8, [0.3, 0.5, 0.7, 0.8], [0.9, 0.9]], ids=str)
@pytest.mark.parametrize("times", [CHEAP, CARD, CPU], ids=["cheap", "card", "cpu"])
def test_a_batch_comes_near_the_best_k(times, acceptances):
    best = max(constant(k, times, 256, *acceptances) for k in [0, *drafts(MOST)])
    gain = mean_of(10, lambda s: Run(Auto(MOST), times, seed=s).go(256, *acceptances))
    assert gain >= 0.95 * best


def test_the_pace_is_that_of_the_slowest_row():
    """By hand: two rows of which one gains a token each cycle, and the other none."""
    pace, left = Pace(), 64
    assert pace.share(left) == 1
    for _ in range(20):
        left -= 1
        pace.add([outcome(1, 1), outcome(1, 0)])
        share = pace.share(left)
    assert share == pytest.approx(8 / (8 + sum(0.5 * (31 / 32) ** i for i in range(20))))
    pace.begin()
    pace.share(64)
    for _ in range(3):  # three cycles between two choices
        pace.add([outcome(1, 1), outcome(1, 1)])
    assert share < pace.share(58) < 1


def test_a_row_alone_is_the_slowest_and_the_mean():
    pace, left, draw = Pace(), 500, random.Random(0)
    pace.share(left)
    for _ in range(50):
        n = draw.randrange(4)
        pace.add([outcome(4, n)])
        left -= n + 1
        assert pace.share(left) == 1


def test_a_slowest_row_that_ends_early_is_no_gain():
    pace = Pace()
    pace.share(64)
    pace.add([outcome(1, 1), outcome(1, 0)])
    assert pace.share(10) == 1


# The draft's own prompt -------------------------------------------------------------------------


def test_a_long_prompt_that_the_draft_would_read_for_few_tokens_is_left_to_the_target():
    """The second time, when it is known how long that takes; for many tokens it pays."""
    times = CARD
    run = Run(Auto(MOST), times, lag=0.02, prompt=1000)
    run.go(256, 0.8)
    assert run.go(16, 0.8) == 1 and ", after 20." in run.schedule.reason
    assert run.go(512, 0.8) > 1.4


def test_missing_times_are_read_off_a_line():
    sizes = [0, 1, 2, 4, 8]
    assert estimate(1, {0: 2.0}, sizes) == 2.0 and estimate(2, {0: 2.0}, sizes) == float("inf")
    known = {0: 2.0, 1: 3.0, 4: 5.0}
    assert [estimate(k, known, sizes) for k in sizes] == pytest.approx([2, 3, 11 / 3, 5, 23 / 3])
    assert estimate(8, {0: 2.0, 4: 1.9}, sizes) == 2.0  # no cycle is faster than a plain one


def test_times_are_lower_quartiles_of_this_window_or_the_nearest():
    times = StepTimes()
    for seconds in (3.0, 1.0, 9.0, 2.0, 2.0):
        times.add(2, seconds, 256, "greedy")
    times.add(0, 7.0, 512, "greedy")
    times.add(2, 4.0, 1024, "greedy")
    assert times.at(1024, "greedy") == {2: 2.0}  # what was measured once may be anything
    times.add(0, 1.0, 512, "greedy")
    times.add(2, 4.0, 1024, "greedy")
    assert times.at(256, "greedy") == times.at(300, "greedy") == {0: 1.0, 2: 2.0}
    assert times.at(1024, "greedy") == {0: 1.0, 2: 4.0} and times.at(256, "sampled") == {}
    for _ in range(20):
        times.add(2, 7.0, 256, "greedy")  # what was measured long ago is forgotten
    assert times.at(256, "greedy")[2] == 7.0


def test_the_sizes_are_few():
    """Each is a graph."""
    assert [drafts(most) for most in (0, 1, 2, 3, 5, 8)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 5],
        [1, 2, 4, 8],
    ]
    for most in range(1, 33):
        assert drafts(most)[-1] == most and len(drafts(most)) <= 6


@pytest.mark.parametrize(
    ("config", "policy", "sizes"),
    [
        ({}, "auto", {0, 1, 2, 5}),
        ({"num_assistant_tokens": 4}, "constant", {4}),
        ({"num_assistant_tokens": 4, "schedule": "auto"}, "auto", {0, 1, 2, 4}),
        ({"schedule": "constant"}, "constant", {5}),
        ({"schedule": "heuristic"}, "heuristic", {1, 2, 5}),
        ({"schedule": "heuristic_transient"}, "heuristic_transient", {1, 2, 5}),
        ({"assistant_confidence_threshold": 0.3}, "confidence", {5}),
    ],
    ids=str,
)
def test_what_is_left_open_is_decided_as_documented(config, policy, sizes):
    """A K that is given is K, as in Transformers; else it is chosen."""
    schedule = schedule_of(SpecConfig(**config))
    assert (schedule.name, set(schedule.sizes)) == (policy, sizes)
    assert SpecConfig(**config).replace(batch_size=2).policy == policy


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"schedule": "cosine"}, "auto, constant, heuristic"),
        ({"assistant_confidence_threshold": 1.5}, "from 0 to 1"),
        ({"assistant_confidence_threshold": True}, "from 0 to 1"),
        ({"assistant_confidence_threshold": 0.5, "schedule": "auto"}, "give one of them"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        SpecConfig(**config)


# In the engine ----------------------------------------------------------------------------------


def weighed(engine, times):
    """Returns emitted tokens per plain step of the last call, all rows together."""
    report = engine.report
    return report.emitted_tokens / sum(times[k] * n for k, n in report.k_trace)


def run_timed(draft, times, new=80, most=MOST):
    """Returns tokens per plain step of `auto` and of the best constant K, texts being checked."""
    target, prompts = toys.target(), toys.PROMPTS[2:4]
    engine = SpeculativeEngine(target, draft, SpecConfig(max_length=256))
    want = engine.generate(prompts, new, schedule=Constant(0))
    plain = weighed(engine, times)
    constant = []
    for k in drafts(most):
        toys.assert_equal_rows(engine.generate(prompts, new, schedule=Constant(k)), want)
        constant.append(weighed(engine, times))
    auto = toys.Told(most, times)
    toys.assert_equal_rows(engine.generate(prompts, new, schedule=auto), want)
    assert engine.report.schedule == "auto" and engine.report.schedule_reason == auto.reason
    assert sum(n for _, n in engine.report.k_trace) == engine.report.cycles
    return weighed(engine, times) / plain, max(constant) / plain, engine.report


@pytest.mark.parametrize("times", [CHEAP, CARD, CPU], ids=["cheap", "card", "cpu"])
def test_the_engine_with_a_perfect_draft_reaches_the_best_constant_k(times):
    auto, best, report = run_timed(toys.target(), times)
    assert auto >= 0.95 * best and best > 1.5
    assert report.acceptance_rate == 1 and report.schedule_reason.startswith("on: with K = ")


@pytest.mark.parametrize("times", [CHEAP, CPU], ids=["cheap", "cpu"])
def test_the_engine_with_an_unrelated_draft_is_as_fast_as_without(times):
    auto, best, report = run_timed(toys.drafts()["unrelated"], times)
    assert auto >= 0.95 and auto > best
    assert report.schedule_reason.startswith("off, since with K = 1")


def test_the_engine_with_a_draft_as_large_as_the_target_is_as_fast_as_without():
    auto, best, report = run_timed(toys.drafts()["noisy"], line(1, 0.05))
    assert auto >= 0.95 and auto > best
    assert report.k_trace == [[0, report.cycles]] or report.proposed < 8


def test_a_controlling_schedule_that_never_stops_is_noticed():
    """The bound above is one that drafting on would break."""
    target, draft = toys.target(), toys.drafts()["unrelated"]
    engine = SpeculativeEngine(target, draft, SpecConfig(num_assistant_tokens=4))
    engine.generate(toys.PROMPTS[2:4], 60)
    assert weighed(engine, CPU) / 2 < 0.6


@pytest.mark.parametrize("schedule", ["auto", "heuristic", "heuristic_transient", "confidence"])
@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated", "ngram", "combined-noisy"])
def test_no_schedule_changes_a_greedy_text(draft, schedule):
    """Over several calls, so that what was learned in one serves the next."""
    draft, drafter = toys.drafted(draft)
    config = SpecConfig(num_assistant_tokens=6, schedule=schedule, drafter=drafter)
    engine = SpeculativeEngine(toys.target(), draft, config)
    for _ in range(3):
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
        assert engine.report.schedule == schedule
        assert engine.report.emitted_tokens == engine.report.accepted + engine.report.target_tokens


def test_auto_measures_in_the_engine_and_keeps_what_it_learned():
    """Real times, which nothing is asserted about but that there are some."""
    engine = SpeculativeEngine(toys.target(), toys.drafts()["self"], SpecConfig())
    engine.generate(toys.PROMPTS, toys.NEW)
    assert engine.report.k_trace[0] == [
        0,
        3,
    ]  # the plain step first: not by its first use, and twice
    assert set(engine.report.step_seconds) <= {0, 1, 2, 5}
    assert min(engine.report.step_seconds.values()) > 0
    engine.generate(toys.PROMPTS, 3)
    assert len(engine.report.step_seconds) > 1  # known from the call before


def outcome(proposed, accepted, emitted=None):
    """Returns what a cycle did to a row."""
    emitted = accepted + 1 if emitted is None else emitted
    return RowOutcome(emitted, accepted, proposed, 0, 0, [])


def test_heuristic_is_transformers_rule_on_the_compiled_sizes():
    """Two more if all rows accepted all, one less if any did not; by hand."""
    schedule = Heuristic(8, transient=False)
    assert schedule.sizes == {1, 2, 4, 8}
    chosen = []
    for rows in [
        [outcome(8, 3)],  # 8 -> 7
        [outcome(4, 4), outcome(4, 2)],  # -> 6
        [outcome(4, 4), outcome(4, 0)],  # -> 5
        [outcome(4, 1)],  # -> 4
        [outcome(4, 3)],  # -> 3
        [outcome(2, 2), outcome(1, 1)],  # -> 5
        [outcome(4, 2, 2)],  # an end of text at the second: nothing was rejected, -> 7
        [outcome(0, 0)],  # nothing was proposed, -> 7
        [outcome(4, 4)],  # -> 8, not 9
    ]:
        chosen.append(schedule.choose(0, Costs({})))
        schedule.learn(chosen[-1], rows, 0.0)
    assert [*chosen, schedule.choose(0, Costs({}))] == [8, 4, 4, 4, 4, 2, 4, 4, 4, 8]
    for _ in range(12):
        schedule.learn(1, [outcome(1, 0)], 0.0)
    assert schedule.choose(0, Costs({})) == 1


def test_heuristic_goes_on_in_the_next_call_and_transient_does_not():
    for transient, first in ((False, 1), (True, 8)):
        schedule = Heuristic(8, transient)
        for _ in range(7):
            schedule.learn(8, [outcome(8, 0)], 0.0)
        schedule.begin()
        assert schedule.choose(0, Costs({})) == first


def test_a_short_rest_is_not_drafted_past():
    """The last block takes the smallest compiled K that covers what rows can use."""

    class Always(Schedule):
        sizes = frozenset({0, 2, 4, 8})

        def choose(self, cycle, costs):
            return 8

    engine = SpeculativeEngine(toys.target(), toys.target())
    engine.generate(toys.PROMPTS[2:3], 9 + 9 + 3, schedule=Always())
    assert engine.report.k_trace == [[8, 2], [2, 1]]
    engine.generate(toys.PROMPTS[2:3], 9 + 1, schedule=Always())
    assert engine.report.k_trace == [[8, 1], [0, 1]]


# Confidence -------------------------------------------------------------------------------------


def confident(threshold, draft="self", most=6, **changes):
    """Returns an engine whose proposals end with the first doubtful token."""
    config = SpecConfig(
        num_assistant_tokens=most, assistant_confidence_threshold=threshold, **changes
    )
    return SpeculativeEngine(toys.target(), toys.drafts()[draft], config)


@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated"])
def test_the_threshold_decides_how_many_tokens_count(draft):
    """Thresholds 0 and 1 are all and one; the text is the same."""
    proposed = []
    for threshold in (0, 0.4, 0.9, 1.0):
        engine = confident(threshold, draft)
        toys.assert_equal_rows(engine.generate(toys.PROMPTS, toys.NEW), toys.references())
        proposed.append(engine.report.proposed / engine.report.drafts)
    assert proposed[0] > 4.5 and proposed == sorted(proposed, reverse=True)
    assert proposed[0] > proposed[1] > proposed[3] == 1


def test_the_first_doubtful_token_is_the_last_proposed():
    """By a forward of the draft over its own text, without cache or block."""
    engine = confident(0.5, most=4)
    prompt = toys.PROMPTS[3]
    for facts in engine.cycles([prompt], 30):
        if facts[0].n_proposed:
            break
    text = torch.cat([prompt, toys.references()[3]])
    sure = toys.target()(text[None]).logits[0].softmax(-1).max(-1).values[len(prompt) - 1 :]
    at = next((i for i in range(4) if sure[i] < 0.5), 3)
    assert facts[0].n_proposed == at + 1


def test_the_verification_is_as_wide_as_the_most_confident_row_needs():
    """And no wider; one more host read a cycle chooses it, never one a token."""
    engine = confident(0.4, "noisy", batch_size=5)
    widths = []
    for outcomes in engine.cycles(toys.PROMPTS, toys.NEW):
        widths.append(max(facts.n_proposed for facts in outcomes))
    verified = [k for k, n in engine.report.k_trace for _ in range(n)]
    assert verified == [next(k for k in (0, 1, 2, 4, 6) if k >= width) for width in widths]
    assert len(set(verified)) > 2
    assert engine.report.host_reads <= 2 * engine.report.cycles


def test_looked_up_tokens_are_certain():
    """Only what the draft model adds is cut."""
    model = toys.repetitive()
    config = SpecConfig(
        num_assistant_tokens=6, assistant_confidence_threshold=1.0, drafter="combined"
    )
    engine = SpeculativeEngine(model, toys.drafts()["unrelated"], config)
    engine.generate(toys.PROMPTS, 60)
    assert engine.report.accepted_at[5] > 0


@pytest.mark.parametrize("schedule", ["auto", "heuristic", "confidence"])
def test_every_shape_is_built_in_the_warm_up(schedule):
    """As graphs on the emulated card, where a shape that comes later is an error."""
    config = SpecConfig(
        num_assistant_tokens=4,
        schedule=schedule,
        batch_size=3,
        strict_shapes=True,
        prefill_chunks=(16,),
        bucket_size=48,
    )
    engine = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, "hpu-emulated")
    engine.warm_up(3, 96, quiet=True)
    built = engine.device.recipes()
    for call in range(6):
        rows = toys.prompts(*(1 + call, 9, 17)[: 1 + call % 3], seed=call)
        engine.generate(rows, 20 + 7 * call, eos_token_ids=[call])
        assert engine.report.graphs.after_warmup == 0 and engine.device.recipes() == built
    toys.assert_equal_rows(engine.generate(toys.PROMPTS[:3], toys.NEW), toys.references()[:3])
    if schedule == "auto":  # all times are known before the first token
        assert set(engine.report.step_seconds) == {0, 1, 2, 4}
