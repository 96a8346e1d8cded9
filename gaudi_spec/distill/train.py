"""The training loop: forward KL from the target's noted distribution to the draft's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .heldout import HeldOut, agreement
from .teacher import Sample

_POOL = 8  # batches whose rows are sorted by length


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        seed: Decides the order of the rows.
        batch: Rows of a step.
        learning_rate: Peak; reached after a twentieth of the steps, then falling to 0 in a line.
        checks: Validations over the whole run.
        weight_decay: Of AdamW.
    """

    seed: int = 0
    batch: int = 16
    learning_rate: float = 1e-3
    checks: int = 20
    weight_decay: float = 0.01


@dataclass
class Progress:
    """What a stopped run needs besides weights.

    Attributes:
        step: Steps done.
        total: Steps planned.
        best: Best held-out agreement.
        history: Of each validation: step, loss since the last one, agreement, by kind too.
    """

    step: int = 0
    total: int = 0
    best: float = -1.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains one draft on a corpus, with checkpoints in a directory.

    Args:
        student: From `student.build`.
        corpus: All shards, see `join`.
        held_out: For validation.
        directory: Where `state.pt` and `best.pt` go; a state found there is continued.
        settings: How.
        device: Where to train.
    """

    def __init__(
        self,
        student: Any,
        corpus: Sample,
        held_out: HeldOut,
        directory: Path,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.student, self.held_out, self.settings = student.to(device), held_out, settings
        self.progress = Progress()
        self._corpus, self._device, self._directory = corpus, device, directory
        self._row_of = _rows_of_ids(student)
        self._optimizer = torch.optim.AdamW(
            student.parameters(), settings.learning_rate, (0.9, 0.95), 1e-8, settings.weight_decay
        )
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))
        directory.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self, steps: int | None, deadline: float, tell: Callable[[Progress], Any]) -> Progress:
        """Trains until the planned steps are done or time is up, and loads the best weights.

        Args:
            steps: Steps to plan. None: as many as the first ones show to fit before `deadline`.
            deadline: `time.monotonic()` at which to stop; a later run can go on from there.
            tell: Called after every step.
        """
        progress = self.progress
        if not progress.total:
            progress.total = steps or self._plan(deadline)
        every = max(1, progress.total // self.settings.checks)
        losses: list[torch.Tensor] = []
        self.student.train()
        while progress.step < progress.total and time.monotonic() < deadline:
            losses.append(self._step(progress.step))
            progress.step += 1
            if progress.step % every == 0 or progress.step == progress.total:
                self._check(float(torch.stack(losses).mean()))
                losses.clear()
            tell(progress)
        if losses:
            self._check(float(torch.stack(losses).mean()))
        self.student.load_state_dict(torch.load(self._directory / "best.pt", weights_only=True))
        self.student.eval()
        return progress

    def _plan(self, deadline: float, probes: int = 4) -> int:
        """Returns how many steps fit; the weights are as before."""
        saved = {name: value.clone() for name, value in self.student.state_dict().items()}
        begin = time.monotonic()
        for step in range(probes):
            self._batch_loss(step).backward()
            self._optimizer.zero_grad()
        seconds = (time.monotonic() - begin) / probes
        self.student.load_state_dict(saved)
        return max(probes, int(0.95 * (deadline - time.monotonic()) / seconds))

    def _step(self, step: int) -> torch.Tensor:
        total = self.progress.total
        warm = max(total // 20, 1)
        rise, fall = (step + 1) / warm, (total - step) / max(total - warm, 1)
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(rise, fall, 1.0)
        loss = self._batch_loss(step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _batch_loss(self, step: int) -> torch.Tensor:
        """Returns the mean cross-entropy, over the continuations of one batch, to the target."""
        part = self._batch(step)
        tokens, first = part.tokens.long(), (part.prompt.long() - 1)[:, None]
        hidden = self.student.model(input_ids=tokens[:, :-1])[0]
        places = first + torch.arange(part.top_ids.shape[1], device=self._device)
        places = places.clamp(max=hidden.shape[1] - 1)
        wanted = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        scores = self.student.lm_head(wanted).float()
        row = self._row_of[part.top_ids.long()]
        weight = part.top_logprobs.float().exp() * (row >= 0)
        live = torch.arange(places.shape[1], device=self._device) < part.count[:, None]
        cross = weight * (scores.logsumexp(-1, keepdim=True) - scores.gather(-1, row.clamp(min=0)))
        return (cross.sum(-1) * live).sum() / live.sum()

    def _batch(self, step: int) -> Sample:
        """Returns the rows of a step, cut to the longest of them.

        Every pass over the corpus has an order of its own, with rows of like length together.
        """
        lengths = self._corpus.prompt + self._corpus.count
        size = min(self.settings.batch, len(lengths))
        passes, place = divmod(step, len(lengths) // size)
        if self._order[0] != passes:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + passes)
            pools = torch.randperm(len(lengths), generator=generator).split(_POOL * size)
            order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
            self._order = passes, order
        rows = self._order[1][place * size : (place + 1) * size]
        part = Sample(*(value[rows].to(self._device) for value in self._corpus))
        wide, new = int(lengths[rows].max()), int(part.count.max())
        return part._replace(
            tokens=part.tokens[:, :wide],
            top_ids=part.top_ids[:, :new],
            top_logprobs=part.top_logprobs[:, :new],
        )

    def _check(self, loss: float) -> None:
        """Validates, notes, keeps the best weights and what a later run needs."""
        self.student.eval()
        matches = self.held_out.matches(self.student)
        agreed, kinds = agreement(matches), self.held_out.by_kind(matches)
        self.student.train()
        progress = self.progress
        facts = {"step": progress.step, "loss": loss, "agreement": agreed, "by_kind": kinds}
        progress.history.append(facts)
        weights = self.student.state_dict()
        if agreed > progress.best:
            progress.best = agreed
            _save(weights, self._directory / "best.pt")
        state = {"weights": weights, "optimizer": self._optimizer.state_dict()}
        _save(state | {"progress": vars(progress)}, self._directory / "state.pt")

    def _resume(self) -> None:
        path = self._directory / "state.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.student.load_state_dict(state["weights"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])


def join(shards: list[Sample]) -> Sample:
    """Returns all shards as one, padded to common widths."""
    columns = []
    for values in zip(*shards):
        width = max(value.shape[1] if value.dim() > 1 else 0 for value in values)
        columns.append(torch.cat([_widen(value, width) for value in values]))
    return Sample(*columns)


def _widen(value: torch.Tensor, width: int) -> torch.Tensor:
    if value.dim() == 1 or value.shape[1] == width:
        return value
    return nn.functional.pad(value, (0, 0) * (value.dim() - 2) + (0, width - value.shape[1]))


def _rows_of_ids(student: Any) -> torch.Tensor:
    """Returns `[V]` int64, the row of the head for each id, or -1 where it has none."""
    size = student.config.vocab_size
    kept = getattr(student, "kept", torch.arange(size)).long()
    rows = torch.full((size,), -1, device=kept.device)
    return rows.index_copy(0, kept, torch.arange(len(kept), device=kept.device))


def _save(value: Any, path: Path) -> None:
    part = path.with_suffix(".tmp")
    torch.save(value, part)
    os.replace(part, path)
