"""Prompt lookup: what followed the last few tokens when they stood in the text before.

Rules of Transformers' `PromptLookupCandidateGenerator` (after Saxena 2023, prompt lookup decoding):
the longest n-gram at the end of the text that stood in it before, of at most
`max_matching_ngram_size` tokens; of several places the leftmost; what followed there, up to the end
of the text so far, up to K tokens, up to before an end-of-text token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..state import State
from .base import Context, Drafter, Proposal
from .model import ModelDrafter


class NgramDrafter(Drafter):
    """Looks proposals up in each row's own prompt and text; no model is run.

    Nothing larger than `[B, window]` is made, and nothing depends on what is found but
    `n_proposed`, which is 0 in a row without a match.

    Args:
        context: Only `config.max_matching_ngram_size` is read.
        shortest: Tokens that a match needs.
    """

    needs_draft = False

    def __init__(self, context: Context, shortest: int = 1) -> None:
        self._longest, self._shortest = context.config.max_matching_ngram_size, shortest

    def propose(self, state: State, k: int) -> Proposal:
        """Returns what followed the best match in each row."""
        length = state.length[:, None]
        width = self.window
        at = torch.arange(width, dtype=torch.int32, device=state.device)
        # Filler that no token equals, so that no n-gram begins before the text does.
        text = F.pad(state.tokens[:, :width], (self._longest - 1, 0), value=-1)
        matches = at < length - 1  # n-grams by their last token; the text's own end is none
        size = torch.zeros_like(matches, dtype=torch.int32)
        for back in range(self._longest):
            token = state.tokens.gather(1, (length - 1 - back).clamp(min=0))
            start = self._longest - 1 - back
            matches = matches & (text[:, start : start + width] == token)
            size = size + matches.int()
        # The longest, then the leftmost, as one number that no two places share.
        best, last = (size * width + (width - 1 - at)).max(1)
        begin = last + 1
        tokens = state.tokens.gather(1, begin[:, None] + torch.arange(k, device=state.device))
        before_end = (state.is_eos(tokens).long().cumsum(1) == 0).sum(1)
        count = torch.minimum(before_end, state.length - begin)
        return Proposal(tokens, torch.where(best >= self._shortest * width, count, 0))


class CombinedDrafter(ModelDrafter):
    """Looks proposals up first; the draft model goes on where nothing (more) was found.

    Which rows found something is data, so the model is run for all rows, always: it is fed the
    tokens that are *proposed*, looked up or its own. So its cache holds what was proposed, whatever
    its source, and follows the commit exactly as `ModelDrafter`'s does. A look-up that ends early
    is continued by the model, which has read it. Only matches of `max_matching_ngram_size` tokens
    count here: a single token that was there before says less than the model does. Beyond the
    draft's maximum positions only look-up proposes.

    Args:
        context: With a draft model.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._lookup = NgramDrafter(context, context.config.max_matching_ngram_size)

    def has_room(self, length: int) -> bool:
        """Returns True: look-up needs none."""
        return True

    def propose(self, state: State, k: int) -> Proposal:
        """Returns what was looked up, continued by the draft model as far as its slots go."""
        self._lookup.window = self.window
        found = self._lookup.propose(state, k)
        proposal = self._propose(state, k, found)
        counts = torch.maximum(found.n_proposed, proposal.n_proposed)
        return proposal._replace(n_proposed=counts)
