"""The CPU: the embedded default, and what tests and benchmarks run on."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from .base import Device, Work
from .compiled import compiled
from .identity import identity
from .kept import kept
from .linear import FewRowsLinear, library


class CpuDevice(Device):
    """PyTorch on the host's cores."""

    name = "cpu"
    free_tokens = 64
    nests = True

    def capture(self, work: Work, name: str = "") -> Work:
        """Returns `work` compiled by Inductor, or what was compiled under this name before."""
        return kept(work, name) if name else compiled(work)

    def identify(self, root: Any) -> str:
        """Returns a digest of what traces over `root` depend on."""
        return identity(root)

    def kernels(self) -> dict[str, Any]:
        """Returns the linear layer for few rows, where a C compiler could make it."""
        return {} if library() is None else {"linear": FewRowsLinear}

    def memory(self) -> dict[str, float]:
        """Returns the resident size of this process and the machine's memory in GB."""
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, else in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        page = os.sysconf("SC_PAGE_SIZE")
        statm = Path("/proc/self/statm")
        now = int(statm.read_text().split()[1]) * page if statm.exists() else peak
        total = os.sysconf("SC_PHYS_PAGES") * page
        return {"allocated": now / 1e9, "max_allocated": peak / 1e9, "total": total / 1e9}

    def describe(self) -> str:
        """Returns the architecture, the cores and the threads PyTorch uses."""
        return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
