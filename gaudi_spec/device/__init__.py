"""Devices behind one protocol; nothing outside this package imports `habana_frameworks`."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from . import standin
from .base import Device
from .compiled import keep_compiled
from .cpu import CpuDevice
from .cuda import CudaDevice
from .emulated import EmulatedHpuDevice
from .hpu import HpuDevice

# In the order of "auto", which ends at the CPU: the emulator is used only by name.
DEVICES: dict[str, type[Device]] = {
    "hpu": HpuDevice,
    "cuda": CudaDevice,
    "cpu": CpuDevice,
    "hpu-emulated": EmulatedHpuDevice,
}


def get_device(name: str | torch.device | Device = "auto") -> Device:
    """Returns the device called `name`, or for "auto" the first available of hpu, cuda, cpu.

    Raises:
        ConfigError: The name is unknown, or that device is not available here.
    """
    if isinstance(name, Device):
        return name
    kind = name.type if isinstance(name, torch.device) else name
    kind = found(kind)
    if kind not in DEVICES:
        raise ConfigError(f"Unknown device {kind!r}: choose auto, {', '.join(DEVICES)}.")
    reason = DEVICES[kind].missing()
    if reason:
        raise ConfigError(f"Device {kind!r} is not available: {reason}")
    return DEVICES[kind]()


def found(name: str) -> str:
    """Returns what `name` stands for: for "auto" the first available of hpu, cuda, cpu."""
    if name != "auto":
        return name
    return next(key for key, device in DEVICES.items() if device.missing() is None)


def emulating() -> bool:
    """Returns whether the emulator is in place in this process, see `EmulatedHpuDevice`."""
    return standin.is_installed()


__all__ = ["Device", "emulating", "found", "get_device", "keep_compiled"]
