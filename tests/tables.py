"""Language models that are a table of logits, and whole cycles over many rows of them.

A cycle over them is the package's own; only the models are small enough to enumerate.
"""

from __future__ import annotations

import types

import torch

from gaudi_spec import cycle, host
from gaudi_spec.config import SpecConfig
from gaudi_spec.drafters.base import Context
from gaudi_spec.drafters.model import ModelDrafter
from gaudi_spec.sampling.options import Sampling
from gaudi_spec.state import State


class Table:
    """A model whose next token depends on the last one: logits `[V, V]`."""

    def __init__(self, logits: torch.Tensor, slots: int) -> None:
        self.logits, self.slots = logits, slots
        self.vocab_size = logits.shape[1]
        self.shapes: set = set()
        self.cache = types.SimpleNamespace(window=slots, batch=1)

    def forward(self, ids, positions, last=False):
        """Looks the ids up; one the table lacks is its last."""
        ids = ids[:, -1:] if last else ids
        return self.logits[ids.clamp(max=len(self.logits) - 1)]


def random_logits(vocab: int, seed: int, spread: float = 1.5, columns: int | None = None):
    """Returns a random table of logits, float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab, columns or vocab)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * spread


class Bench:
    """Many rows of one prompt under one set of rules.

    Args:
        target: Table of the target.
        draft: Table of the draft.
        rows: B.
        new: Budget of each row.
        prompt: Token ids.
        sampling: The rules.
        verifier: See `SpecConfig`.
        ends: End-of-text ids.
        least: New tokens before an end.
        kind: The drafter.
        threshold: Cuts proposals by their confidence.
    """

    def __init__(
        self,
        target,
        draft,
        rows,
        new,
        prompt,
        sampling: Sampling,
        verifier,
        ends=(),
        least=0,
        kind=ModelDrafter,
        threshold=None,
    ):
        slots = len(prompt) + new
        self.target = Table(target, slots)
        self.state = State(rows, slots, 8, self.target.vocab_size, torch.device("cpu"), verifier)
        self.state.reset([torch.tensor(prompt)] * rows, [new] * rows, least, ends, sampling)
        config = SpecConfig(max_matching_ngram_size=2, assistant_confidence_threshold=threshold)
        host = lambda model: (model, None)  # noqa: E731
        self.drafter = kind(Context(config, self.target, Table(draft, slots), rows, slots, host))
        self.drafter.window = slots
        self.prompt = len(prompt)

    def step(self, k: int) -> torch.Tensor:
        """Runs one cycle; returns the packed outcome."""
        proposal = cycle.draft(self.state, self.drafter if k else None, k)
        return cycle.check(self.state, self.target, proposal)

    def run(self, k: int) -> list[cycle.RowOutcome]:
        """Runs one cycle."""
        return cycle.unpack(self.step(k)[None])[0]

    def run_on_host(self, k: int) -> list[cycle.RowOutcome]:
        """Runs one cycle whose tokens Python decides about."""
        proposal = cycle.draft(self.state, self.drafter, k)
        logits, _ = cycle.score(self.state, self.target, proposal)
        verdict, sound = host.choose(self.state, proposal, logits)
        return cycle.unpack(cycle.commit(self.state, verdict, proposal.n_proposed, sound)[None])[0]

    def process(self, context: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Returns the distribution `[V]` after `context`, token by token without any block."""
        row = State(1, self.state.slots, 8, self.target.vocab_size, torch.device("cpu"), "coupled")
        row.tokens[0, : len(context)] = torch.tensor(context)
        for name in ("prompt", "limit", "min_length"):
            getattr(row, name).copy_(getattr(self.state, name)[:1])
        row.ends.copy_(self.state.ends)
        row.rules = self.state.rules
        index = torch.tensor([[len(context)]])
        text = row.text(row.tokens[:, :0], index)
        return self.state.rules.process(logits[context[-1]][None, None], text)[0, 0].softmax(-1)
