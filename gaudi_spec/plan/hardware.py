"""What a step costs on a machine: `t = a*layers + b*bytes`, and how a and b follow from figures.

For Gaudi the constants are fitted to speeds that Optimum Habana publishes (`calibration.yaml`), so
whatever is computed from them is *projected*.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

_FILE = Path(__file__).with_name("calibration.yaml")
# From Intel's data sheets: memory in GB, TFLOP/s in bf16 and in fp8.
_CARDS = {"gaudi2": (96.0, 432.0, 865.0), "gaudi3": (128.0, 1835.0, 1835.0)}


@dataclass(frozen=True)
class Hardware:
    """A machine, or each card of one.

    Attributes:
        name: As on the command line.
        memory: GB (10^9 bytes) of one card.
        per_layer: a, ms for each decoder layer of a step.
        per_gb: b, ms for each GB of weights and cache that a step reads.
        per_tflop: ms for each TFLOP of a step; added, not hidden behind the reads.
        per_tflop_fp8: The same for products in FP8.
        fp8_layer: ms that a layer takes longer in FP8, for casts and scales.
        reduce: ms of one all-reduce for each card besides the first; a layer has two.
        error: Mean absolute relative error of the step times that a and b were fitted to.
        source: Where the constants come from, in a sentence.
        cards: How many cards there can be.
        label: What its figures are.
        int8: The same machine where weights and activations are multiplied in 8 bits; None: they
            are unpacked first.
    """

    name: str
    memory: float
    per_layer: float
    per_gb: float
    per_tflop: float
    per_tflop_fp8: float = 0.0
    fp8_layer: float = 0.0
    reduce: float = 0.0
    error: float = 0.0
    source: str = ""
    cards: int = 8
    label: str = "projected"
    int8: Hardware | None = None

    def step(
        self, layers: int, gigabytes: float, tflop: float = 0.0, cards: int = 1, fp8: bool = False
    ) -> float:
        """Returns the ms of one forward.

        Args:
            layers: Decoder layers.
            gigabytes: What each card reads.
            tflop: What each card computes.
            cards: Over how many the layers are split.
            fp8: Whether the products are in FP8.
        """
        layer = self.per_layer + fp8 * self.fp8_layer + 2 * self.reduce * (cards - 1)
        rate = self.per_tflop_fp8 if fp8 else self.per_tflop
        return layer * layers + self.per_gb * gigabytes + rate * tflop


@dataclass(frozen=True)
class Row:
    """A published speed.

    Attributes:
        model: Hub name.
        layers: Decoder layers.
        gigabytes: GB of weights that a step reads, on all cards together.
        cards: Cards.
        milliseconds: Time of a step on each kind of card.
    """

    model: str
    layers: int
    gigabytes: float
    cards: int
    milliseconds: dict[str, float]


@functools.cache
def rows(kind: str) -> tuple[Row, ...]:
    """Returns the published rows of a kind: "single", "several" cards or "fp8"."""
    result = []
    for model, layers, gigabytes, *more in yaml.safe_load(_FILE.read_text("utf-8"))[kind]:
        speeds = dict(zip(_CARDS, more[-2:]))
        times = {name: 1000 / speed for name, speed in speeds.items()}
        result.append(Row(model, layers, gigabytes, more[0] if len(more) == 3 else 1, times))
    return tuple(result)


@functools.cache
def gaudi(name: str) -> Hardware:
    """Returns the constants of "gaudi2" or "gaudi3", fitted here to the published rows."""
    memory, bf16, fp8 = _CARDS[name]
    single = rows("single")
    work = [(row.layers, row.gigabytes) for row in single]
    times = [row.milliseconds[name] for row in single]
    (per_layer, per_gb), error = fit(work, times)
    base = Hardware(name, memory, per_layer, per_gb, 1000 / bf16, 1000 / fp8)
    # What several cards take beyond their share of the bytes goes to the all-reduces (these rows
    # scatter widely: least squares, so that none is missed by far), ...
    several = rows("several")
    scale = np.array([row.milliseconds[name] for row in several])
    rest = 1 - np.array([_alone(base, row) for row in several]) / scale
    count = np.array([2 * row.layers * (row.cards - 1) for row in several]) / scale
    reduce = float(rest @ count / (count @ count))
    # ... and what FP8 saves less than its bytes do to the casts in its layers.
    (row,) = rows("fp8")
    plain = next(other for other in single if other.model == row.model)
    gain = plain.milliseconds[name] / row.milliseconds[name]
    fp8_layer = (_alone(base, plain) / gain - _alone(base, row)) / row.layers
    source = (
        f"fitted to {len(single)} public single-stream speeds of Optimum Habana, mean absolute "
        f"error {error:.1%} of a step time; all-reduces to {len(several)} rows of 2 and 8 cards, "
        f"mean absolute error {np.abs(rest - reduce * count).mean():.0%}"
    )
    return Hardware(
        name,
        memory,
        per_layer,
        per_gb,
        base.per_tflop,
        base.per_tflop_fp8,
        fp8_layer,
        reduce,
        error,
        source,
    )


def _alone(hardware: Hardware, row: Row) -> float:
    """Returns the ms of a row's step without what its cards say to each other."""
    return hardware.step(row.layers, row.gigabytes / row.cards)


def fit(work: Sequence[tuple[float, float]], times: Sequence[float]) -> tuple[Any, float]:
    """Returns the a and b of `t = a*x + b*y` with the least mean absolute relative error.

    That fit is robust to a model that is slow for reasons of its own, and it goes exactly through
    two of the points, so all pairs are tried.

    Args:
        work: x and y of each point.
        times: t of each point.

    Returns:
        (a, b), neither negative, and the error.
    """
    x, t = np.array(work), np.array(times)
    best: tuple[Any, float] = ((0.0, 0.0), float("inf"))
    for pair in itertools.combinations(range(len(t)), 2):
        points = x[list(pair)]
        if abs(np.linalg.det(points)) < 1e-9:
            continue
        constants = np.linalg.solve(points, t[list(pair)])
        error = float(np.abs(x @ constants / t - 1).mean())
        if constants.min() >= 0 and error < best[1]:
            best = tuple(map(float, constants)), error
    return best
