"""Capturing with `torch.compile`, for the devices that it has a backend for."""

from __future__ import annotations

import types
from typing import Any

import torch

from .base import Work


def compiled(work: Work, backend: str = "inductor", options: dict[str, Any] | None = None) -> Work:
    """Returns `work` compiled whole: no graph break, no symbolic shape.

    Each graph gets a code object of its own, because compiled code is looked up by code object:
    the graphs of many keys would otherwise be searched through at every call, and be limited in
    number.
    """
    own = types.FunctionType(
        work.__code__.replace(co_name=f"{work.__code__.co_name}_{id(work):x}"),
        work.__globals__,
        work.__name__,
        work.__defaults__,
        work.__closure__,
    )
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=options)
