"""Intel Gaudi. The only module that imports `habana_frameworks`, and only when it is used.

Both of Intel's modes are served. In *lazy* mode (`PT_HPU_LAZY_MODE=1`) work is captured as an HPU
graph over persistent buffers: operations are collected, compiled into recipes at the end of the
capture, and replayed without Python afterwards. In *eager* mode, Intel's default by now, work goes
through `torch.compile(backend="hpu_backend")`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from ..errors import CaptureError
from .base import Device, Work
from .compiled import compiled
from .hlml import Counters

_OPTIONS = {"keep_input_mutations": True, "force_static_compile": True}


class HpuDevice(Device):
    """One Gaudi card through Intel's PyTorch bridge.

    Attributes:
        lazy: Whether the bridge runs in lazy mode.
    """

    name = "hpu"
    captures = True
    quant_schemes: tuple[str, ...] = ()
    quant_hint = "measure and convert with `gaudi-spec quantize`, and pass --{role}_quant_config."
    fp8_pow2 = True

    def __init__(self) -> None:
        self._core = _habana("torch.core")
        self._hpu = _habana("torch.hpu")
        self._metrics = _habana("torch.hpu.metrics")
        self._counters = Counters()
        lazy = self.bridge_lazy()
        self.lazy = os.environ.get("PT_HPU_LAZY_MODE", "0") == "1" if lazy is None else lazy

    @classmethod
    def missing(cls) -> str | None:
        """Returns why no Gaudi card can be used, or None."""
        found = importlib.util.find_spec("habana_frameworks")
        if found is None or not found.submodule_search_locations:  # a package lies somewhere
            return (
                "the package habana_frameworks is not installed; it comes with the Intel Gaudi "
                "software (driver and PyTorch container), not from a package registry."
            )
        if not _habana("torch.hpu").is_available():
            return "habana_frameworks is installed but reports no card; check hl-smi."
        return None

    @classmethod
    def version(cls) -> str | None:
        """Returns the version of Intel's bridge, or None where its package is not installed."""
        try:
            return metadata.version("habana-torch-plugin")
        except metadata.PackageNotFoundError:
            return None

    @property
    def fp8_limit(self) -> float:
        """Largest e4m3 value: Gaudi 2 keeps the highest exponent for infinity and NaN."""
        return 240.0 if "GAUDI2" in self._hpu.get_device_name().upper() else 448.0

    def bridge_lazy(self) -> bool | None:
        """Returns whether the bridge says it runs in lazy mode, or None if it does not say."""
        try:
            return bool(_habana("torch.utils.internal").is_lazy())
        except (ImportError, AttributeError):
            return None

    def capture(self, work: Work, name: str = "") -> Work:
        """Returns `work` as an HPU graph in lazy mode, else compiled by `hpu_backend`."""
        if not self.lazy:
            return compiled(work, backend="hpu_backend", options=_OPTIONS)
        return _Captured(self._core, self._hpu, work)

    def kernels(self) -> dict[str, Any]:
        """Returns Intel's fused kernels: attention, RMS norm, rotary embedding."""
        makers = {"sdpa": _fused_sdpa, "rms_norm": _fused_rms_norm, "rope": _fused_rope}
        found = {}
        for name, maker in makers.items():
            with contextlib.suppress(ImportError, AttributeError):  # not in every build
                found[name] = maker()
        return found

    def border(self) -> None:
        """Ends the current lazy graph; nothing in eager mode."""
        if self.lazy:
            self._core.mark_step()

    def synchronize(self) -> None:
        """Waits for the card."""
        self._hpu.synchronize()

    def before_quantized(self) -> None:
        """Sets inference mode, which must be before any weight is on the card."""
        self._core.hpu_set_env()

    def after_quantized(self, model: Any) -> None:
        """Lets the graph compiler fold the scales of a converted model into its recipes."""
        self._core.hpu_initialize(model, mark_only_scales_as_const=True)

    def recipes(self) -> int | None:
        """Returns the recipes compiled so far, or None if the bridge does not count them."""
        return self._count("graph_compilation")

    def fallbacks(self) -> int | None:
        """Returns the operations that fell back to the CPU so far, or None."""
        return self._count("cpu_fallback")

    def memory(self) -> dict[str, float]:
        """Returns the card's own counters in GB."""
        stats = self._hpu.memory_stats()
        names = {"allocated": "InUse", "max_allocated": "MaxInUse", "total": "Limit"}
        return {ours: stats[theirs] / 1e9 for ours, theirs in names.items()}

    def counters(self) -> dict[str, float]:
        """Returns what Intel's management library says, where `pyhlml` is installed."""
        return self._counters.read()

    def describe(self) -> str:
        """Returns the card's name and the mode."""
        return f"{self._hpu.get_device_name()}, {'lazy' if self.lazy else 'eager'} mode"

    def _count(self, metric: str) -> int | None:
        found = self._metrics.metric_global(metric)
        return None if found is None else dict(found.stats())["TotalNumber"]


class _Captured:
    """An HPU graph that is captured by its first call, which runs the work once.

    Attributes:
        graph: The graph, or None before that call.
    """

    def __init__(self, core: ModuleType, hpu: ModuleType, work: Work) -> None:
        self._core, self._hpu, self._work = core, hpu, work
        self.graph = None
        self._output: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor | None:
        if self.graph is None:
            self._capture()
        else:
            self.graph.replay(asynchronous=True)
        return self._output

    def _capture(self) -> None:
        self._core.mark_step()  # what is still pending must not become part of the graph
        graph = self._hpu.HPUGraph()
        with self._hpu.stream(self._hpu.default_stream()):
            graph.capture_begin()
            try:
                self._output = self._work()
            except RuntimeError as error:
                raise CaptureError(
                    f"The card cannot capture this as a graph: {error} "
                    "Try SpecConfig(fuse_cycle=False), or compile='eager'."
                ) from error
            finally:
                graph.capture_end()
        self.graph = graph


def _fused_sdpa() -> Callable[..., torch.Tensor]:
    fused = _habana("torch.hpex.kernels").FusedSDPA
    return lambda q, k, v, mask, scale: fused.apply(q, k, v, mask, 0.0, False, scale)


def _fused_rms_norm() -> Callable[..., torch.Tensor]:
    fused = _habana("torch.hpex.normalization").FusedRMSNorm
    return lambda x, weight, eps: fused.apply(x, weight, eps)


def _fused_rope() -> Callable[..., torch.Tensor]:
    kernels = _habana("torch.hpex.kernels")
    rotate, halves = kernels.apply_rotary_pos_emb, kernels.RotaryPosEmbeddingMode.BLOCKWISE
    return lambda x, cos, sin: rotate(x, cos, sin, None, 0, halves)


def _habana(name: str) -> ModuleType:
    return importlib.import_module(f"habana_frameworks.{name}")
