"""Noise without state: a hash of (seed, request, absolute position, token, stream).

Nothing is drawn in an order, so the noise of a place is the same whatever K, batch, draft or
history led there, and a graph holds no generator. Only 32-bit integer arithmetic that wraps around
is used, because it is the same on every device and some have no 64-bit kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Independent streams at one place: the target's draw, the draft's, and the test of acceptance.
TARGET, DRAFT, ACCEPT = range(3)
_STREAMS = 4
_MASK = (1 << 64) - 1


def mix(x: torch.Tensor) -> torch.Tensor:
    """Returns murmur3's finalizer of int32 values: a bijection that spreads every bit."""
    x = (x ^ _shifted(x, 16)) * -0x7A143595  # 0x85EBCA6B
    x = (x ^ _shifted(x, 13)) * -0x3D4D51CB  # 0xC2B2AE35
    return x ^ _shifted(x, 16)


def uniform(keys: torch.Tensor, index: torch.Tensor, stream: int) -> torch.Tensor:
    """Returns a number in (0, 1) for each place, `[B, T]` float32.

    Args:
        keys: `[B, 2]` int32, see `row_keys`.
        index: `[B, T]` int64, absolute positions.
        stream: Which of the independent streams.
    """
    first, second = _place(keys, index, stream)
    return _unit(mix(mix(first) ^ second))


def exponential(
    keys: torch.Tensor, index: torch.Tensor, stream: int, vocab_size: int
) -> torch.Tensor:
    """Returns independent exponential variables for each place and token, `[B, T, V]` float32.

    `argmax(log p - log E)` is a draw from p: the first of V clocks to ring, those of rate p.
    """
    first, second = _place(keys, index, stream)
    token = torch.arange(vocab_size, dtype=torch.int32, device=index.device)
    # Two rounds and two words, so that the noise of one place is no shifted copy of another's.
    return -torch.log1p(-_unit(mix(mix(token + first[..., None]) ^ second[..., None])))


def row_keys(seed: int | Sequence[int], rows: int) -> list[tuple[int, int]]:
    """Returns two int32 words for each row.

    One seed is shared: the row's number tells the rows apart. With a seed of its own, a row has the
    noise that it would have alone.
    """
    shared = isinstance(seed, int)
    pairs = [(seed, row) if shared else (seed[row], 0) for row in range(rows)]
    words = (_splitmix(_splitmix(seed & _MASK) + row & _MASK) for seed, row in pairs)
    return [(_signed(word >> 32), _signed(word & 0xFFFFFFFF)) for word in words]


def default_seed(generator: Any = None) -> int:
    """Draws a seed from `generator`, or from torch's CPU generator.

    So `torch.manual_seed` fixes a call without a seed, and the call after it gets another one. This
    one number is all that sampling ever takes from a generator.
    """
    device = "cpu" if generator is None else generator.device
    return int(torch.randint((1 << 63) - 1, (), generator=generator, device=device))


def _place(keys, index, stream) -> tuple[torch.Tensor, torch.Tensor]:
    at = index.int() * _STREAMS + stream
    return mix(mix(at) ^ keys[:, :1]), mix(mix(at + 0x3C6EF372) ^ keys[:, 1:])


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right and fills with zeros; the operator alone repeats the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    # Values near 1 round up to it; one there would be a clock that never rings.
    return ((_shifted(x, 1).float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
