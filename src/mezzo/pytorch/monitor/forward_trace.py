"""ForwardTrace: follows values that aren't finite through a forward pass, from the operation that produced them.

A function mode sees each operation as the user called it, with what Mezzo's kernels made of it; the dispatcher would
show what is inside. Functions that PyTorch writes in Python are looked into (`F.normalize` is a norm, a
clamp and a division).

-inf that somebody wrote down (a mask on scores) is no finding, nor is anything that an operation absorbs: what is asked
for at the end is what reached a given tensor.
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

from mezzo.core.finding import OUTSIDE, Finding, Maker, TensorFacts, rounded_to_infinity
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
from mezzo.scripts.patches import Patches


@dataclass
class Place:
    """An operation: where, by whom, on which of the user's lines; and the event that it was, if one."""

    module: str
    op: str
    line: Line | None = None
    event: Event | None = None
    zeros: bool = False  # whether there was a 0 in what went in or came out of an operation with a pole

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.op}"


@dataclass
class Event:
    """An operation that returned something that isn't finite, or a tensor that was there and is not.

    Args:
        place: of it.
        number: in order.
        kind: ``passed`` (something not finite went in), ``overflow`` or ``invalid`` (produced it), ``input``,
            ``state``, ``meant`` (-inf that somebody wrote, and what comes of it).
        parents: where what went in came from.
        inputs, outputs: what went in and came out; of those that only passed it on, nothing.
        unseen: of a tensor that is on the graph, by an operation that nobody watched.
        maker: of an overflow, who made the finite number that did not fit, where that was before.
    """

    place: Place
    number: int
    kind: str
    parents: list[Event] = field(default_factory=list)
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    unseen: bool = False
    maker: Maker | None = None

    @property
    def meant(self) -> bool:
        """Whether it is no more than a mask."""
        return self.kind == "meant"


def finding_of(first: Event, passed: Sequence[Event], how: str = "replay") -> Finding:
    """As a finding, what `root` gives."""
    place = first.place
    return Finding(
        "overflow" if first.kind == "passed" else first.kind,
        place.module,
        place.op,
        "forward",
        first.inputs,
        first.outputs,
        [str(one.place) for one in passed],
        line_text(place.line),
        how,
        maker=first.maker,
    )


def root(event: Event) -> tuple[Event, list[Event]]:
    """The earliest event that produced what an event has, and those that passed it on, in order."""
    seen: dict[int, Event] = {}
    stack = [event]
    while stack:
        one = stack.pop()
        if one.number in seen or one.meant:
            continue
        seen[one.number] = one
        stack.extend(one.parents)
    order = [seen[number] for number in sorted(seen)]
    producers = [one for one in order if one.kind != "passed"]
    first = producers[0] if producers else order[0]
    return first, [one for one in order if one.number > first.number]


def absorbed(place: Place) -> tuple[Event, list[Event]] | None:
    """The root of an infinity that forward absorbed, and backward did not; a pole is one in both directions."""
    if place.event is None or place.event.meant:
        return None
    first, passed = root(place.event)
    return (first, passed) if first.place is not place or first.kind != "invalid" else None


def writes_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number among the arguments is infinite: somebody means it."""
    flat = [*args, *kwargs.values()]
    flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, float) and math.isinf(value) for value in flat)


def cause_of(op: str, func: Any, args: Any, kwargs: Any, bad: Sequence[Tensor], *, rerun: bool) -> str:
    """``overflow`` if the result lies beyond its format's range, ``invalid`` if there is none."""
    wide = _in_fp64(func, args, kwargs) if rerun else None
    if wide is not None and all(bool(torch.isfinite(t).all()) for t in wide):
        return "overflow"
    no_number = any(bool(torch.isnan(t).any()) for t in (bad if wide is None else wide))
    return "invalid" if no_number or op in POLES else "overflow"


