"""ForwardTrace: follows values that aren't finite through a forward pass, from the operation that produced them.

A function mode sees each operation as the user called it, with what Mezzo's kernels made of it; the dispatcher would
show what is inside. Functions that PyTorch writes in Python are looked into (`F.normalize` is a norm, a
clamp and a division).

An explicit -inf (a mask on scores) is not reported, nor is a value that a later operation absorbs: the question at the
end is what reached a given tensor.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Generic, TypeVar

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
    writes,
)
from mezzo.runner.patches import Patches


@dataclass(eq=False)
class Operation:
    """An operation of a forward pass; or a tensor that was there before it and isn't finite.

    Args:
        module: path of the module that was running.
        op: its name; of a tensor the tensor's.
        line: the user's that called it.
        kind: ``""`` (what it returned is finite), ``passed`` (something not finite went in), ``overflow`` or
            ``invalid`` (produced it), ``input``, ``state``, ``meant`` (an explicit -inf, and what comes of it).
        number: in order, of those that aren't finite.
        parents: where what went in came from.
        inputs, outputs: what went in and came out, of those that produced something not finite.
        unseen: of a tensor that an operation before the watch put on the graph.
        maker: of an overflow, who made the finite number that did not fit, where that was before.
    """

    module: str
    op: str
    line: Line | None = None
    kind: str = ""
    number: int = 0
    parents: list[Operation] = field(default_factory=list)
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    unseen: bool = False
    maker: Maker | None = None

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.op}"

    @property
    def meant(self) -> bool:
        """Whether it is no more than a mask."""
        return self.kind == "meant"

    def made(self, result: TensorFacts) -> Maker:
        """As the maker of numbers beyond fp16; without an op, a tensor that was there."""
        return Maker(self.module, self.op, line_text(self.line), result)

    def root(self) -> tuple[Operation, list[Operation]]:
        """The earliest that produced what this one has, and those that passed it on, in order."""
        seen: dict[int, Operation] = {}
        stack = [self]
        while stack:
            one = stack.pop()
            if one.number not in seen and not one.meant:
                seen[one.number] = one
                stack.extend(one.parents)
        order = [seen[number] for number in sorted(seen)]
        first = next((one for one in order if one.kind != "passed"), order[0])
        return first, [one for one in order if one.number > first.number]

    def absorbed(self) -> tuple[Operation, list[Operation]] | None:
        """The root of an infinity that forward absorbed, and backward did not; a pole is one in both directions."""
        if self.kind in ("", "meant"):
            return None
        first, passed = self.root()
        return (first, passed) if first is not self or first.kind != "invalid" else None


def finding_of(first: Operation, passed: Sequence[Operation]) -> OverflowReport:
    """As a finding, what `Operation.root` gives."""
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


def _writes_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number among the arguments is infinite, so that the result is intended."""
    flat = [*args, *kwargs.values()]
    flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, float) and math.isinf(value) for value in flat)


def _cause(run: _Running, bad: Sequence[Tensor], *, rerun: bool) -> str:
    """``overflow`` if the result lies beyond its format's range, ``invalid`` if there is none."""
    wide = _in_fp64(run) if rerun else None
    if wide is not None and all(bool(torch.isfinite(t).all()) for t in wide):
        return "overflow"
    no_number = any(bool(torch.isnan(t).any()) for t in (bad if wide is None else wide))
    return "invalid" if no_number or run.name in POLES else "overflow"


def _in_fp64(run: _Running) -> list[Tensor] | None:
    """The operation once more, on FP64 copies; None where it can't be, or doesn't compute in FP64."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double() if tensor.is_floating_point() else tensor

    device = next((t.device.type for t in run.ins), "cpu")
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            kept = {name: value for name, value in run.kwargs.items() if name not in ("dtype", "out")}
            args, kept = mapped((run.args, kept), wide)
            outs = [t for t in tensors(run.func(*args, **kept)) if t.is_floating_point()]
    except Exception:  # an op without an FP64 form, or of a kind that can't be repeated: decided by its name
        return None
    finally:
        torch.set_rng_state(random)
    return outs if outs and all(t.dtype is torch.float64 for t in outs) else None


_BEYOND = rounded_to_infinity("fp16")


def beyond(tensor: Tensor, scale: float = 1.0) -> float:
    """The largest magnitude of a finite tensor, `scale` times too large, that fp16 can't hold; 0.0 where it can."""
    seen = None if tensor.dtype is torch.float16 or tensor.dtype.itemsize < 2 else values(tensor)
    if seen is None or not seen.numel():
        return 0.0
    low, high = torch.aminmax(seen)
    largest = float(torch.maximum(-low, high))
    return largest if _BEYOND * scale <= largest < float("inf") else 0.0


_T = TypeVar("_T")


