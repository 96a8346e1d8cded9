"""The device protocol. CPU semantics are the default; other devices override what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], "torch.Tensor | None"]


class Device:
    """Where models run, and the few things that are done differently there.

    Attributes:
        name: As on the command line.
        captures: Whether graphs are the default here.
        free_tokens: Tokens whose forward takes twice as long as one token's: until then the time
            goes into reading weights.
        nests: Whether its compiler takes decoder layers as nested regions.
        quant_schemes: Weight schemes that it has kernels for.
        quant_hint: What to do instead of another scheme; `{role}` is "target" or "draft".
        fp8_pow2: Whether its scales are powers of two.
    """

    name = "cpu"
    captures = False
    free_tokens = 256
    nests = False
    quant_schemes: tuple[str, ...] = ("int8", "int8wo", "int4wo", "fp8")
    quant_hint = ""
    fp8_pow2 = False

    @classmethod
    def missing(cls) -> str | None:
        """Returns what is missing to use this device here, or None if nothing is."""
        return None

    @property
    def torch_device(self) -> torch.device:
        """The `torch.device` that tensors are placed on."""
        return torch.device(self.name)

    @property
    def fp8_limit(self) -> float:
        """Largest value of its 8-bit float e4m3."""
        return 448.0

    def identify(self, root: Any) -> str:
        """Returns a name for what graphs over `root` are made of, or "" if none are kept on disk.

        Args:
            root: Everything that the work to come reaches, as it was just made.
        """
        return ""

    def capture(self, work: Work, name: str = "") -> Work:
        """Returns a replayable graph of `work`; its first call builds it and runs it once.

        Args:
            work: Takes nothing, reads and writes persistent tensors, returns one tensor or None.
            name: Tells it from all other work, in every process; "": it is not kept on disk.

        Raises:
            CaptureError: The device cannot capture what `work` does.
        """
        raise NotImplementedError

    def kernels(self) -> dict[str, Any]:
        """Returns kernels of the device's own by name, as far as its software has them.

        `models.equip` says what each name stands for.
        """
        return {}

    def border(self) -> None:
        """Marks the end of a unit of work (a prefill chunk, a cycle) on lazily executed devices."""

    def synchronize(self) -> None:
        """Waits until all queued work is finished."""

    def before_quantized(self) -> None:
        """Is called before a model is loaded that Neural Compressor works on."""

    def after_quantized(self, model: Any) -> None:
        """Is called with a converted model once it is on the device."""

    def recipes(self) -> int | None:
        """Returns the graphs that the device's own compiler has built, or None if not counted."""
        return None

    def fallbacks(self) -> int | None:
        """Returns the operations that ran outside the device's compiler, or None."""
        return None

    def memory(self) -> dict[str, float]:
        """Returns `allocated`, `max_allocated` and `total` in GB (10^9 bytes), or nothing."""
        return {}

    def counters(self) -> dict[str, float]:
        """Returns what the card says of the last second: utilisation, power in W, memory in GB."""
        return {}

    def describe(self) -> str:
        """Returns one line that names the hardware."""
        return self.name
