"""Intel Neural Compressor: FP8 on Gaudi by measuring and converting, and int4 checkpoints.

All of it goes through the library's public module `neural_compressor.torch.quantization`. It
changes the model that it is given, so only models that were loaded for it are.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError
from .kv import add_kv_modules

# Gaudi 2 multiplies by four scales without extra work, so Neural Compressor rounds to those;
# Gaudi 3 does by any power of two.
SCALE_METHODS = {"gaudi2": "maxabs_hw", "gaudi3": "maxabs_pow2"}
CPU_SCALE_METHOD = "maxabs_pow2"
INT4 = ("gptq", "awq")


def settings(mode: str, directory: Path, scale_method: str, exclude: list[str], qdq: bool) -> dict:
    """Returns the content of a JSON file for Neural Compressor.

    Args:
        mode: "MEASURE" or "QUANTIZE".
        directory: Where the measurements are.
        scale_method: One of Neural Compressor's names; measuring ignores it.
        exclude: Names of layers that stay as they are.
        qdq: Quantize and dequantize around ordinary kernels: what a CPU can do.
    """
    values = {
        "method": "HOOKS",
        "mode": mode,
        "observer": "maxabs",
        "dump_stats_path": str(directory / "measurements" / "inc"),
        "scale_method": scale_method,
        "blocklist": {"types": [], "names": exclude},
    }
    return values | ({"use_qdq": "True", "scale_format": "CONST"} if qdq else {})


def mode_of(path: str, flag: str) -> str:
    """Returns the mode that a JSON file asks for, in capitals.

    Raises:
        ConfigError: It cannot be read, or is not such a file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot read {flag} {path}: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{flag} {path} is not a Neural Compressor configuration.")
    return str(values.get("mode", "QUANTIZE")).upper()


def prepare(model: nn.Module, path: str) -> nn.Module:
    """Puts observers into `model`, in place, as the JSON file at `path` says, and returns it."""
    config = _config(path)
    return _call(lambda: _inc().prepare(add_kv_modules(model), config), path)


def finish(model: nn.Module) -> None:
    """Writes what the observers of a prepared model have seen."""
    _inc().finalize_calibration(model)


def convert(model: nn.Module, path: str) -> nn.Module:
    """Quantizes `model`, in place, from measurements, and returns it."""
    config = _config(path)
    return _call(lambda: _inc().convert(add_kv_modules(model), config), path)


def load(name: str, device: str, **arguments: Any) -> nn.Module:
    """Loads a checkpoint whose weights are quantized: GPTQ, AWQ, or FP8.

    Args:
        name: Directory or hub name.
        device: "hpu" or "cpu".
        **arguments: As for `from_pretrained`.
    """
    return _call(lambda: _inc().load(name, format="huggingface", device=device, **arguments), name)


def loads(method: str | None, device: str) -> bool:
    """Returns whether `load` is the way to load a checkpoint that was quantized by `method`."""
    here = importlib.util.find_spec("neural_compressor") is not None
    return method is not None and (device == "hpu" or (device == "cpu" and here and method in INT4))


def _inc() -> Any:
    try:
        return importlib.import_module("neural_compressor.torch.quantization")
    except ImportError as error:
        raise ConfigError(
            f"Intel Neural Compressor is not installed: pip install neural-compressor-pt ({error})."
        ) from error


def _config(path: str) -> Any:
    return _call(lambda: _inc().FP8Config.from_json_file(path), path)


def _call(work: Any, path: str) -> Any:
    try:
        return work()
    except ConfigError:  # ours: it is not installed
        raise
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Neural Compressor cannot use {path}: {error!r}.") from error
