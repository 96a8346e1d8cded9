"""What an HPU graph cannot hold, as checks on one operation and its arguments.

Sources, for each table: `docs` is Intel's page on HPU graphs for inference; `shared_layer` is
`dynamo/compile_backend/shared_layer.py` and `op.yaml` is `scripts/hpu_op.yaml` of the public bridge
(HabanaAI/gaudi-pytorch-bridge); `vllm` is the vLLM fork for Gaudi. Some of these operations do have
a kernel in one of the bridge's two modes. They are refused all the same: one source serves both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import torch

# docs: the graph is replayed without the host, so nothing in it can be read there.
HOST_READS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero"})
# docs: static shapes only. shared_layer lists nonzero, _unique2 and bincount as not inferable.
DATA_SHAPED = frozenset(
    """nonzero masked_select bincount _unique _unique2 unique_dim unique_consecutive
    unique_dim_consecutive argwhere""".split()
)
# name -> (what to do instead, source)
SLOW: dict[str, tuple[str, str]] = {
    "index": ("use gather, index_select or index_copy_", "shared_layer: fallback list"),
    "addcmul": ("multiply, then add", "shared_layer: fallback list"),
    "slice_backward": ("do not differentiate", "shared_layer: fallback list"),
}
# Reductions that have no boolean kernel (vllm; the CPU is asked instead).
NO_BOOL = frozenset({"max", "min", "amax", "amin", "argmax", "argmin", "cumsum", "cumprod"})
# shared_layer: a transposition of int64 falls back to eager.
NO_INT64 = frozenset({"permute", "transpose", "t", "numpy_T"})
# shared_layer: position of an argument that may not be a Python bool.
NO_BOOL_SCALAR = {"full": 1, "mul": 1}

_SKIPPED = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
_TRANSFORMERS = f"{os.sep}transformers{os.sep}"
_PLUMBING = frozenset({"contextlib.py", "functools.py"})


def name_of(func: Any) -> str:
    """Returns an operation's name without overload and without the underscore of in-place ones."""
    name = func._schema.name.split("::")[-1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def hard(func: Any, args: tuple) -> str | None:
    """Returns why no graph can hold this operation, or None."""
    name = name_of(func)
    if name in HOST_READS:
        return (
            "reads a value on the host, and a replayed graph has no host; keep it a tensor, and "
            "read it after the graph"
        )
    if name in DATA_SHAPED or str(func) == "aten.repeat_interleave.Tensor":
        return (
            "has an output whose shape depends on data, and shapes in a graph are fixed; use a "
            "mask and torch.where"
        )
    if name in ("index", "index_put", "_index_put_impl") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        return (
            "indexes with a boolean mask, so how much it touches depends on data; use torch.where "
            "or masked_fill"
        )
    return None


def slow(func: Any, args: tuple) -> str | None:
    """Returns why the card runs this operation outside its compiler, or None."""
    name = name_of(func)
    if name in SLOW:
        remedy, source = SLOW[name]
        return f"falls back from the graph compiler; {remedy} ({source})"
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if name == "index_put" and any(index is None for index in args[1]):
        return "leaves out an index, which falls back; use index_copy_ or scatter_ (shared_layer)"
    if name in NO_BOOL and first is not None and first.dtype == torch.bool:
        return f"has no boolean kernel; use sum(...) > 0, or {name} of .long() (vllm)"
    if name in NO_INT64 and first is not None and first.dtype == torch.long:
        return "of int64 falls back; build the tensor in the order it is read in (shared_layer)"
    at = NO_BOOL_SCALAR.get(name)
    if at is not None and len(args) > at and isinstance(args[at], bool):
        return "takes a Python bool, which falls back; use 0 or 1 (shared_layer)"
    if any(isinstance(value, float) and value != value for value in args):
        return "takes a Python NaN, which falls back (shared_layer)"
    return None


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an in-place or out= operation writes to."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [t for t in flat(value) if isinstance(t, torch.Tensor)]
    return found


def flat(value: Any) -> list[Any]:
    """Returns the leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def caller() -> str:
    """Returns the innermost source line outside torch, Transformers and this package's device.

    Where Transformers lies in between, its line is named too.
    """
    frame, through = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if _TRANSFORMERS in file:
            through = through or _place(frame.f_code, frame.f_lineno)
        elif not (file.startswith(_SKIPPED) or os.path.basename(file) in _PLUMBING):
            line = _place(frame.f_code, frame.f_lineno)
            return f"{line} (in {through})" if through else line
        frame = frame.f_back
    return through or "an unknown line"


def _place(code: CodeType, line: int) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} {code.co_name}"
