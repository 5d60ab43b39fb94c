"""ForwardTrace: follows values that are not finite through a forward pass, from the operation that produced them.

A function mode sees each operation as the user calls it (`linear`), with whatever kernel Mezzo runs for it. A dispatch
mode would see its parts (casts, `addmm`) and nothing of kernels outside of ATen. Functions that PyTorch writes in
Python are traced inside: `F.normalize` is a norm, a clamp and a division.

Two kinds of values are not reported: an explicit -inf (a mask on scores), and what a later operation absorbs. The
question at the end is what reached a given tensor.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch._tensor
import torch.functional
import torch.nn.functional
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from mezzo.core.overflow import OUTSIDE, Maker, OverflowReport, TensorFacts, rounded_to_infinity
from mezzo.pytorch.monitor.module_paths import walk
from mezzo.pytorch.monitor.operations import (
    HOOK,
    POLES,
    Line,
    bare,
    facts,
    finite,
    line_text,
    mapped,
    only_minus_infinity,
    op_of_function,
    op_of_node,
    tensors,
    users_line,
    values,
    version_of,
)
from mezzo.runner.patches import Patches


@dataclass(eq=False)
class Operation:
    """An operation of a forward pass, or a tensor that was there before it and is not finite.

    `kind` is ``""`` (its result is finite), ``passed`` (an input was not finite), ``overflow`` or ``invalid`` (it
    produced the value), ``input``, ``state``, ``mask`` (an explicit -inf, and what is computed from it).
    """

    module: str  # path of the module that was running
    op: str  # its name; of a tensor, the tensor's
    line: Line | None = None  # of the user's that called it
    kind: str = ""
    number: int = 0  # its place among those that are not finite
    parents: list[Operation] = field(default_factory=list)  # sources of the inputs that were not finite
    inputs: list[TensorFacts] = field(default_factory=list)  # of an operation that produced the value
    outputs: list[TensorFacts] = field(default_factory=list)
    unseen: bool = False  # a tensor that was put on the graph before the trace began
    maker: Maker | None = None  # of an overflow: the earlier operation whose finite result did not fit

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.op}"

    def root(self) -> tuple[Operation, list[Operation]]:
        """The earliest operation that produced what this one has, and those that passed it on, in order."""
        seen: dict[int, Operation] = {}
        stack = [self]
        while stack:
            one = stack.pop()
            if one.number not in seen and one.kind != "mask":
                seen[one.number] = one
                stack.extend(one.parents)
        order = [seen[number] for number in sorted(seen)]
        first = next((one for one in order if one.kind != "passed"), order[0])
        return first, [one for one in order if one.number > first.number]

    def absorbed(self) -> OverflowReport | None:
        """An infinity that forward absorbed and backward did not; a pole is one in both directions."""
        if self.kind in ("", "mask"):
            return None
        first, passed = self.root()
        return None if first is self and first.kind == "invalid" else report_of(first, passed)


def report_of(first: Operation, passed: Sequence[Operation]) -> OverflowReport:
    """The report on what `Operation.root` returns."""
    return OverflowReport(
        "overflow" if first.kind == "passed" else first.kind,
        first.module,
        first.op,
        "forward",
        first.inputs,
        first.outputs,
        [str(one) for one in passed],
        line_text(first.line),
        maker=first.maker,
    )


_BEYOND = rounded_to_infinity("fp16")


def beyond(tensor: Tensor) -> float:
    """The largest magnitude of a finite tensor, if fp16 cannot hold it; else 0.0."""
    seen = None if tensor.dtype is torch.float16 or tensor.dtype.itemsize < 2 else values(tensor)
    if seen is None or not seen.numel():
        return 0.0
    low, high = torch.aminmax(seen)
    largest = float(torch.maximum(-low, high))
    return largest if _BEYOND <= largest < float("inf") else 0.0


class _OfTensors:
    """A value for each of some living tensors, and for other tensors that share its memory."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._memory: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def __setitem__(self, tensor: Tensor, value: Any) -> None:
        self._own[id(tensor)] = held = weakref.ref(tensor), value
        if tensor.layout is torch.strided:
            self._memory[tensor.untyped_storage().data_ptr()] = held

    def drop(self, tensor: Tensor) -> None:
        self._own.pop(id(tensor), None)

    def own(self, tensor: Tensor) -> Any:
        """The tensor's own value, or None."""
        held = self._own.get(id(tensor))
        return held[1] if held is not None and held[0]() is tensor else None

    def shared(self, tensor: Tensor) -> Any:
        """That of a tensor with the same memory, as of the base of a view; or None."""
        strided = tensor.layout is torch.strided
        held = self._memory.get(tensor.untyped_storage().data_ptr()) if strided else None
        return held[1] if held is not None and held[0]() is not None else None


_UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
_KEEPS_MASKS = ("neg", "mul", "div", "sub", "rsub", "abs", "square", "__getitem__")
_STATISTICS = ("batch_norm", "instance_norm")  # in training they write their buffers, and don't read them
_ASKERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass
class _Call:
    """An operation that runs: what it is given, with the tensors' versions."""

    func: Any
    args: Any
    kwargs: Any
    ins: list[Tensor]
    versions: list[int]

    @property
    def name(self) -> str:
        return op_of_function(self.func)


class ForwardTrace(TorchFunctionMode):
    """Watches every torch function inside `watching`.

    Args:
        models: whose modules' paths are reported.
        inputs: tensors that the model is given, by name.
        stop: code of the function that calls the model: the user's lines are looked for inside of it.
        called: the line that called the model, for operations in PyTorch's own modules.
        outer: the module of operations that no module holds.

    Attributes:
        operations: node of the graph -> the operation that made it.
        leaves: node that accumulates a gradient -> its leaf.
        paused: nothing is looked at.
        trouble: the error that ended the trace.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        inputs: Sequence[tuple[str, Tensor]] = (),
        *,
        stop: CodeType | None = None,
        called: Line | None = None,
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
        self._bad = _OfTensors()  # of Operation
        self._large = _OfTensors()  # of Maker
        self._held: list[Tensor] = []
        self._count = itertools.count(1)
        self._running = False
        self._thread = threading.get_ident()
        self.paused = False
        self.trouble = ""
        self.operations: dict[Any, Operation] = {}
        self.leaves: dict[Any, Tensor] = {}

    # ------------------------------------------------------------------------------------ entering and leaving

    @contextmanager
    def watching(self) -> Iterator[ForwardTrace]:
        """Trace what runs inside, which may leave modes and filters that it entered before, and enter others."""
        del self._stack[1:]
        self._thread = threading.get_ident()
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        patches = Patches()
        # A compiled part, which runs eagerly here, warns of the hooks.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        quiet = warnings.filters[0]
        try:
            # Functions that PyTorch writes in Python don't show themselves to a mode, but what they call does.
            for module in (torch.nn.functional, torch.functional, torch._tensor):
                for name in _ASKERS:
                    if hasattr(module, name):
                        patches.set(module, name, lambda *_: False)
            patches.set(torch.autograd.Function, "apply", classmethod(self._apply()))
            with self._beneath():
                yield self
        finally:
            patches.undo()
            for handle in handles:
                handle.remove()
            with suppress(ValueError):
                warnings.filters.remove(quiet)  # type: ignore[attr-defined]

    @contextmanager
    def _beneath(self) -> Iterator[None]:
        """Enter this mode beneath all others, except that of `torch.set_default_device`, which has to be the lowest.

        Leaving a mode pops the uppermost one: beneath all others, this one is never popped by mistake.
        """
        above = [_pop_mode() for _ in range(_len_torch_function_stack())]
        # `with torch.device(...)` pushes one as well, without entering it, and takes the uppermost off.
        if above and isinstance(above[-1], DeviceContext) and hasattr(above[-1], "old_device"):
            _push_mode(above.pop())
        for mode in (self, *reversed(above)):
            _push_mode(mode)
        try:
            yield
        finally:
            above = [_pop_mode() for _ in range(_len_torch_function_stack())]
            if self not in above:  # another thread's
                self.paused = True
            for mode in reversed(above):
                if mode is not self:
                    _push_mode(mode)

    def _guarded(self, look: Callable[..., Any], *args: Any) -> Any:
        """An error of the trace ends the trace, and not the operation; `trouble` keeps it."""
        try:
            return look(*args)
        except Exception as error:
            self.paused, self.trouble = True, f"{type(error).__name__}: {error}"
            return None

    def _claim_all(self, held: Any, operation: Operation | None) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors(held):
                self.claim(tensor, operation)

    def _apply(self) -> Callable[..., Any]:
        """Replaces `Function.apply`: the user's autograd Functions become operations with a name and a line."""
        before = torch.autograd.Function.__dict__["apply"].__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or self.paused or threading.get_ident() != self._thread:
                return before(cls, *args, **kwargs)
            self._guarded(self._claim_all, (args, kwargs), None)
            out = before(cls, *args, **kwargs)
            by_hook = cls is torch.nn.modules._functions.BackwardHookFunction
            self._guarded(self._claim_all, out, self._operation(HOOK if by_hook else cls.__name__))
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

    def module_of(self, tensor: Tensor) -> str:
        """Path of the module that has a parameter or a buffer; that of the model for anything else."""
        return self._there.get(_address(tensor), ("", "", ""))[0]

    def _operation(self, op: str) -> Operation:
        return Operation(self._stack[-1], op, users_line(self._stop) or self._called)

    # ------------------------------------------------------------------------------------ operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and follow values that are not finite."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        call = self._guarded(self._before, func, args, kwargs)
        self._running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._running = False
        if call is not None:
            self._guarded(self._ran, call, out)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> _Call:
        ins = [bare(tensor) for tensor in tensors((args, kwargs))]
        for tensor in ins:
            self.claim(tensor, None)
        return _Call(func, args, kwargs, ins, [version_of(tensor) for tensor in ins])

    def _ran(self, call: _Call, out: Any) -> None:
        with _beneath_transforms() as transformed:
            outs = [bare(tensor) for tensor in tensors(out)]
            written = [t for t, version in zip(call.ins, call.versions) if version_of(t) != version]
            outs += [tensor for tensor in written if not any(tensor is out for out in outs)]
            if not outs:
                return
            operation = self._operation(call.name)
            if call.name not in _UNDEFINED:
                self._follow(operation, call, outs, {id(tensor) for tensor in written}, transformed)
            for tensor in outs:
                self.claim(tensor, operation)

    def _follow(
        self, operation: Operation, call: _Call, outs: list[Tensor], written: set[int], transformed: bool
    ) -> None:
        """Record which of an operation's results are not finite, or beyond fp16, and where that comes from."""
        bad = [tensor for tensor in outs if not finite(tensor)]
        if call.name in _STATISTICS and len(call.args) > 5 and call.args[5]:
            call.ins, bad = self._without_buffers(call.ins), self._without_buffers(bad)
        read = [tensor for tensor in call.ins if id(tensor) not in written]
        if bad:
            known = [self._bad.own(one) or (None if finite(one) else self._origin(one)) for one in read]
            known += [self._bad.own(one) for one in call.ins if id(one) in written]
            operation.parents = [one for one in known if one is not None]
            self._number(operation, self._kind(operation, call, bad, rerun=not written and not transformed))
            if operation.kind in ("overflow", "invalid"):
                names = [self._there.get(_address(t), ("", f"input {n}"))[1] for n, t in enumerate(call.ins)]
                kept = [(name, t) for name, t in zip(names, call.ins) if id(t) not in written]
                operation.inputs = [facts(tensor, name) for name, tensor in kept][:6]
                operation.outputs = [facts(tensor, "output") for tensor in bad][:3]
            if operation.kind == "overflow" and any(tensor.dtype is torch.float16 for tensor in bad):
                operation.maker = self._maker(read)
        for tensor in outs:
            self._bad.drop(tensor)
            self._large.drop(tensor)
        for tensor in bad:
            self._bad[tensor] = operation
        for tensor in outs:
            if beyond(tensor):
                where = operation.module, operation.op, line_text(operation.line)
                self._large[tensor] = self._maker(read) or Maker(*where, facts(tensor, "output"))
        if transformed:  # nothing else holds the tensors under a transform's wrappers
            self._held += bad

    def _without_buffers(self, some: list[Tensor]) -> list[Tensor]:
        return [one for one in some if self._there.get(_address(one), ("", "", ""))[2] != "buffer"]

    def _kind(self, operation: Operation, call: _Call, bad: list[Tensor], *, rerun: bool) -> str:
        parents = operation.parents
        if any(parent.kind != "mask" for parent in parents):
            return "passed"
        asked = parents or _writes_infinity(call.args, call.kwargs)
        masks = all(only_minus_infinity(tensor) for tensor in bad)
        if asked and (masks or (parents and operation.op in _KEEPS_MASKS)):
            return "mask"
        wide = _in_fp64(call) if rerun else None
        if wide is not None and all(bool(torch.isfinite(t).all()) for t in wide):
            return "overflow"
        no_number = any(bool(torch.isnan(t).any()) for t in (bad if wide is None else wide))
        return "invalid" if no_number or operation.op in POLES else "overflow"

    def _number(self, operation: Operation, kind: str) -> None:
        operation.kind, operation.number = kind, next(self._count)

    def _origin(self, tensor: Tensor) -> Operation:
        """The source of a tensor that is not finite though no operation was seen to make it so."""
        known: Operation | None = self._bad.shared(tensor)
        if known is not None:
            return known
        path, name, kind = self._there.get(_address(tensor), (self._stack[-1], "", ""))
        if only_minus_infinity(tensor) and kind != "parameter":
            found = "mask"
        elif kind == "input" or (not kind and self._stack[-1] == OUTSIDE):
            found = "input"
        else:
            found = "state"
        origin = Operation(path, name if kind != "input" else "", inputs=[facts(tensor, name or "constant")])
        origin.unseen = not name and tensor.grad_fn is not None
        self._number(origin, found)
        self._bad[tensor] = origin
        return origin

    def _maker(self, read: Sequence[Tensor]) -> Maker | None:
        """The source of the largest number beyond fp16 among some inputs; None if there is none or it was not seen."""
        most = max(read, key=beyond, default=None)
        if most is None or not beyond(most):
            return None
        known: Maker | None = self._large.own(most) or self._large.shared(most)
        there = self._there.get(_address(most))
        if known is None and there is not None:
            known = Maker(there[0], "", "", facts(most, there[1]))
        return known

    def reached(self, tensor: Tensor) -> Operation | None:
        """The operation behind a tensor that is not finite; None if it is finite, or holds only a mask."""
        if finite(tensor):
            return None
        operation: Operation = self._bad.own(tensor) or self._origin(tensor)
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
            self.operations[node] = operation or Operation(self._stack[-1], op_of_node(node), self._called)
            stack.extend(following for following, _ in node.next_functions)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _writes_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number among the arguments is infinite, so that the result is intended."""
    flat = [*args, *kwargs.values()]
    flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, float) and math.isinf(value) for value in flat)


def _in_fp64(call: _Call) -> list[Tensor] | None:
    """The operation's results on FP64 copies; None where it cannot be repeated, or does not compute in FP64."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double() if tensor.is_floating_point() else tensor

    device = next((t.device.type for t in call.ins), "cpu")
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            kept = {name: value for name, value in call.kwargs.items() if name not in ("dtype", "out")}
            args, kept = mapped((call.args, kept), wide)
            outs = [t for t in tensors(call.func(*args, **kept)) if t.is_floating_point()]
    except Exception:  # an op without an FP64 form, or of a kind that can't be repeated: decided by its name
        return None
    finally:
        torch.set_rng_state(random)
    return outs if outs and all(t.dtype is torch.float64 for t in outs) else None


@contextmanager
def _beneath_transforms() -> Iterator[bool]:
    """Outside of the transforms of `torch.func` that are active; yields whether there are any."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield False
        return
    with temporarily_clear_interpreter_stack():
        yield True
