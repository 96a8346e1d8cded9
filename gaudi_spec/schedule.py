"""Picks K, the draft tokens of the next cycle, from the closed set of compiled values.

K belongs to the whole batch, since it is a shape. It decides how fast a text comes and never what
it says. `auto`, the default, compares what each K is expected to emit with what its cycle takes;
K = 0 is plain decoding, so drafting that does not pay turns itself off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .buckets import drafts
from .config import SpecConfig
from .cycle import RowOutcome

_START = 0.7  # acceptance of a draft that nothing is known about
_WEIGHT = 2.0  # proposals that this, or the position before, counts for
_MEMORY = 1 - 1 / 32  # share of what was counted that a cycle leaves
_DOUBTED = 4.0  # proposals that what was counted is worth once the draft is turned off
_RETURN = 1.05  # expected speed-up at which a draft that was turned off comes back
_REFRESH = 64  # cycles after which the plain step is measured again
_SHARE = 0.03  # of plain decoding that may be spent on trying a draft that was turned off
_SAVED = 8.0  # plain steps that can be saved up for it, or owed


class Costs(NamedTuple):
    """What is known of time when K is chosen.

    Attributes:
        seconds: Wall time of a cycle by K, as far as measured; 0 is a plain step.
        catch_up: Seconds that the draft would need first, to read what was decoded without it.
    """

    seconds: Mapping[int, float]
    catch_up: float = 0.0


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


class Acceptance:
    """Running estimate of how often anything is proposed, and of what is accepted, by position.

    The acceptance of a position is that of proposals behind accepted ones. It is as good as that of
    the position before it until it is known better, and again when it has not been tried for long.

    Args:
        most: Positions.
    """

    def __init__(self, most: int) -> None:
        none = [0.0] * (most - 1)
        self._found, self._cycles = _WEIGHT, _WEIGHT
        self._hits, self._tries = [_WEIGHT * _START, *none], [_WEIGHT, *none]

    def expected(self) -> list[float]:
        """Returns the tokens that a row is expected to emit in a cycle of 0, 1, 2 ... drafts."""
        chances, rate, weight = [self._found / self._cycles], 0.0, 0.0
        for hits, tries in zip(self._hits, self._tries):
            rate = (hits + weight * rate) / (tries + weight)
            weight = _WEIGHT
            chances.append(chances[-1] * rate)
        return list(accumulate([1.0, *chances[1:]]))

    def add(self, k: int, rows: Sequence[RowOutcome]) -> None:
        """Counts what a cycle of k drafts has shown; the last of a row may be short for its end."""
        counted = [row for row in rows if row.n_proposed or not row.done]
        self._found = _MEMORY * self._found + sum(row.n_proposed > 0 for row in counted)
        self._cycles = _MEMORY * self._cycles + len(counted)
        tested = [row for row in counted if row.n_proposed]
        if tested:
            self._fade(_MEMORY)
        for row in tested:
            missed = row.rejected or (not row.done and row.n_accepted < k)
            for position in range(row.n_accepted + missed):
                self._tries[position] += 1
                self._hits[position] += position < row.n_accepted

    def doubt(self) -> None:
        """Makes what comes count for more than what was."""
        self._fade(min(1.0, _DOUBTED / self._tries[0]))

    def _fade(self, share: float) -> None:
        self._tries = [share * tries for tries in self._tries]
        self._hits = [share * hits for hits in self._hits]


class Auto(Schedule):
    """The K with the most expected tokens per second, 0 among them.

    Times that are missing are read off the line through those there are; where there is only the
    plain step, the smallest K is tried first. While drafting is off, it is tried again whenever
    that costs less than 3 % of the plain steps made since, and comes back for an expected 5 %.
    While it is on, the plain step is measured again every 64 cycles. What was learned stays for
    the next call.

    Args:
        most: Largest K.
    """

    name = "auto"

    def __init__(self, most: int) -> None:
        self.sizes = frozenset({0, *drafts(most)})
        self.acceptance = Acceptance(most)
        self._off = False
        self._saved = 0.0
        self._since_plain = 0
        self._plain = math.inf

    def choose(self, cycle: int, costs: Costs) -> int:
        """Returns the K that is expected to be the fastest, or one that is worth a trial."""
        known = costs.seconds
        if 0 not in known or self._since_plain >= _REFRESH:
            return 0
        self._plain = known[0]
        times = {k: estimate(k, known, self.sizes) for k in sorted(self.sizes)}
        emitted = self.acceptance.expected()
        gains = {k: self._plain * emitted[k] / times[k] for k in times}
        best = max(gains, key=gains.__getitem__)
        if best and gains[best] > (_RETURN if self._off else 1):
            self._off = False
            self._explain(best, times[best], emitted[best])
            return best
        if not self._off:
            self._off = True
            self.acceptance.doubt()
        del gains[0]
        trial = max(gains, key=gains.__getitem__)
        self._explain(trial, times[trial], emitted[trial])
        price = (costs.catch_up + times[trial]) / self._plain - 1
        return trial if price <= self._saved else 0

    def learn(self, k: int, rows: Sequence[RowOutcome], seconds: float) -> None:
        """Updates acceptance, and what may be spent on trials."""
        if k:
            self.acceptance.add(k, rows)
        self._since_plain = self._since_plain + 1 if k else 0
        if k and self._off:
            self._saved = max(-_SAVED, self._saved - max(0.0, seconds / self._plain - 1))
        elif not k:
            self._saved = min(_SAVED, self._saved + _SHARE)

    def _explain(self, k: int, seconds: float, emitted: float) -> None:
        self.reason = (
            f"{'off, since' if self._off else 'on:'} with K = {k} a cycle takes "
            f"{seconds / self._plain:.2f} plain steps and is expected to emit "
            f"{emitted:.2f} tokens a row"
        )


def estimate(k: int, known: Mapping[int, float], sizes: Collection[int]) -> float:
    """Returns what a cycle of k drafts takes, in seconds, as far as that can be told.

    Args:
        k: One of `sizes`.
        known: Seconds by K, 0 among them.
        sizes: Every K.
    """
    if k in known:
        return known[k]
    points = sorted(x for x in known if x in sizes)
    below = [x for x in points if x < k]
    above = [x for x in points if x > k]
    if above:
        left, right = below[-1], above[0]
    elif len(below) > 1:
        left, right = below[-2:]
    else:  # the smallest is tried first, as if drafts were free
        return known[0] if k == min(x for x in sizes if x) else math.inf
    slope = (known[right] - known[left]) / (right - left)
    return max(known[below[-1]] + slope * (k - below[-1]), known[0])


def schedule_of(config: SpecConfig) -> Schedule:
    """Returns a new schedule as `SpecConfig.policy` names it."""
    most = config.most_drafts
    if config.policy == "auto":
        return Auto(most)
    if config.policy.startswith("heuristic"):
        return Heuristic(most, config.policy == "heuristic_transient")
    return Constant(most, config.policy)
