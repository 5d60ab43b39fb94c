"""ForwardTrace: follows values that are not finite through a forward pass, from the operation that produced them.

A function mode sees operations as the user calls them (`linear`), whatever kernel Mezzo runs; a dispatch mode would see
casts and `addmm`. An explicit -inf (a mask on scores) and what a later operation absorbs are not reported.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.core.overflow import OUTSIDE, OverflowReport, TensorFacts
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.module_paths import walk
from mezzo.pytorch.monitor import operations as ops
from mezzo.pytorch.nested import mapped, tensors
from mezzo.pytorch.snapshot import version_of
from mezzo.runner.patches import Patches


@dataclass(eq=False)
class Operation:
    """An operation of a forward pass, or a tensor that was there before it and is not finite."""

    module: str  # path of the module that was running
    op: str  # its name; of a tensor, the tensor's
    line: ops.Line | None = None  # of the user's that called it
    # "": finite; "passed": an input was not; "overflow", "invalid": it produced the value; "input"; "state"; "mask":
    # an explicit -inf, and what is computed from it.
    kind: str = ""
    number: int = 0  # its place among those that are not finite
    parents: list[Operation] = field(default_factory=list)  # sources of the inputs that were not finite
    inputs: list[TensorFacts] = field(default_factory=list)  # of an operation that produced the value
    outputs: list[TensorFacts] = field(default_factory=list)
    unseen: bool = False  # on the graph, and not made while the trace watched

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.op}"

    def root(self) -> tuple[Operation, OverflowReport]:
        """The earliest operation that produced what this one has, and the report on it."""
        seen: dict[int, Operation] = {}
        stack = [self]
        while stack:
            one = stack.pop()
            if one.number not in seen and one.kind != "mask":
                seen[one.number] = one
                stack.extend(one.parents)
        order = [seen[number] for number in sorted(seen)]
        first = next((one for one in order if one.kind != "passed"), order[0])
        cause = "overflow" if first.kind == "passed" else first.kind
        passed = [str(one) for one in order if one.number > first.number]
        line = ops.line_text(first.line)
        return first, OverflowReport(
            cause, first.module, first.op, "forward", first.inputs, first.outputs, passed, line
        )

    def absorbed(self) -> OverflowReport | None:
        """An infinity that forward absorbed and backward did not; a pole is one in both directions."""
        if self.kind in ("", "mask"):
            return None
        first, report = self.root()
        return None if first is self and first.kind == "invalid" else report


_UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
_KEEPS_MASKS = ("neg", "mul", "div", "sub", "rsub", "abs", "square", "__getitem__")
_STATISTICS = ("batch_norm", "instance_norm")  # in training they write their buffers, and don't read them
_ASKERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class ForwardTrace(TorchFunctionMode):
    """Watches every torch function inside `watching`; `outer` is the module of those that no module holds."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        inputs: Sequence[tuple[str, Tensor]] = (),
        *,
        stop: CodeType | None = None,
        called: ops.Line | None = None,
        outer: str = "",
    ) -> None:
        super().__init__()
        self._stop, self._called = stop, called
        self._paths: dict[int, str] = {}
        self._there: dict[int, tuple[str, str, str]] = {}  # address -> path, name, kind
        for path, module in (pair for model in models for pair in walk(model, inside=True)):
            self._paths.setdefault(id(module), path)
            for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in held.items():
                    if tensor is not None and tensor.numel():
                        self._there[_address(tensor)] = path, name, kind
        for name, tensor in inputs:
            if tensor.numel():
                self._there.setdefault(_address(tensor), ("", name, "input"))
        self._stack: list[str] = [outer]
        self._bad: Any = WeakTensorKeyDictionary()  # tensor that is not finite -> its Operation
        self._held: list[Tensor] = []
        self._count = itertools.count(1)
        self._running = False
        self._thread = threading.get_ident()
        self.paused = False
        self.trouble = ""  # the error that ended the trace
        self.operations: dict[Any, Operation] = {}  # by the nodes of the graph that they made
        self.leaves: dict[Any, Tensor] = {}  # by the nodes that accumulate their gradients

    @contextmanager
    def watching(self) -> Iterator[ForwardTrace]:
        """Trace what runs inside, which may leave modes that were entered before, and enter others."""
        del self._stack[1:]
        self._thread = threading.get_ident()
        patches = Patches()
        # A compiled part, which runs eagerly here, warns of the hooks.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        quiet = warnings.filters[0]
        try:
            # Functions that PyTorch writes in Python don't show themselves to a mode, but what they call does.
            for module in (torch.nn.functional, torch.functional, sys.modules[Tensor.backward.__module__]):
                for name in _ASKERS:
                    if hasattr(module, name):
                        patches.set(module, name, lambda *_: False)
            patches.set(torch.autograd.Function, "apply", classmethod(self._apply()))
            with (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                self._beneath(),
            ):
                yield self
        finally:
            patches.undo()
            with suppress(ValueError):
                warnings.filters.remove(quiet)  # type: ignore[attr-defined]

    @contextmanager
    def _beneath(self) -> Iterator[None]:
        """Enter this mode beneath all others, so that leaving another one does not pop it by mistake."""
        above = self._all_left()
        # `with torch.device(...)` pushes one as well, without entering it, and takes the uppermost off.
        if above and hasattr(above[0], "old_device"):
            TorchFunctionMode.__enter__(above.pop(0))
        for mode in (self, *above):
            TorchFunctionMode.__enter__(mode)
        try:
            yield
        finally:
            above = self._all_left()
            if self not in above:  # another thread's
                self.paused = True
            for mode in above:
                if mode is not self:
                    TorchFunctionMode.__enter__(mode)

    def _all_left(self) -> list[TorchFunctionMode]:
        """Leave all modes, without what a subclass does besides; the innermost is the last."""
        modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
        for mode in reversed(modes):
            TorchFunctionMode.__exit__(mode, None, None, None)
        return modes

    def _guarded(self, look: Callable[..., Any], *args: Any) -> Any:
        """An error of the trace ends the trace, and not the operation; `trouble` keeps it."""
        try:
            return look(*args)
        except Exception as error:
            self.paused, self.trouble = True, ops.in_one_line(error)
            return None

    def _claim_all(self, held: Any, operation: Operation | None) -> None:
        with torch.DisableTorchFunction():
            for tensor in tensors(held):
                self.claim(tensor, operation)

    def _apply(self) -> Callable[..., Any]:
        """Replaces `Function.apply`: the user's autograd Functions become operations with a name and a line."""
        # Python's classmethod, from torch 2.14 on one of C.
        method = torch.autograd.Function.__dict__["apply"]

        def before(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return method.__get__(None, cls)(*args, **kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or self.paused or threading.get_ident() != self._thread:
                return before(cls, *args, **kwargs)
            self._guarded(self._claim_all, (args, kwargs), None)
            out = before(cls, *args, **kwargs)
            by_hook = cls is torch.nn.modules._functions.BackwardHookFunction
            self._guarded(self._claim_all, out, self._operation(ops.HOOK if by_hook else cls.__name__))
            return out

        return apply

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._stack.append(self._paths.get(id(module), self._stack[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self.paused:
            self._guarded(self._claim_all, output, None)
        if len(self._stack) > 1:
            self._stack.pop()

    def place_of(self, node: Any) -> Operation:
        """The operation that made a node; a tensor of the model's, by its module and name, for a leaf's."""
        if hasattr(node, "variable"):
            return Operation(*self._there.get(_address(node.variable), ("", "", ""))[:2])
        return self.operations.get(node) or Operation(OUTSIDE, ops.op_of_node(node))

    def _operation(self, op: str) -> Operation:
        return Operation(self._stack[-1], op, ops.users_line(self._stop) or self._called)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and follow values that are not finite."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        given = self._guarded(self._before, (args, kwargs))
        self._running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._running = False
        if given is not None:
            self._guarded(self._ran, func, args, kwargs, given, out)
        return out

    def _before(self, given: Any) -> list[tuple[Tensor, int]]:
        """The tensors that an operation is given, with their versions."""
        ins = [torch.func.debug_unwrap(tensor) for tensor in tensors(given)]
        for tensor in ins:
            self.claim(tensor, None)
        return [(tensor, version_of(tensor)) for tensor in ins]

    def _ran(self, func: Any, args: Any, kwargs: Any, given: list[tuple[Tensor, int]], out: Any) -> None:
        transformed = torch._C._functorch.get_interpreter_stack() is not None
        outs = [torch.func.debug_unwrap(tensor) for tensor in tensors(out)]
        written = {id(tensor) for tensor, version in given if version_of(tensor) != version}
        outs += [one for one, _ in given if id(one) in written and not any(one is out for out in outs)]
        if not outs:
            return
        operation = self._operation(ops.op_of_function(func))
        bad = [] if operation.op in _UNDEFINED else [tensor for tensor in outs if not ops.finite(tensor)]
        ins = [tensor for tensor, _ in given]
        if operation.op in _STATISTICS and len(args) > 5 and args[5]:
            ins, bad = (
                [one for one in some if self._there.get(_address(one), ("", "", ""))[2] != "buffer"]
                for some in (ins, bad)
            )
        if bad:
            again = cache(lambda: None if written else _in_fp64(func, args, kwargs))
            self._explain(operation, ins, written, bad, again, (args, kwargs))
            device = bad[0].device.type
            lowered = transformed and operation.kind == "overflow" and torch.is_autocast_enabled(device)
            if lowered and (wide := again()) and all(ops.finite(one.float()) for one in wide):
                # Under `vmap` a product of vectors in 16 bits and the sum with an FP32 bias are one operation.
                low = name_of(torch.get_autocast_dtype(device))
                operation.outputs = [replace(one, format=low) for one in operation.outputs]
        for tensor in outs:
            self._bad.pop(tensor, None)
            self.claim(tensor, operation)
        for tensor in bad:
            self._bad[tensor] = operation
        if transformed:  # nothing else holds the tensors under a transform's wrappers
            self._held += bad

    def _explain(
        self,
        operation: Operation,
        ins: list[Tensor],
        written: set[int],
        bad: list[Tensor],
        again: Any,
        given: Any,
    ) -> None:
        """Record where the results of an operation that are not finite come from."""
        known = (
            self._bad.get(one) or (None if id(one) in written or ops.finite(one) else self._origin(one))
            for one in ins
        )
        operation.parents = [one for one in known if one is not None]
        operation.kind = self._kind(operation, bad, again, given)
        operation.number = next(self._count)
        if operation.kind in ("overflow", "invalid"):
            there = (self._there.get(_address(t), ("", f"input {n}", "")) for n, t in enumerate(ins))
            names = [f"model {name}" if kind == "input" else name for _, name, kind in there]
            kept = [(name, t) for name, t in zip(names, ins) if id(t) not in written]
            operation.inputs = [ops.facts(tensor, name) for name, tensor in kept][:6]
            operation.outputs = [ops.facts(tensor, "output") for tensor in bad][:3]

    def _kind(self, operation: Operation, bad: list[Tensor], again: Any, given: Any) -> str:
        parents = operation.parents
        if any(parent.kind != "mask" for parent in parents):
            return "passed"
        masks = all(ops.only_minus_infinity(tensor) for tensor in bad)
        keeps = bool(parents) and operation.op in _KEEPS_MASKS
        if keeps or (masks and (parents or _writes_infinity(*given))):
            return "mask"
        wide = again()
        if wide is not None and all(bool(torch.isfinite(t).all()) for t in wide):
            return "overflow"
        no_number = any(bool(torch.isnan(t).any()) for t in (bad if wide is None else wide))
        return "invalid" if no_number or operation.op in ops.POLES or _writes_infinity(*given) else "overflow"

    def _origin(self, tensor: Tensor) -> Operation:
        """The source of a tensor that is not finite though no operation was seen to make it so."""
        behind: list[Any] = [tensor.grad_fn]  # through what was not seen, such as a loss divided afterwards
        for node in behind:
            made = self.operations.get(node)
            if made is not None and made.unseen:
                behind += {following for following, _ in node.next_functions}.difference(behind)
            elif made is not None and made.kind not in ("", "mask"):
                return made
        if tensor.layout is torch.strided:  # as a view of one that is known
            memory = tensor.untyped_storage().data_ptr()
            for other, operation in reversed(list(self._bad.items())):
                if other.layout is torch.strided and other.untyped_storage().data_ptr() == memory:
                    return cast("Operation", operation)
        path, name, kind = self._there.get(_address(tensor), (self._stack[-1], "", ""))
        if ops.only_minus_infinity(tensor) and kind != "parameter":
            found = "mask"
        elif kind == "input" or (not kind and self._stack[-1] == OUTSIDE):
            found = "input"
        else:
            found = "state"
        origin = Operation(
            path,
            name if kind != "input" else "",
            self._called if kind == "input" else None,
            kind=found,
            number=next(self._count),
            inputs=[ops.facts(tensor, name or "constant")],
            unseen=not name and tensor.grad_fn is not None,
        )
        self._bad[tensor] = origin
        return origin

    def reached(self, tensor: Tensor) -> Operation | None:
        """The operation behind a tensor that is not finite; None if it is finite, or holds only a mask."""
        if ops.finite(tensor):
            return None
        operation: Operation = self._bad.get(tensor) or self._origin(tensor)
        return None if operation.kind == "mask" else operation

    def claim(self, tensor: Tensor, operation: Operation | None) -> None:
        """Assign an operation to the nodes of a tensor's graph that have none; None: one that was not seen."""
        stack: list[Any] = [tensor.grad_fn] if tensor.requires_grad and tensor.grad_fn is not None else []
        while stack:
            node = stack.pop()
            if node is None or node in self.operations or node in self.leaves:
                continue
            if hasattr(node, "variable"):
                self.leaves[node] = node.variable
                continue
            self.operations[node] = operation or Operation(
                self._stack[-1], ops.op_of_node(node), self._called, unseen=True
            )
            stack.extend(following for following, _ in node.next_functions)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _writes_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number among the arguments is infinite, so that the result is intended."""
    flat = [*args, *kwargs.values()]
    flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, float) and math.isinf(value) for value in flat)


def _in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """An operation's results on FP64 copies; None where it cannot be repeated, or does not compute in FP64."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double() if tensor.is_floating_point() else tensor

    device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False), torch.random.fork_rng([]):
            kept = {name: value for name, value in kwargs.items() if name not in ("dtype", "out")}
            args, kept = mapped((args, kept), wide)
            outs = [torch.func.debug_unwrap(t) for t in tensors(func(*args, **kept)) if t.is_floating_point()]
    except (RuntimeError, TypeError, ValueError):
        return None  # without an FP64 form, or not to be repeated: the operation's name decides
    return outs if outs and all(t.dtype is torch.float64 for t in outs) else None
