"""Timing of work that runs over and over on a device, and the memory's ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .device import Device

READ_BYTES = 1 << 28  # more than any cache of a processor holds


def timed(device: Device, work: Callable[[], object], count: int, untimed: int = 1) -> list[float]:
    """Returns the seconds of each of `count` runs, after some that are not timed."""
    times = []
    device.synchronize()
    for _ in range(untimed + count):
        begin = time.perf_counter()
        work()
        device.border()
        device.synchronize()
        times.append(time.perf_counter() - begin)
    return times[untimed:]


def reading(
    device: Device, dtype: torch.dtype = torch.float32, size: int = READ_BYTES, count: int = 5
) -> float:
    """Returns bytes per second of a matrix of `size` bytes times a vector, at best."""
    columns = 1024
    shape = (size // (columns * dtype.itemsize), columns)
    matrix = torch.ones(shape, dtype=dtype, device=device.torch_device)
    vector = torch.ones(columns, dtype=dtype, device=device.torch_device)
    return matrix.nbytes / min(timed(device, lambda: matrix @ vector, count))


def copying(device: Device, size: int = READ_BYTES, count: int = 5) -> float:
    """Returns bytes per second that a copy of `size` bytes reads and writes, at best."""
    source = torch.ones(size // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(device, lambda: target.copy_(source), count))