class _OfTensors(Generic[_T]):
    """What is known of tensors that are alive: of each itself, or of the memory that it shares with another."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[weakref.ref[Tensor], _T]] = {}
        self._memory: dict[int, tuple[weakref.ref[Tensor], _T]] = {}

    def __setitem__(self, tensor: Tensor, value: _T) -> None:
        self._own[id(tensor)] = held = weakref.ref(tensor), value
        if tensor.layout is torch.strided:
            self._memory[tensor.untyped_storage().data_ptr()] = held

    def drop(self, tensor: Tensor) -> None:
        self._own.pop(id(tensor), None)

    def own(self, tensor: Tensor) -> _T | None:
        held = self._own.get(id(tensor))
        return held[1] if held is not None and held[0]() is tensor else None

    def shared(self, tensor: Tensor) -> _T | None:
        """Of a view of what was written through another."""
        if tensor.layout is not torch.strided:
            return None
        held = self._memory.get(tensor.untyped_storage().data_ptr())
        return held[1] if held is not None and held[0]() is not None else None


_UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
_KEEPS_MASKS = ("neg", "mul", "div", "sub", "rsub", "abs", "square", "__getitem__")
_STATISTICS = ("batch_norm", "instance_norm")  # in training they write their buffers, and don't read them
_ASKERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass
class _Running:
    """An operation that runs: what it was given, with versions and, by id, facts of what it writes."""

    func: Any
    args: Any
    kwargs: Any
    ins: list[Tensor]
    versions: list[int]
    held: dict[int, TensorFacts]
    written: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return op_of_function(self.func)


class ForwardTrace(TorchFunctionMode):
    """Watches every torch function inside `watching`.

    Args:
        models: whose modules' paths are reported.
        inputs: tensors that the model is given, by name.
        stop: code of the function that calls the model: the user's lines are looked for inside of it.
        called: the line from where the model was called, for operations in modules that are all PyTorch's.
        outer: the module of operations that no module holds.

    Attributes:
        operations: node of the graph -> the operation that made it.
        leaves: node that accumulates a gradient -> its leaf.
        paused: nothing is looked at.
        trouble: why the looking ended.
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
        self._paths: dict[int, str] = {}
        self._stack: list[str] = [outer]
        self._stop, self._called = stop, called
        self._states: dict[int, tuple[str, str, bool]] = {}
        for path, module in (pair for model in models for pair in walk(model, "", set(), inside=True)):
            self._paths.setdefault(id(module), path)
            for own, is_parameter in ((module._parameters, True), (module._buffers, False)):
                for name, tensor in own.items():
                    if tensor is not None and tensor.numel():
                        self._states[tensor.data_ptr()] = (path, name, is_parameter)
        self._given = {tensor.data_ptr(): name for name, tensor in inputs if tensor.numel()}
        self._bad: _OfTensors[Operation] = _OfTensors()
        self._large: _OfTensors[Maker] = _OfTensors()
        self._held: list[Tensor] = []
        self._count = 0
        self._running = False
        self._thread = threading.get_ident()
        self.paused = False
        self.trouble = ""
        self.operations: dict[Any, Operation] = {}
        self.leaves: dict[Any, Tensor] = {}

    # ------------------------------------------------------------------------------------ where we are

    @contextmanager
    def watching(self) -> Iterator[ForwardTrace]:
        """In force inside, with hooks on all modules.

        What is inside may itself leave modes and filters of warnings that it entered before, and enter others.
        """
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
        """In force beneath all other modes, but for that of `torch.set_default_device`, which has to be the lowest.

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
        """What fails in looking does not fail what is looked at: it ends the looking, and `trouble` says why."""
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
        return self._states.get(tensor.data_ptr(), ("", "", False))[0]

    def _operation(self, op: str) -> Operation:
        return Operation(self._stack[-1], op, users_line(self._stop) or self._called)

    # ------------------------------------------------------------------------------------ operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and note what became of values that aren't finite."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        run = self._guarded(self._before, func, args, kwargs)
        self._running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._running = False
        if run is not None:
            self._guarded(self._ran, run, out)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> _Running:
        ins = [bare(tensor) for tensor in tensors((args, kwargs))]
        for tensor in ins:
            self.claim(tensor, None)
        held = {}
        if writes(func, kwargs):
            with torch._C.DisableTorchFunction(), _beneath_transforms():
                held = {id(t): facts(t, "") for t in ins}
        return _Running(func, args, kwargs, ins, [version_of(tensor) for tensor in ins], held)

    def _ran(self, run: _Running, out: Any) -> None:
        """An operation has run: note what isn't finite of it, and the nodes that it made."""
        with _beneath_transforms() as transformed:
            outs = [bare(tensor) for tensor in tensors(out)]
            written = [t for t, version in zip(run.ins, run.versions) if version_of(t) != version]
            outs += [tensor for tensor in written if not any(tensor is out for out in outs)]
            if not outs:
                return
            operation, run.written = self._operation(run.name), {id(tensor) for tensor in written}
            if run.name not in _UNDEFINED:
                bad = [tensor for tensor in outs if not finite(tensor)]
                good = [tensor for tensor in outs if not any(tensor is one for one in bad)]
                if run.name in _STATISTICS and len(run.args) > 5 and run.args[5]:
                    run.ins, bad = self._without_statistics(run.ins), self._without_statistics(bad)
                for tensor in outs:
                    self._bad.drop(tensor)
                if bad:
                    self._note(operation, run, bad, rerun=not written and not transformed)
                self._note_large(operation, run, good)
                if transformed:  # nothing else holds the tensors under a transform's wrappers
                    self._held += bad
            for tensor in outs:
                self.claim(tensor, operation)

    def _without_statistics(self, some: list[Tensor]) -> list[Tensor]:
        return [t for t in some if self._states.get(t.data_ptr(), ("", "", True))[2]]

    def _note(self, operation: Operation, run: _Running, bad: list[Tensor], *, rerun: bool) -> None:
        """What an operation returned isn't finite: whether it produced that, and of what."""
        for tensor in run.ins:
            known = self._bad.own(tensor)
            if known is None and id(tensor) not in run.written and not finite(tensor):
                known = self._origin(tensor)
            if known is not None:
                operation.parents.append(known)
        parents = operation.parents
        kind = "passed"
        if all(parent.meant for parent in parents):
            asked = parents or _writes_infinity(run.args, run.kwargs)
            masks = all(only_minus_infinity(tensor) for tensor in bad)
            if asked and (masks or (parents and operation.op in _KEEPS_MASKS)):
                kind = "meant"
            else:
                kind = _cause(run, bad, rerun=rerun)
        self._number(operation, kind)
        if kind in ("overflow", "invalid"):
            names = [self._states.get(t.data_ptr(), ("", f"input {n}"))[1] for n, t in enumerate(run.ins)]
            operation.inputs = [
                # An input that the operation has overwritten is reported as it was before, if that is known.
                replace(run.held[id(t)], name=name) if id(t) in run.held else facts(t, name)
                for name, t in zip(names, run.ins)
                if id(t) in run.held or id(t) not in run.written
            ][:6]
            operation.outputs = [facts(t, "output") for t in bad][:3]
        if kind == "overflow" and any(tensor.dtype is torch.float16 for tensor in bad):
            operation.maker = self._largest(run)[1]
        for tensor in bad:
            self._bad[tensor] = operation

    def _number(self, operation: Operation, kind: str) -> None:
        self._count += 1
        operation.kind, operation.number = kind, self._count

    def _there(self, tensor: Tensor) -> tuple[str, str, bool | None] | None:
        """Of a tensor that was there before: the path of its module, its name, whether it is a parameter."""
        pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
        given = self._given.get(pointer)
        return self._states.get(pointer) or (None if given is None else ("", given, None))

    def _origin(self, tensor: Tensor) -> Operation:
        """Of a tensor that isn't finite though no operation that was seen made it so."""
        known = self._bad.shared(tensor)
        if known is not None:
            return known
        path, name, is_parameter = self._there(tensor) or (self._stack[-1], "", None)
        if only_minus_infinity(tensor) and not is_parameter:
            kind = "meant"
        elif is_parameter is None and (name or self._stack[-1] == OUTSIDE):
            kind = "input"
        else:
            kind = "state"
        origin = Operation(
            path, "" if is_parameter is None else name, inputs=[facts(tensor, name or "constant")]
        )
        origin.unseen = not name and tensor.grad_fn is not None
        self._number(origin, kind)
        self._bad[tensor] = origin
        return origin

    # ------------------------------------------------------------------------------------ beyond fp16

    def _note_large(self, operation: Operation, run: _Running, outs: Sequence[Tensor]) -> None:
        """Who made what is finite of an operation's results and beyond fp16: it, or who made what it was given."""
        large = [tensor for tensor in outs if beyond(tensor)]
        for tensor in outs:
            self._large.drop(tensor)
        if large:
            given, made = self._largest(run)
            made = made if given else operation.made(facts(large[0], "output"))
            if made is not None:
                for tensor in large:
                    self._large[tensor] = made

    def _largest(self, run: _Running) -> tuple[bool, Maker | None]:
        """Whether an operation was given a number beyond fp16, and who made the largest, where that was seen."""
        largest, most = 0.0, None
        for tensor in run.ins:
            size = 0.0 if id(tensor) in run.written else beyond(tensor)
            if id(tensor) in run.written and (made := self._maker_of(tensor)) is not None:
                size = made.result.largest  # its maker knows what it held before
            if size > largest:
                largest, most = size, tensor
        if most is None:
            return False, None
        there = self._there(most)
        before = None if there is None else Operation(there[0], "").made(facts(most, there[1]))
        return True, self._maker_of(most) or before

    def _maker_of(self, tensor: Tensor) -> Maker | None:
        return self._large.own(tensor) or self._large.shared(tensor)

    def reached(self, tensor: Tensor) -> Operation | None:
        """Behind a tensor that isn't finite; None if it is, or if it holds no more than a mask."""
        if finite(tensor):
            return None
        operation = self._bad.own(tensor) or self._origin(tensor)
        return None if operation.meant else operation

    # ------------------------------------------------------------------------------------ the graph

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


@contextmanager
def _beneath_transforms() -> Iterator[bool]:
    """Outside of the transforms of `torch.func` that are in force; whether there are any."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield False
        return
    with temporarily_clear_interpreter_stack():
        yield True
