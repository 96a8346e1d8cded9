"""Records the ATen operations of captured work and replays them without its Python.

What stands for the card's memory here: every tensor of a capture keeps its storage for good.
External tensors are read where they are; the result of each recorded operation is copied into the
tensor that the capture made, so whoever holds that tensor sees every replay's values in it. Views
need no replaying, as they share storage.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from . import rules

# Autograd's view bookkeeping would refuse tensors that a retrace hands out a second time.
_NO_VIEW_META = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_READS = {
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy's conversion",
}
_FROM_HOST = frozenset({torch.from_numpy, torch.frombuffer, torch.asarray, torch.as_tensor})
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in """arange empty eye full linspace ones rand randint randn randperm range
    tril_indices triu_indices zeros""".split()
)


class Unknown:
    """A tensor that a recording does not have.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Op(NamedTuple):
    """One recorded operation.

    Attributes:
        func: The ATen overload.
        args: Its arguments; tensors are those of the capture.
        kwargs: Its keyword arguments.
        key: What must be the same at every replay, see `Recording.key`.
        result: What the capture's run returned.
        fresh: `(leaf, tensor)` for results with a storage of their own.
        replayed: False for views and constants.
        place: The source line.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    key: tuple
    result: Any
    fresh: list[tuple[int, torch.Tensor]]
    replayed: bool
    place: str


class Recording:
    """The operations of one capture and the tensors they are about.

    Attributes:
        ops: In order.
        tensors: External tensors and results, numbered by first appearance.
        made: For each tensor, whether the capture made it.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: list[torch.Tensor] = []
        self.made: list[bool] = []
        self.own: set[int] = set()  # storages that the capture made
        self.by_address: dict[tuple, int] = {}  # external tensors
        self._numbers: dict[int, int] = {}
        self._inference = torch.is_inference_mode_enabled()

    def number(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of a tensor, or of the external one at its address, or None."""
        found = self._numbers.get(id(tensor))
        return self.by_address.get(address(tensor)) if found is None else found

    def add(self, tensor: torch.Tensor, made: bool) -> None:
        """Numbers a tensor."""
        if id(tensor) in self._numbers:
            return
        number = self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.made.append(made)
        if not made:
            self.by_address[address(tensor)] = number

    def key(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Returns tensors by number, or by value for host scalars, and the rest by type and value.

        A tensor that is not known is an `Unknown`, equal to nothing.
        """
        if func is torch.ops.aten.lift_fresh.default:
            return ((str(args[0].dtype), repr(args[0].tolist())),)
        named = [(name, self._token(value)) for name, value in kwargs.items()]
        return (*map(self._token, args), *named)

    def _token(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self.number(value)
            return Unknown(value) if number is None else number
        if isinstance(value, (list, tuple)):
            return tuple(map(self._token, value))
        return type(value).__name__, repr(value)

    def replay(self) -> None:
        """Runs the recorded operations."""
        with torch.inference_mode(self._inference), torch.no_grad():
            for op in self.ops:
                if not op.replayed:
                    continue
                result = op.func(*op.args, **op.kwargs)
                if op.fresh:
                    leaves = rules.flat(result)
                    for leaf, tensor in op.fresh:
                        tensor.copy_(leaves[leaf])

    def signature(self) -> str:
        """Returns a digest of operations, shapes, dtypes and constants, without addresses."""
        tensors = [(tuple(t.shape), t.stride(), t.dtype) for t in self.tensors]
        ops = [(str(op.func), op.key) for op in self.ops]
        return hashlib.sha256(repr((tensors, self.made, ops)).encode()).hexdigest()

    def storages(self) -> dict[int, int]:
        """Returns the bytes of every storage that this recording holds, by address."""
        stores = (tensor.untyped_storage() for tensor in self.tensors)
        return {store.data_ptr(): store.nbytes() for store in stores}


class Recorder(TorchDispatchMode):
    """Runs and records operations between `start` and `stop`, and enforces the rules.

    Args:
        dry_run: Undo at `stop` what the work wrote into tensors that were there before.

    Attributes:
        recording: What was recorded.
        failed: Whether a rule was broken.
        slow: Names of operations that the card would run outside its compiler.
    """

    def __init__(self, dry_run: bool = False) -> None:
        super().__init__()
        self.recording = Recording()
        self.failed = False
        self.slow: list[str] = []
        self._before: dict[int, torch.Tensor] | None = {} if dry_run else None
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Begins to record."""
        enter(self._stack, self)

    def stop(self) -> Recording:
        """Ends recording."""
        self._stack.close()
        for number, content in (self._before or {}).items():
            with torch.no_grad():
                self.recording.tensors[number].copy_(content)
        return self.recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, recording = kwargs or {}, self.recording
        self._refuse(func, args)
        inputs = [t for t in rules.flat([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]
        for tensor in inputs:
            self._meet(func, tensor)
        targets = rules.written(func, args, kwargs)
        for tensor in targets:
            self._check_target(func, tensor)
        key = recording.key(func, args, kwargs)
        result = func(*args, **kwargs)
        shared = {storage(tensor) for tensor in inputs}
        fresh = []
        for leaf, tensor in enumerate(rules.flat(result)):
            if not isinstance(tensor, torch.Tensor):
                continue
            if storage(tensor) not in shared:
                fresh.append((leaf, tensor))
                recording.own.add(storage(tensor))
            recording.add(tensor, made=True)
        replayed = bool(fresh or targets)
        place = rules.caller()
        recording.ops.append(Op(func, args, kwargs, key, result, fresh, replayed, place))
        return result

    def fail(self, what: str) -> None:
        """Raises a `CaptureError` that says what was done and where."""
        self.failed = True
        raise CaptureError(f"{what}. At {rules.caller()}.")

    def _refuse(self, func: Any, args: tuple) -> None:
        reason = rules.hard(func, args)
        if reason is None:
            reason = rules.slow(func, args)
            if reason:
                self.slow.append(str(func))
        if reason:
            self.fail(f"{func} {reason}")
        if func is torch.ops.aten.lift_fresh.default:
            if args[0].dim():
                self.fail(
                    f"A tensor of shape {list(args[0].shape)} is made from host data, which a "
                    "graph would keep as it is now; build it before the capture and copy into it"
                )
            self.recording.own.add(storage(args[0]))
            self.recording.add(args[0], made=True)

    def _meet(self, func: Any, tensor: torch.Tensor) -> None:
        if self.recording.number(tensor) is None:
            if storage(tensor) in self.recording.own:
                self.fail(f"{func} takes a tensor that was made here, but by no operation")
            self.recording.add(tensor, made=False)

    def _check_target(self, func: Any, tensor: torch.Tensor) -> None:
        number = self.recording.number(tensor)
        if storage(tensor) in self.recording.own:
            return
        partial = tensor.untyped_storage().nbytes() != tensor.nbytes
        if self.recording.made[number] or tensor._is_view() or partial:
            self.fail(
                f"{func} writes through a view of shape {list(tensor.shape)} into a buffer that "
                "was there before, which cannot be captured; write to the whole base buffer, as "
                "with index_copy_ or scatter_"
            )
        if self._before is not None and number not in self._before:
            self._before[number] = tensor.clone()


class HostRules(TorchFunctionMode):
    """Catches what no dispatched operation shows: host copies, and tensors made on the host.

    Args:
        fail: Called with what was done; raises.
    """

    def __init__(self, fail: Any) -> None:
        super().__init__()
        self._fail = fail

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reading = _READS.get(func)
        if func is torch.Tensor.to and "cpu" in (*args[1:], kwargs.get("device")):
            reading = '.to("cpu")'
        if reading:
            self._fail(f"{reading} reads a tensor on the host, and a replayed graph has no host")
        if func in _FROM_HOST and not isinstance(args[0], (torch.Tensor, int, float)):
            self._fail(
                f"{func.__name__} makes a tensor from host data, which a graph would keep as it is "
                "now; build it before the capture and copy into it"
            )
        result = func(*args, **kwargs)
        if func in _FACTORIES and kwargs.get("device") is None and result.dim():
            self._fail(
                f"torch.{func.__name__} names no device, so its tensor of shape "
                f"{list(result.shape)} is made on the host; pass device="
            )
        return result


def enter(stack: contextlib.ExitStack, mode: Any) -> None:
    """Enters a dispatch mode with what belongs to it: no gradients, host rules."""
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_NO_VIEW_META))
    stack.enter_context(mode)
    stack.enter_context(HostRules(mode.fail))


def storage(tensor: torch.Tensor) -> int:
    """Returns what tells one storage from another."""
    return tensor.untyped_storage()._cdata


def address(tensor: torch.Tensor) -> tuple:
    """Returns where and how a tensor lies in memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
