"""Exact speculative decoding of Hugging Face models over static shapes, for Intel Gaudi.

Public names load on first use, so that `import gaudi_spec` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

from .version import __version__

_HOME = {
    "SpecConfig": "config",
    "SpeculativeEngine": "engine",
    "Sampling": "sampling.options",
    "TokenEvent": "ledger",
    "Steps": "stopping",
    "BatchStreamer": "streaming",
    "TextDecoder": "streaming",
    "Report": "metrics",
    "generate": "hf",
    "last_report": "hf",
    "release": "hf",
    "patch_optimum_habana": "habana",
    "unpatch_optimum_habana": "habana",
    "pipeline": "doors",
    "custom_generate_path": "doors",
    "GaudiTextGenerationPipeline": "gaudi_pipeline",
    "GaudiSpecError": "errors",
    "ConfigError": "errors",
    "InputError": "errors",
    "NumericalError": "errors",
    "CheckpointError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedOptionError": "errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
