"""The arithmetic of speculative decoding (Leviathan et al. 2022, arXiv:2211.17192)."""

from __future__ import annotations


def expected_tokens(acceptance: float, k: int) -> float:
    """Returns E, the tokens of a cycle: (1 - a^(K+1)) / (1 - a), which is 1 + a + ... + a^K."""
    return sum(acceptance**i for i in range(k + 1))


def leviathan(acceptance: float, k: int, draft: float, verify: float = 1.0) -> float:
    """Returns the speed-up over plain decoding that arithmetic allows: E / (K c + v).

    Leviathan et al. 2022 (arXiv:2211.17192), theorem 3.8, where v = 1.

    Args:
        acceptance: Probability that a drafted token is accepted, alike at all positions.
        k: K.
        draft: c, the time of drafting one token, in plain steps of the target.
        verify: v, the time of verifying K + 1 tokens, in the same unit.
    """
    return expected_tokens(acceptance, k) / (k * draft + verify)


def break_even(k: int, draft: float, verify: float = 1.0) -> float | None:
    """Returns the acceptance at which `leviathan` is 1, or None if even 1.0 does not pay."""
    if leviathan(1.0, k, draft, verify) <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if leviathan(middle, k, draft, verify) < 1:
            low = middle
        else:
            high = middle
    return high
