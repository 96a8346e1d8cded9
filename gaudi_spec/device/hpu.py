"""Intel Gaudi. The only module that imports `habana_frameworks`, and only when it is used.

In lazy mode (`PT_HPU_LAZY_MODE=1`) operations are collected until `mark_step`; one is placed after
every prefill chunk and every cycle, so that each of them becomes one recipe of fixed shape. In
eager mode the call does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from .base import Device


class HpuDevice(Device):
    """One Gaudi card through Intel's PyTorch bridge."""

    name = "hpu"

    def __init__(self) -> None:
        self._core = importlib.import_module("habana_frameworks.torch.core")
        self._hpu = importlib.import_module("habana_frameworks.torch.hpu")

    @classmethod
    def missing(cls) -> str | None:
        """Returns why no Gaudi card can be used, or None."""
        if importlib.util.find_spec("habana_frameworks") is None:
            return (
                "the package habana_frameworks is not installed; it comes with the Intel Gaudi "
                "software (driver and PyTorch container), not from a package registry."
            )
        importlib.import_module("habana_frameworks.torch.core")
        if not torch.hpu.is_available():  # type: ignore[attr-defined]
            return "habana_frameworks is installed but reports no card; check hl-smi."
        return None

    def border(self) -> None:
        """Ends the current lazy graph."""
        self._core.mark_step()

    def synchronize(self) -> None:
        """Waits for the card."""
        self._hpu.synchronize()

    def memory(self) -> dict[str, float]:
        """Returns the card's own counters in GB."""
        stats = self._hpu.memory_stats()
        names = {"allocated": "InUse", "max_allocated": "MaxInUse", "total": "Limit"}
        return {ours: stats[theirs] / 1e9 for ours, theirs in names.items()}

    def describe(self) -> str:
        """Returns the card's name."""
        return self._hpu.get_device_name()
