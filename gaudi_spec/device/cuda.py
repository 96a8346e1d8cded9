"""NVIDIA GPUs, through the same code."""

from __future__ import annotations

import torch

from .base import Device, Work
from .compiled import compiled


class CudaDevice(Device):
    """PyTorch on the current CUDA device."""

    name = "cuda"
    captures = True
    nests = True
    quant_schemes = ("int8", "int4wo", "fp8")
    quant_hint = "choose int8, int4wo or fp8."

    @classmethod
    def missing(cls) -> str | None:
        """Returns why CUDA cannot be used, or None."""
        if torch.cuda.is_available():
            return None
        return "PyTorch finds no CUDA device; use --device cpu."

    @property
    def torch_device(self) -> torch.device:
        """The current CUDA device."""
        return torch.device("cuda", torch.cuda.current_device())

    def capture(self, work: Work, name: str = "") -> Work:
        """Returns `work` compiled by Inductor, replayed as a CUDA graph."""
        return compiled(work, options={"triton.cudagraphs": True})

    def synchronize(self) -> None:
        """Waits for the current stream's work."""
        torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """Returns PyTorch's allocations and the card's memory in GB."""
        return {
            "allocated": torch.cuda.memory_allocated() / 1e9,
            "max_allocated": torch.cuda.max_memory_allocated() / 1e9,
            "total": torch.cuda.mem_get_info()[1] / 1e9,
        }

    def describe(self) -> str:
        """Returns the card's name."""
        return torch.cuda.get_device_name()
