"""Picks K, the draft tokens of the next cycle, from the closed set of compiled values.

K belongs to the whole batch, since it is a shape. It decides how fast a text comes and never what
it says. `auto`, the default, compares what each K is expected to emit with what its cycle takes;
K = 0 is plain decoding, so drafting that does not pay turns itself off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .buckets import drafts
from .config import SpecConfig
from .cycle import RowOutcome
from .estimates import Acceptance, Pace, estimate

_RETURN = 1.05  # expected speed-up at which a draft that was turned off comes back
_REFRESH = 64  # cycles after which the plain step is measured again
_EARLY, _CLEAR = 8, 2.0  # cycles after which it is so for the first time, if less is expected
_SHARE = 0.03  # of plain decoding that may be spent on trying a draft that was turned off
_SAVED = 8.0  # plain steps that can be saved up for it, or owed


class Costs(NamedTuple):
    """What is known of time when K is chosen.

    Attributes:
        seconds: Wall time of a cycle by K, as far as measured; 0 is a plain step.
        catch_up: Seconds that the draft would need first, to read what was decoded without it.
        left: Tokens that the row with the most of them may still emit.
    """

    seconds: Mapping[int, float]
    catch_up: float = 0.0
    left: float = math.inf


class Schedule:
    """Chooses how many tokens to draft; a subclass needs `sizes` and `choose`.

    Attributes:
        name: In reports.
        sizes: Every K that `choose` can return: each is a shape of its own.
        reason: Why K is what it is, in one line; empty where there is nothing to say.
    """

    name = "custom"
    sizes: Collection[int] = frozenset()
    reason = ""

    def begin(self) -> None:
        """Is told that a call begins."""

    def choose(self, cycle: int, costs: Costs) -> int:
        """Returns K for the given cycle of a call, counted from 0; K = 0 is plain decoding."""
        raise NotImplementedError

    def learn(self, k: int, rows: Sequence[RowOutcome], seconds: float) -> None:
        """Is told what a cycle of k drafts did to each live row, and its wall time."""


class Constant(Schedule):
    """The same K in every cycle.

    Args:
        k: Draft tokens.
        name: In reports.
    """

    def __init__(self, k: int, name: str = "constant") -> None:
        self.sizes, self.name, self._k = frozenset({k}), name, k

    def choose(self, cycle: int, costs: Costs) -> int:
        """Returns k."""
        return self._k


class Heuristic(Schedule):
    """Transformers' rule: 2 more if every row accepted all its proposals, else 1 less.

    It counts from 1 to `most`; K is the largest compiled one that the count reaches.

    Args:
        most: Largest K, and the first.
        transient: Start every call anew.
    """

    def __init__(self, most: int, transient: bool) -> None:
        self.name = "heuristic_transient" if transient else "heuristic"
        self.sizes = frozenset(drafts(most))
        self._most, self._transient, self._count = most, transient, most

    def begin(self) -> None:
        """Forgets the call before, if it is transient."""
        if self._transient:
            self._count = self._most

    def choose(self, cycle: int, costs: Costs) -> int:
        """Returns the largest K that the count reaches."""
        return max(k for k in self.sizes if k <= self._count)

    def learn(self, k: int, rows: Sequence[RowOutcome], seconds: float) -> None:
        """Counts up or down."""
        if any(row.n_proposed for row in rows):
            rejected = any(row.rejected for row in rows)
            self._count = max(1, self._count - 1) if rejected else min(self._most, self._count + 2)


class Auto(Schedule):
    """The K with which a batch is expected to end first, 0 among them.

    Times that are missing are read off the line through those there are; where there is only the
    plain step, the smallest K is tried first. While drafting is off, it is tried again whenever
    that costs less than 3 % of the plain steps made since, and comes back for an expected 5 %.
    While it is on, the plain step is measured again every 64 cycles, and once after 8 where the
    expected gain is small. What was learned stays for the next call.

    Args:
        most: Largest K.
    """

    name = "auto"

    def __init__(self, most: int) -> None:
        self.sizes = frozenset({0, *drafts(most)})
        self.acceptance, self.pace = Acceptance(most), Pace()
        self._off = False
        self._saved = 0.0
        self._since_plain, self._checked = 0, False
        self._plain = math.inf

    def begin(self) -> None:
        """Forgets how far the rows of the call before had come."""
        self.pace.begin()

    def choose(self, cycle: int, costs: Costs) -> int:
        """Returns the K that is expected to be the fastest, or one that is worth a trial."""
        share = self.pace.share(costs.left)
        if 0 not in costs.seconds:
            return 0
        self._plain = min(costs.seconds.values())  # every cycle has such a step in it
        known = {**costs.seconds, 0: self._plain}
        times = {k: estimate(k, known, self.sizes) for k in sorted(self.sizes)}
        emitted = [1 + share * (tokens - 1) for tokens in self.acceptance.expected()]
        reading = costs.catch_up / costs.left  # of each token that is left
        gains = {k: self._plain / (times[k] / emitted[k] + reading * (k > 0)) for k in times}
        best = max(gains, key=gains.__getitem__)
        early = not self._checked and gains[best] < _CLEAR
        if self._since_plain >= (_EARLY if early else _REFRESH):
            self._checked = True
            return 0
        if best and gains[best] > (_RETURN if self._off else 1):
            self._off = False
            self._explain(best, times[best], emitted[best], costs.catch_up)
            return best
        if not self._off:
            self._off = True
            self.acceptance.doubt()
        del gains[0]
        trial = max(gains, key=gains.__getitem__)
        self._explain(trial, times[trial], emitted[trial], costs.catch_up)
        price = (costs.catch_up + times[trial]) / self._plain - 1
        return trial if price <= self._saved else 0

    def learn(self, k: int, rows: Sequence[RowOutcome], seconds: float) -> None:
        """Updates acceptance, pace, and what may be spent on trials."""
        self.pace.add(rows)
        if k:
            self.acceptance.add(k, rows)
        self._since_plain = self._since_plain + 1 if k else 0
        if k and self._off:
            self._saved = max(-_SAVED, self._saved - max(0.0, seconds / self._plain - 1))
        elif not k:
            self._saved = min(_SAVED, self._saved + _SHARE)

    def _explain(self, k: int, seconds: float, emitted: float, catch_up: float) -> None:
        self.reason = (
            f"{'off, since' if self._off else 'on:'} with K = {k} a cycle takes "
            f"{seconds / self._plain:.2f} plain steps and is expected to emit "
            f"{emitted:.2f} tokens a row"
        )
        if catch_up:
            self.reason += f", after {catch_up / self._plain:.1f} plain steps of reading"


def schedule_of(config: SpecConfig) -> Schedule:
    """Returns a new schedule as `SpecConfig.policy` names it."""
    most = config.most_drafts
    if config.policy == "auto":
        return Auto(most)
    if config.policy.startswith("heuristic"):
        return Heuristic(most, config.policy == "heuristic_transient")
    return Constant(most, config.policy)
