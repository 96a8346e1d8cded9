"""Capturing with `torch.compile`, for the devices that it has a backend for."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..paths import cache_directory
from .base import Work


def keep_compiled(directory: str | Path) -> None:
    """Keeps compiled code in `directory`, from which a later process takes it.

    To be called before the first device is made: Intel's bridge reads its variable when loaded.
    """
    path = Path(directory).expanduser().absolute()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    os.environ["PT_HPU_RECIPE_CACHE_CONFIG"] = f"{path / 'recipes'},false,8192"


def cache() -> Path:
    """Returns where compiled code is kept, and makes PyTorch keep it there."""
    default = str(cache_directory() / "compiled")
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default))


def compiled(
    work: Work, backend: str | Callable = "inductor", options: dict[str, Any] | None = None
) -> Work:
    """Returns `work` compiled whole: no graph break, no symbolic shape.

    Each graph gets a code object of its own, because compiled code is looked up by code object:
    the graphs of many keys would otherwise be searched through at every call, and be limited in
    number. So there is one graph to find, and its guards are checked when it is built only: on a
    small model checking thousands of them takes a twentieth of a step. Machine code is kept on
    disk, see `keep_compiled`; whole graphs are kept by `kept.py`.
    """
    cache()
    own = types.FunctionType(
        work.__code__.replace(co_name=f"{work.__code__.co_name}_{id(work):x}"),
        work.__globals__,
        work.__name__,
        work.__defaults__,
        work.__closure__,
    )
    graph = torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=options)
    built = False

    def replay() -> torch.Tensor | None:
        nonlocal built
        if not built:
            result, built = graph(), True
            return result
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            return graph()

    return replay
