"""Plain-integer ladders: which widths and sizes exist, so that the set of shapes is closed."""

from __future__ import annotations

from collections.abc import Sequence


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def chunks(count: int, ladder: Sequence[int], free: float = 0) -> list[int]:
    """Returns widths from `ladder` that together cover `count` tokens in little time.

    Either one chunk covers what is left, or the widest that fits is repeated and the rest
    divided likewise. At most one chunk, the last, is padded.

    Args:
        count: Tokens to cover; 0 needs no chunk.
        ladder: Ascending widths.
        free: Tokens that take as long as a chunk takes besides its tokens.
    """
    if count <= 0:
        return []
    ways = [[width] for width in ladder if width >= count][:1]
    fitting = [width for width in ladder if width < count]
    if fitting:
        width = fitting[-1]
        ways.append([width] * (count // width) + chunks(count % width, ladder, free))
    return min(ways, key=lambda way: sum(way) + free * len(way))


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