def _in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The operation once more, on FP64 copies; None where it can't be, or doesn't compute in FP64."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double() if tensor.is_floating_point() else tensor

    device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            kept = {name: value for name, value in kwargs.items() if name not in ("dtype", "out")}
            args, kept = mapped((args, kept), wide)
            outs = [t for t in tensors(func(*args, **kept)) if t.is_floating_point()]
    except Exception:  # an op without an FP64 form, or of a kind that can't be repeated: decided by its name
        return None
    finally:
        torch.set_rng_state(random)
    return outs if outs and all(t.dtype is torch.float64 for t in outs) else None


_BEYOND = rounded_to_infinity("fp16")


def maker(place: Place, result: TensorFacts) -> Maker:
    """Who made numbers beyond fp16 first; without an op, a tensor that was there."""
    return Maker(place.module, place.op, line_text(place.line), result)


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
class _Operation:
    """One that runs: what it was given, with versions and, by id, facts of what it writes; later what it made."""

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
    """Watches every torch function between `__enter__` and `__exit__`.

    Args:
        models: whose modules' paths are told.
        inputs: tensors that the model is given, by name.
        stop: code of the function that calls the model: the user's lines are looked for inside of it.
        called: the line from where the model was called, for operations in modules that are all PyTorch's.
        outer: the module of operations that no module holds.
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
        self._events: _OfTensors[Event] = _OfTensors()
        self._makers: _OfTensors[Maker] = _OfTensors()
        self._held: list[Tensor] = []
        self._count = 0
        self._running = False
        self._thread = threading.get_ident()
        self.paused = False
        self.trouble = ""
        self.places: dict[Any, Place] = {}  # node of the graph -> the operation that made it
        self.leaves: dict[Any, Tensor] = {}  # node that accumulates -> its leaf

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
        try:
            # Functions that PyTorch writes in Python don't show themselves to a mode, but what they call does.
            for module in (torch.nn.functional, torch.functional, torch._tensor):
                for name in _ASKERS:
                    if hasattr(module, name):
                        patches.set(module, name, lambda *_: False)
            patches.set(torch.autograd.Function, "apply", classmethod(self._apply()))
            with _hooks_not_warned_of(), self._beneath():
                yield self
        finally:
            patches.undo()
            for handle in handles:
                handle.remove()

    @contextmanager
    def _beneath(self) -> Iterator[None]:
        """In force beneath all other modes, but for that of `torch.set_default_device`, which has to be the lowest.

        Whoever leaves a mode takes the uppermost off: beneath, this is never taken for another.
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

    def _looks_away(self) -> bool:
        """Whether what runs now is none of what is watched."""
        return self.paused or threading.get_ident() != self._thread

    def _guarded(self, look: Callable[..., Any], *args: Any) -> Any:
        """What fails in looking does not fail what is looked at: it ends the looking, and `trouble` says why."""
        try:
            return look(*args)
        except Exception as error:
            self.paused, self.trouble = True, f"{type(error).__name__}: {error}"
            return None

    def _claim_all(self, held: Any, place: Place | None) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors(held):
                self.claim(tensor, place)

    def _apply(self) -> Callable[..., Any]:
        """In place of `Function.apply`: autograd Functions of the user's are operations with a name and a line."""
        before = torch.autograd.Function.__dict__["apply"].__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or self._looks_away():
                return before(cls, *args, **kwargs)
            self._guarded(self._claim_all, (args, kwargs), None)
            out = before(cls, *args, **kwargs)
            by_hook = cls is torch.nn.modules._functions.BackwardHookFunction
            self._guarded(self._claim_all, out, self._place(HOOK if by_hook else cls.__name__))
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

    @property
    def module(self) -> str:
        """Path of the module that is running."""
        return self._stack[-1]

    def module_of(self, tensor: Tensor) -> str:
        """Path of the module that has a parameter or a buffer; that of the model for anything else."""
        return self._states.get(tensor.data_ptr(), ("", "", False))[0]

    def _place(self, op: str) -> Place:
        return Place(self.module, op, users_line(self._stop) or self._called)

    # ------------------------------------------------------------------------------------ operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and note what became of values that aren't finite."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        operation = self._guarded(self._before, func, args, kwargs)
        self._running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._running = False
        if operation is not None:
            self._guarded(self._ran, operation, out)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> _Operation:
        ins = [bare(tensor) for tensor in tensors((args, kwargs))]
        for tensor in ins:
            self.claim(tensor, None)
        held = {}
        if writes(func, kwargs):
            with torch._C.DisableTorchFunction(), _beneath_transforms():
                held = {id(t): facts(t, "") for t in ins}
        return _Operation(func, args, kwargs, ins, [version_of(tensor) for tensor in ins], held)

    def _ran(self, run: _Operation, out: Any) -> None:
        """An operation has run: note what isn't finite of it, and the nodes that it made."""
        with _beneath_transforms() as transformed:
            outs = [bare(tensor) for tensor in tensors(out)]
            written = [t for t, version in zip(run.ins, run.versions) if version_of(t) != version]
            outs += [tensor for tensor in written if not any(tensor is out for out in outs)]
            if not outs:
                return
            name, run.written = run.name, {id(tensor) for tensor in written}
            bad = [] if name in _UNDEFINED else [tensor for tensor in outs if not finite(tensor)]
            if name in _STATISTICS and len(run.args) > 5 and run.args[5]:
                run.ins, bad = self._without_statistics(run.ins), self._without_statistics(bad)
            for tensor in outs:
                self._events.drop(tensor)
            place: Place | None = None
            if bad:
                place = self._place(name)
                self._note(place, run, bad, rerun=not written and not transformed)
            if name not in _UNDEFINED:
                good = [tensor for tensor in outs if not any(tensor is one for one in bad)]
                place = self._note_large(place, run, good)
            if transformed:  # nobody else holds what is under a transform's wrappers
                self._held += bad
            if any(tensor.requires_grad for tensor in outs):
                place = place or self._place(name)
                if name in POLES:
                    place.zeros = any(_has_zero(tensor) for tensor in (*run.ins, *outs))
                for tensor in outs:
                    self.claim(tensor, place)

    def _without_statistics(self, some: list[Tensor]) -> list[Tensor]:
        return [t for t in some if self._states.get(t.data_ptr(), ("", "", True))[2]]

    def _note(self, place: Place, run: _Operation, bad: list[Tensor], *, rerun: bool) -> None:
        parents: list[Event] = []
        for tensor in run.ins:
            known = self._events.own(tensor)
            if known is None and id(tensor) not in run.written and not finite(tensor):
                known = self._origin(tensor)
            if known is not None:
                parents.append(known)
        kind = "passed"
        if all(parent.meant for parent in parents):
            asked = parents or writes_infinity(run.args, run.kwargs)
            masks = all(only_minus_infinity(tensor) for tensor in bad)
            if asked and (masks or (parents and place.op in _KEEPS_MASKS)):
                kind = "meant"
            else:
                kind = cause_of(place.op, run.func, run.args, run.kwargs, bad, rerun=rerun)
        event = self._event(place, kind, parents)
        place.event = event
        if kind in ("overflow", "invalid"):
            names = [self._states.get(t.data_ptr(), ("", f"input {n}"))[1] for n, t in enumerate(run.ins)]
            event.inputs = [
                # What an operation has written over is told as it was; where nobody looked before, not at all.
                replace(run.held[id(t)], name=name) if id(t) in run.held else facts(t, name)
                for name, t in zip(names, run.ins)
                if id(t) in run.held or id(t) not in run.written
            ][:6]
            event.outputs = [facts(t, "output") for t in bad][:3]
        if kind == "overflow" and any(tensor.dtype is torch.float16 for tensor in bad):
            event.maker = self._largest(run)[1]
        for tensor in bad:
            self._events[tensor] = event

    def _event(
        self, place: Place, kind: str, parents: list[Event], inputs: list[TensorFacts] | None = None
    ) -> Event:
        self._count += 1
        return Event(place, self._count, kind, parents, inputs or [])

    def _there(self, tensor: Tensor) -> tuple[str, str, bool | None] | None:
        """Of a tensor that was there before: the path of its module, its name, whether it is a parameter."""
        pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
        given = self._given.get(pointer)
        return self._states.get(pointer) or (None if given is None else ("", given, None))

    def _origin(self, tensor: Tensor) -> Event:
        """Of a tensor that isn't finite though no operation that was seen made it so."""
        known = self._events.shared(tensor)
        if known is not None:
            return known
        path, name, is_parameter = self._there(tensor) or (self.module, "", None)
        there = bool(name)
        if only_minus_infinity(tensor) and not is_parameter:
            kind = "meant"
        elif is_parameter is None and (there or self.module == OUTSIDE):
            kind = "input"
        else:
            kind = "state"
        op = "" if is_parameter is None else name
        event = self._event(Place(path, op), kind, [], [facts(tensor, name or "constant")])
        event.unseen = not there and tensor.grad_fn is not None
        self._events[tensor] = event
        return event

    # ------------------------------------------------------------------------------------ beyond fp16

    def _note_large(self, place: Place | None, run: _Operation, outs: Sequence[Tensor]) -> Place | None:
        """Who made what is finite of an operation's results and beyond fp16: it, or who made what it was given."""
        large = [tensor for tensor in outs if beyond(tensor)]
        made: Maker | None = None
        if large:
            given, made = self._largest(run)
            if not given:
                place = place or self._place(run.name)
                made = maker(place, facts(large[0], "output"))
        for tensor in outs:
            self._makers.drop(tensor)
            if made is not None and any(tensor is one for one in large):
                self._makers[tensor] = made
        return place

    def _largest(self, run: _Operation) -> tuple[bool, Maker | None]:
        """Whether an operation was given a number beyond fp16, and who made the largest, where that was seen."""
        largest, most = 0.0, None
        for tensor in run.ins:
            size = 0.0 if id(tensor) in run.written else beyond(tensor)
            if id(tensor) in run.written and (made := self._maker_of(tensor)) is not None:
                size = made.result.largest  # what it held before is told by who made that
            if size > largest:
                largest, most = size, tensor
        if most is None:
            return False, None
        there = self._there(most)
        before = None if there is None else maker(Place(there[0], ""), facts(most, there[1]))
        return True, self._maker_of(most) or before

    def _maker_of(self, tensor: Tensor) -> Maker | None:
        return self._makers.own(tensor) or self._makers.shared(tensor)

    def reached(self, tensor: Tensor) -> Event | None:
        """Behind a tensor that isn't finite; None if it is, or if it holds no more than a mask."""
        if finite(tensor):
            return None
        event = self._events.own(tensor) or self._origin(tensor)
        return None if event.meant else event

    # ------------------------------------------------------------------------------------ the graph

    def claim(self, tensor: Tensor, place: Place | None) -> None:
        """Note who made the nodes of a tensor's graph that nobody has yet; None: one that was not seen."""
        stack: list[Any] = [tensor.grad_fn] if tensor.requires_grad and tensor.grad_fn is not None else []
        while stack:
            node = stack.pop()
            if node is None or node in self.places or node in self.leaves:
                continue
            if hasattr(node, "variable"):
                self.leaves[node] = node.variable
                continue
            self.places[node] = place or Place(self.module, op_of_node(node), self._called)
            stack.extend(following for following, _ in node.next_functions)


@contextmanager
def _beneath_transforms() -> Iterator[bool]:
    """Outside of the transforms of `torch.func` that are in force; whether there are any."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield False
        return
    with temporarily_clear_interpreter_stack():
        yield True


def _has_zero(tensor: Tensor) -> bool:
    seen = values(tensor)
    return seen is not None and bool((seen == 0).any())


@contextmanager
def _hooks_not_warned_of() -> Iterator[None]:
    """A compiled part, which runs eagerly here, warns of the hooks. All other filters stay whose they are."""
    warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
    entry = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
