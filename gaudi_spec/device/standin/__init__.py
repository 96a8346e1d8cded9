"""A stand-in for Intel's `habana_frameworks`, put into `sys.modules` by the emulator alone.

Names and signatures are the bridge's own, so that code written for the card runs against it. There
is one card in a process.
"""

from __future__ import annotations

import enum
import functools
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

from ...errors import ConfigError
from . import graphs, kernels, optimum, streams
from .card import Card
from .metrics import MetricNotFound, Metrics

_TOP = "habana_frameworks"
_installed: list[Card] = []


def installed_for_real() -> bool:
    """Returns whether Intel's own package is on this machine."""
    spec = importlib.util.find_spec("habana_frameworks")
    return spec is not None and bool(spec.submodule_search_locations)


def is_installed() -> bool:
    """Returns whether the stand-in is in place."""
    return bool(_installed)


def install(generation: str) -> Card:
    """Puts the stand-in in place, once, and returns its card.

    Raises:
        ConfigError: The real package is installed, or another generation is emulated already.
    """
    if installed_for_real():
        raise ConfigError(
            "habana_frameworks is installed here, so there is nothing to emulate: use device 'hpu'."
        )
    if _installed:
        if _installed[0].generation != generation:
            raise ConfigError(
                f"This process emulates {_installed[0].generation} already, and has one card."
            )
        return _installed[0]
    card = Card(generation)
    for name, content in _contents(card).items():
        _add(name, content)
    optimum.install()
    _installed.append(card)
    return card


def remove() -> None:
    """Takes the stand-in away again; devices that were made over it keep working."""
    if _installed:
        _installed.clear()
        optimum.remove()
        for name in [n for n in sys.modules if n == _TOP or n.startswith(f"{_TOP}.")]:
            del sys.modules[name]


def _contents(card: Card) -> dict[str, dict[str, Any]]:
    """Returns the names in each module, parents first."""
    metrics = Metrics(card)
    measured = {
        "MetricNotFound": MetricNotFound,
        "metric_global": metrics.metric_global,
        "metric_localcontext": metrics.metric_localcontext,
    }
    random = _random()
    return {
        "": {},
        "torch": {},
        "torch.core": {"mark_step": functools.partial(_mark_step, card)},
        "torch.hpu": {**_hpu(card), **_graphs(card), **measured, **random},
        "torch.hpu.metrics": measured,
        "torch.hpu.random": random,
        "torch.hpex": {},
        "torch.hpex.kernels": {
            "FusedSDPA": kernels.FusedSDPA,
            "RotaryPosEmbeddingMode": kernels.RotaryPosEmbeddingMode,
            "apply_rotary_pos_emb": kernels.apply_rotary_pos_emb,
        },
        "torch.hpex.normalization": {"FusedRMSNorm": kernels.FusedRMSNorm},
        "torch.utils": {},
        "torch.utils.experimental": _experimental(card),
        "torch.utils.internal": {"is_lazy": lambda: True},
    }


def _hpu(card: Card) -> dict[str, Any]:
    return {
        "Event": streams.Event,
        "Stream": streams.Stream,
        "current_device": lambda: 0,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: card.name,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda device=None: card.memory()["MaxInUse"],
        "memory_allocated": lambda device=None: card.memory()["InUse"],
        "memory_stats": lambda device=None: card.memory(),
        "sdp_kernel": kernels.sdp_kernel,
        "reset_peak_memory_stats": lambda device=None: card.reset_peak(),
        "stream": streams.stream,
        "synchronize": lambda: None,
    }


def _graphs(card: Card) -> dict[str, Any]:
    class HPUGraph(graphs.HPUGraph):
        """A graph of this card, made without arguments as in the bridge."""

        def __init__(self) -> None:
            super().__init__(card)

    return {
        "HPUGraph": HPUGraph,
        "graph": graphs.graph,
        "wrap_in_hpu_graph": functools.partial(graphs.wrap_in_hpu_graph, card),
        "wrap_in_hpu_graph_func": functools.partial(graphs.wrap_in_hpu_graph_func, card),
    }


def _random() -> dict[str, Any]:
    return {
        "get_rng_state": lambda device="hpu": torch.get_rng_state(),
        "initial_seed": torch.initial_seed,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "set_rng_state": lambda new_state, device="hpu": torch.set_rng_state(new_state),
    }


def _experimental(card: Card) -> dict[str, Any]:
    class synDeviceType(enum.IntEnum):
        """Intel's numbers of the generations."""

        synDeviceGaudi = 1
        synDeviceGaudi2 = 4
        synDeviceGaudi3 = 5

    return {
        "_get_device_type": lambda: card.kind,
        "_is_fp16_supported": lambda: True,
        "synDeviceType": synDeviceType,
    }


def _mark_step(card: Card, device_str: str = "", sync: bool = False) -> None:
    """Ends the pending lazy graph; operations run at once here, so none is pending."""
    card.steps += 1


def _add(name: str, content: dict[str, Any]) -> None:
    """Makes one module and hangs it into its parent."""
    full = f"{_TOP}.{name}" if name else _TOP
    module = ModuleType(full, "Part of the stand-in of the emulated device, not Intel's code.")
    # No loader and no place on disk, which is what `installed_for_real` looks at.
    module.__spec__ = importlib.machinery.ModuleSpec(full, None)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[full] = module
    parent, _, child = full.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
