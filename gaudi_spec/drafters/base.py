"""What the engine asks of a drafter, and what it gives one to be built from.

A drafter guesses the next K tokens of every row; the target decides. A wrong guess costs time and
never changes a text, so a drafter has one duty besides guessing well: to be static.

- It may read `state` (`tokens`, `length`, `limit`, `rules`, `done`, `ends` ...) and the buffers
  that it allocated when it was built. Stale is what lies at and beyond `length`.
- `propose` runs inside a captured cycle, once when it is captured and never again as Python. So
  everything that changes from cycle to cycle must be in a tensor that keeps its storage; only
  `k` and `window` are constants of the graph. No host read, no branch on data, no shape that
  depends on it, writes only to whole buffers (`index_copy_`, `scatter_`), never to `state`.
- Where the target samples, a token is either certain (look-up), or drawn by `state.rules.propose`
  from the distribution that comes back in `Proposal.probs`: the very tensor, or the law is wrong.
- How many tokens are proposed may depend on the tokens before each place, never on the token
  drawn at the place itself: what is drawn must be tested, or the law is wrong.
- What is not proposed is declared by `Proposal.n_proposed`, not left out: tensors stay `[B, k]`.
- It is never told what was accepted. It sees the new `state.length` in the next cycle, and the
  host tells `committed` afterwards. A cache of its own follows the commit as the target's does:
  the token at index p lies in slot p, a query sees slots up to its own position, so what was
  rejected is hidden until it is written again, and nothing is ever rolled back. The cache must
  hold what was *proposed*; then after any acceptance it holds what was committed but for the last
  tokens, which the next `propose` reads again (`drafters/model.py`). Tokens committed in cycles
  that did not draft are fed by `catch_up`, outside the cycle.
- Rows that are done go on being computed; their proposals are ignored.

`docs/drafters.md` adds one from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..config import SpecConfig
from ..models.base import ModelAdapter
from ..state import State


class Proposal(NamedTuple):
    """What a drafter proposes for the indices `length .. length + k - 1` of every row.

    Attributes:
        tokens: `[B, k]` int64; those at and beyond `n_proposed` are fillers.
        n_proposed: `[B]` int64, how many of them are proposed. It may exceed k, or what the row's
            budget can use: that is the cycle's business.
        probs: `[B, k, V]` float32, the very distributions the tokens were drawn from; None where
            they were not drawn: then each was certain to be proposed.
    """

    tokens: torch.Tensor
    n_proposed: torch.Tensor
    probs: torch.Tensor | None = None

    def first(self, k: int) -> Proposal:
        """Returns the first k tokens of every row, which must not count for more."""
        return self._replace(
            tokens=self.tokens[:, :k], probs=None if self.probs is None else self.probs[:, :k]
        )


class Hosted(NamedTuple):
    """A drafter's model with the slot cache that the engine allocated for it.

    Attributes:
        model: Called by `propose`, at explicit positions.
        fill: Called by `catch_up`: feeds so many committed tokens from these indices of each row,
            in chunks that are graphs of their own, and returns how many chunks.
    """

    model: ModelAdapter
    fill: Callable[[Sequence[int], int], int]


@dataclass(frozen=True)
class Context:
    """What a drafter is built from. Buffers are allocated now and keep their storage.

    Attributes:
        config: Settings of the engine.
        target: The target. A drafter may read its weights and sizes; of its cache, slots before
            `length - 1` must stay as they are (the verification writes those from there on).
        draft: The draft model that the caller gave, or None.
        batch: B.
        slots: S of the target.
        host: Gives a Transformers model a slot cache of B rows; its graphs are then built in the
            warm-up, and its cache is zeroed after unsound logits.
    """

    config: SpecConfig
    target: ModelAdapter
    draft: Any
    batch: int
    slots: int
    host: Callable[[Any], Hosted]


class Drafter(Protocol):
    """Proposes up to K tokens for every row. It is built by calling the class with a `Context`.

    Methods given here are those of a drafter that has no cache; a subclass needs `propose`.

    Attributes:
        needs_draft: Whether the caller must give a draft model, or else must not. Read before
            anything is built.
        draws: Whether proposals come with `Proposal.probs` where they are tested by rejection.
        forwards: Model calls made since `reset`.
        shapes: Every `(method, B, T)` its model was called with.
        window: Slots that the text of every live row stays within in this cycle, proposals
            included: what attends or searches needs to read no more. Set before `propose`.
    """

    needs_draft: bool = False
    draws: bool = False
    forwards: int = 0
    shapes: Set[tuple[str, int, int]] = frozenset()
    window: int = 0

    def reset(self, kept: Sequence[int] = ()) -> None:
        """Forgets the previous call but for the first `kept` tokens of each row."""
        self.forwards = 0

    def behind(self, lengths: list[int], live: list[bool]) -> int:
        """Returns how many tokens of a row `catch_up` would feed now; it tells what that costs."""
        return 0

    def catch_up(self, state: State, lengths: list[int], live: list[bool]) -> None:
        """Makes the drafter's own cache cover all committed tokens but the last two.

        Args:
            state: Device state.
            lengths: The host's copy of `state.length`.
            live: Rows that still generate.
        """

    def has_room(self, length: int) -> bool:
        """Returns whether a row of `length` committed tokens can be drafted for at all."""
        return True

    def propose(self, state: State, k: int) -> Proposal:
        """Proposes up to k tokens for every row, as tensor code."""

    def committed(self, lengths: list[int], k: int) -> None:
        """Is told, after a cycle that drafted k tokens, the new lengths of all rows."""
