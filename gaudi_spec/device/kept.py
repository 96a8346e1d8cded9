"""Compiled graphs kept whole on disk, so that a later process traces nothing.

Inductor keeps machine code, but finds it by the traced graph only, and to trace every layer of
every graph again takes most of a start. Kept is what Inductor's own ahead-of-time interface makes,
and where its inputs are found among the tensors that the work reaches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .base import Work
from .compiled import cache, compiled
from .identity import facts, leaves

_LOG = logging.getLogger(__name__)
# What Transformers' rotary embedding does; without these names PyTorch would not keep the graph.
_CACHEABLE = {f"torch.amp.autocast_mode._{do}_autocast": "1" for do in ("enter", "exit")}


def kept(work: Work, name: str) -> Work:
    """Returns `work` as it was compiled under `name`, or else compiles it and keeps the result.

    Args:
        work: See `Device.capture`.
        name: The same for the same work in every process, and for no other.
    """
    path = cache() / "graphs" / hashlib.sha256(name.encode()).hexdigest()[:40]
    tensors = {
        way: leaf for way, leaf in leaves(work, code=False) if isinstance(leaf, torch.Tensor)
    }
    if path.with_suffix(".json").exists():
        try:
            return _load(path, tensors)
        except Exception as error:  # whatever a damaged file makes torch raise
            _LOG.info("%s is made anew: %r", path, error)
    maker = _Maker()
    graph: Work = compiled(work, backend=maker.compile)
    first = True

    def replay() -> torch.Tensor | None:
        nonlocal graph, first
        result = graph()
        if first:
            first = False
            try:
                maker.save(path, tensors, result)
                graph = _load(path, tensors)
            except Exception as error:  # then it runs as torch.compile made it
                _LOG.info("A graph is not kept: %r", error)
        return result

    return replay


class _Maker:
    """A backend of `torch.compile` whose product can be kept."""

    def __init__(self) -> None:
        self._artifact: Any = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: tuple[torch.Tensor, ...] = ()

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        """Returns the machine code of a graph, and notes what it is called with."""
        try:
            with torch._inductor.config.patch(unsafe_marked_cacheable_functions=_CACHEABLE):
                artifact = torch._inductor.standalone_compile(graph, inputs)
        except Exception as error:
            _LOG.info("Compiled as usual: %r", error)
            return torch._dynamo.lookup_backend("inductor")(graph, inputs)

        def run(*inputs: torch.Tensor) -> Any:
            outputs = artifact(*inputs)
            if self._artifact is None:
                self._artifact, self._inputs, self._outputs = artifact, inputs, tuple(outputs)
            return outputs

        return run

    def save(
        self, path: Path, tensors: dict[str, torch.Tensor], result: torch.Tensor | None
    ) -> None:
        """Writes the product, and which tensors are its inputs and its result."""
        ways = {id(tensor): way for way, tensor in tensors.items()}
        about: dict[str, Any] = {"inputs": [(ways[id(t)], facts(t)) for t in self._inputs]}
        if result is not None:
            about["result"] = [output is result for output in self._outputs].index(True)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        self._artifact.save(path=str(part))
        about["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
        os.replace(part, path.with_suffix(".bin"))
        part.write_text(json.dumps(about), encoding="utf-8")
        os.replace(part, path.with_suffix(".json"))
        self._inputs = self._outputs = ()


def _load(path: Path, tensors: dict[str, torch.Tensor]) -> Work:
    about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    code = path.with_suffix(".bin")
    inputs = [tensors[way] for way, _ in about["inputs"]]
    if [facts(tensor) for tensor in inputs] != [found for _, found in about["inputs"]]:
        raise ValueError("it is of other tensors")
    if hashlib.sha256(code.read_bytes()).hexdigest() != about["sha256"]:
        raise ValueError("it is damaged")
    artifact, which = torch._inductor.CompiledArtifact.load(path=str(code)), about.get("result")

    def replay() -> torch.Tensor | None:
        outputs = artifact(*inputs)
        return None if which is None else outputs[which]

    return replay
