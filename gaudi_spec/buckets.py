"""Plain-integer ladders: which widths and sizes exist, so that the set of shapes is closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def chunks(count: int, ladder: Sequence[int]) -> Iterator[int]:
    """Yields widths from `ladder` that together cover `count` tokens.

    The widest chunk is repeated while it fits; the rest takes the narrowest width that covers it,
    so at most one chunk is padded.

    Args:
        count: Tokens to cover; 0 yields nothing.
        ladder: Ascending widths.
    """
    while count > 0:
        width = next((w for w in ladder if w >= count), ladder[-1])
        yield width
        count -= width


def windows(slots: int, smallest: int | None) -> list[int]:
    """Returns the attention windows over `slots` cache slots: `smallest`, doubled up to `slots`.

    Args:
        slots: S.
        smallest: First window; None gives the one window `slots`.
    """
    sizes = []
    window = smallest or slots
    while window < slots:
        sizes.append(window)
        window *= 2
    return [*sizes, slots]


def drafts(most: int) -> list[int]:
    """Returns the K, ascending, that a schedule can choose from: each is a graph of its own.

    Powers of two and `most`; a power too near to `most` to be worth a graph is left out.

    Args:
        most: Largest K; 0 yields nothing.
    """
    powers = (1 << i for i in range(most.bit_length()))
    return [*(k for k in powers if 3 * k <= 2 * most), *([most] if most else [])]
