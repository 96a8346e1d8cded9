"""How likely a model finds given texts: one forward at one of a few fixed widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .adapt import adapt
from .config import SpecConfig
from .device import Device
from .errors import ConfigError, InputError
from .graphs import GraphRunner, Key, Work
from .models.support import check_supported, max_positions


class Score(NamedTuple):
    """What a model thinks of the tokens of a text after its first one.

    Attributes:
        log_probs: `[N - 1]` float32 on the CPU, natural logarithms.
        greedy: `[N - 1]` bool, whether each is the most likely token.
    """

    log_probs: torch.Tensor
    greedy: torch.Tensor


class Scorer:
    """Scores batches of texts over static shapes.

    Args:
        model: A Transformers causal LM, on its device.
        batch: B, rows of a forward.
        widths: Ascending numbers of tokens that a forward reads; texts are padded up to one.
        config: Whether graphs are captured.
        device: Where the model is.

    Attributes:
        graphs: The graph runner with its counts.
    """

    def __init__(
        self, model: Any, batch: int, widths: Sequence[int], config: SpecConfig, device: Device
    ) -> None:
        check_supported(model, "target", config.allow_untested_models)
        room = max_positions(model.config)
        if not widths or min(widths) < 1 or max(widths) > (room or max(widths)):
            raise ConfigError(
                f"Widths must be from 1 to the model's {room} positions, not {list(widths)}."
            )
        self.widths, self._device = sorted(set(widths)), device
        self._model = adapt(model, "target", device, config, batch, self.widths[-1])
        self._ids = torch.zeros(
            batch, self.widths[-1] + 1, dtype=torch.long, device=device.torch_device
        )
        self._positions = torch.arange(self.widths[-1], device=device.torch_device)[None]
        self._positions = self._positions.repeat(batch, 1)
        self.graphs = GraphRunner(
            device, config.captures(device.captures), config.strict_shapes, config.max_graphs
        )

    @torch.no_grad()
    def warm_up(self, quiet: bool = False) -> None:
        """Builds the graph of every width."""
        self.graphs.warm_up(((self._key(w), self._work(w)) for w in self.widths), quiet)

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[int]]) -> list[Score]:
        """Scores up to B texts of at least 2 tokens in one forward.

        Raises:
            InputError: A text is too short, or longer than the widest forward.
        """
        need = max(map(len, texts)) - 1
        if min(map(len, texts)) < 2 or need > self.widths[-1]:
            raise InputError(
                f"A text must have from 2 to {self.widths[-1] + 1} tokens to be scored, not "
                f"{[len(text) for text in texts]}."
            )
        width = next(w for w in self.widths if w >= need)
        ids = torch.zeros(self._ids.shape, dtype=torch.long)
        for row, text in zip(ids, texts):
            row[: len(text)] = torch.tensor(text)
        self._ids.copy_(ids)
        packed = self.graphs.run(self._key(width), self._work(width))
        self._device.border()
        log_probs, greedy = packed.cpu()
        return [
            Score(log_probs[i, : len(text) - 1], greedy[i, : len(text) - 1] > 0)
            for i, text in enumerate(texts)
        ]

    def _key(self, width: int) -> Key:
        return Key("score", len(self._ids), width, width)

    def _work(self, width: int) -> Work:
        def work() -> torch.Tensor:
            self._model.cache.window = width
            logits = self._model.forward(self._ids[:, :width], self._positions[:, :width])
            following = self._ids[:, 1 : width + 1, None]
            log_probs = logits.float().log_softmax(-1).gather(2, following)
            greedy = logits.argmax(-1, keepdim=True) == following
            return torch.stack([log_probs[..., 0], greedy[..., 0].float()])

        return work
