"""An HPU for machines that have none: the code of `hpu.py`, run on the CPU over a stand-in bridge.

It proves what a CPU can prove about a program for the card: that its work can be captured, that a
replay does the same as the work, that no recipe is built after the warm-up. Its times mean nothing.
"""

from __future__ import annotations

import os

import torch

from . import standin
from .base import Work
from .checked import Checked
from .hpu import HpuDevice

# Environment: which card, and "0" to replay without checking.
GENERATION = "GAUDI_SPEC_EMULATE"
CHECK = "GAUDI_SPEC_EMULATE_CHECK"


class EmulatedHpuDevice(HpuDevice):
    """A Gaudi card in lazy mode that enforces the rules of HPU graphs.

    Args:
        generation: "gaudi2" or "gaudi3"; None reads the environment, and is gaudi2 at last.
        check: Compare the work with its recording before every replay; None reads the environment,
            and is True at last.

    Raises:
        ConfigError: The real bridge is installed, or the generation is unknown.
    """

    name = "hpu-emulated"
    quant_schemes = ("fp8",)
    quant_hint = "fp8 is what a card computes in."

    def __init__(self, generation: str | None = None, check: bool | None = None) -> None:
        standin.install(generation or os.environ.get(GENERATION, "gaudi2"))
        super().__init__()
        self.lazy = True
        self.check = os.environ.get(CHECK, "1") != "0" if check is None else check

    @classmethod
    def missing(cls) -> str | None:
        """Returns why nothing can be emulated, or None."""
        if standin.installed_for_real():
            return "habana_frameworks is installed here; use device 'hpu'."
        return None

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def capture(self, work: Work, name: str = "") -> Work:
        """Returns `work` as a graph of the stand-in, checked before each replay."""
        graph = super().capture(work)
        return Checked(graph, work) if self.check else graph

    def describe(self) -> str:
        """Returns what is emulated."""
        return f"EMULATED HPU (not a measurement): {super().describe()}"
