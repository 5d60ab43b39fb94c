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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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

from mezzo.core.finding import OUTSIDE, Maker, TensorFacts, rounded_to_infinity
from mezzo.pytorch.monitor.operations import (
    HOOK,
    POLES,
    Line,
    bare,
    facts,
    finite,
    line_text,
    only_minus_infinity,
    op_of_function,
    op_of_node,
    tensors,
    users_line,
    values,
    writes,
)


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


def writes_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number among the arguments is infinite: somebody means it."""
    flat = [*args, *kwargs.values()]
    flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, float) and math.isinf(value) for value in flat)


def cause_of(op: str, func: Any, args: Any, kwargs: Any, bad: Sequence[Tensor], *, rerun: bool) -> str:
    """``overflow`` if the result lies beyond its format's range, ``invalid`` if there is none."""
    if rerun:
        wide = _in_fp64(func, args, kwargs)
        if wide is not None:
            if all(bool(torch.isfinite(t).all()) for t in wide):
                return "overflow"
            if any(bool(torch.isnan(t).any()) for t in wide):
                return "invalid"
            return "invalid" if op in POLES else "overflow"
    if op in POLES or any(bool(torch.isnan(t).any()) for t in bad):
        return "invalid"
    return "overflow"


def _in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The operation once more, on FP64 copies; None where it can't be, or doesn't compute in FP64."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            items = [wide(item) for item in value]
            return tuple(items) if type(value) is tuple else items
        return value

    device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            kept = {name: wide(value) for name, value in kwargs.items() if name not in ("dtype", "out")}
            outs = [t for t in tensors(func(*wide(args), **kept)) if t.is_floating_point()]
    except Exception:  # an op without an FP64 form, or of a kind that can't be repeated: decided by its name
        return None
    finally:
        torch.set_rng_state(random)
    return outs if outs and all(t.dtype is torch.float64 for t in outs) else None


_BEYOND = rounded_to_infinity("fp16")


@dataclass(frozen=True)
class Large:
    """Numbers beyond fp16, where they were first.

    Args:
        place: who made them; without an op of a tensor that was there.
        result: what was made.
    """

    place: Place
    result: TensorFacts

    def told(self) -> Maker:
        """As a finding has it."""
        return Maker(self.place.module, self.place.op, line_text(self.place.line), self.result)


def beyond(tensor: Tensor, scale: float = 1.0) -> float:
    """The largest magnitude of a finite tensor of a wider range than fp16's; 0.0 where fp16 holds it.

    Args:
        tensor: of any dtype.
        scale: how many times its numbers are too large.
    """
    seen = None if tensor.dtype is torch.float16 or tensor.dtype.itemsize < 2 else values(tensor)
    if seen is None or not seen.numel():
        return 0.0
    low, high = torch.aminmax(seen)
    largest = float(torch.maximum(-low, high))
    return largest if _BEYOND * scale <= largest < float("inf") else 0.0


class ForwardMakers:
    """Of the operations of a forward pass.

    Args:
        states: address -> the path, the name, and whether it is a parameter, of what modules have.
        given: address -> the name of what the model is given.
    """

    def __init__(self, states: Mapping[int, tuple[str, str, bool]], given: Mapping[int, str]) -> None:
        self._states, self._given = states, given
        self._of: dict[int, tuple[weakref.ref[Tensor], Large]] = {}
        self._by_storage: dict[int, tuple[weakref.ref[Tensor], Large]] = {}

    def ran(
        self, place: Callable[[], Place], ins: Sequence[Tensor], written: set[int], outs: Sequence[Tensor]
    ) -> None:
        """An operation has run.

        Args:
            place: makes its place.
            ins: what it was given.
            written: ids of those that it has written since.
            outs: what is finite of what it made.
        """
        large = [tensor for tensor in outs if beyond(tensor)]
        found: Large | None = None
        if large:
            given, found = self._largest(ins, written)
            if not given:
                found = Large(place(), facts(large[0], "output"))
        for tensor in outs:
            self._of.pop(id(tensor), None)
            if found is not None and any(tensor is one for one in large):
                held = weakref.ref(tensor), found
                self._of[id(tensor)] = held
                if tensor.layout is torch.strided:
                    self._by_storage[tensor.untyped_storage().data_ptr()] = held

    def behind(self, ins: Sequence[Tensor], written: set[int]) -> Large | None:
        """Who made the largest of what an operation was given; None where fp16 holds that, or nobody saw it made."""
        return self._largest(ins, written)[1]

    def _largest(self, ins: Sequence[Tensor], written: set[int]) -> tuple[bool, Large | None]:
        sizes: list[tuple[float, Tensor]] = []
        for tensor in ins:
            if id(tensor) in written:  # what it held before is told by who made that
                held = self._known(tensor)
                sizes.append((0.0 if held is None else held.result.largest, tensor))
            else:
                sizes.append((beyond(tensor), tensor))
        size, most = max(sizes, key=lambda pair: pair[0], default=(0.0, None))
        if most is None or not size:
            return False, None
        return True, self._known(most) or self._from_before(most)

    def _known(self, tensor: Tensor) -> Large | None:
        held = self._of.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        if tensor.layout is torch.strided:
            held = self._by_storage.get(tensor.untyped_storage().data_ptr())
            if held is not None and held[0]() is not None:  # a view of what was written through another
                return held[1]
        return None

    def _from_before(self, tensor: Tensor) -> Large | None:
        pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
        if pointer in self._states:
            path, name, _ = self._states[pointer]
            return Large(Place(path, ""), facts(tensor, name))
        if pointer in self._given:
            return Large(Place("", ""), facts(tensor, self._given[pointer]))
        return None


_UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
_STATISTICS = ("batch_norm", "instance_norm")  # in training they write their buffers, and don't read them
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ASKERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass(frozen=True)
class _Given:
    """What an operation was given: tensors, their versions then, and, by id, what those held that it writes."""

    tensors: list[Tensor]
    versions: list[int]
    held: dict[int, TensorFacts]


class ForwardTrace(TorchFunctionMode):
    """Watches every torch function between `__enter__` and `__exit__`.

    Args:
        models: whose modules' paths are told.
        inputs: tensors that the model is given, by name.
        stop: code of the function that calls the model: the user's lines are looked for inside of it.
        called: the line from where the model was called, for operations in modules that are all PyTorch's.
        outer: the module of operations that no module holds.
        lenient: where watching an operation fails, stop watching (`trouble` says why) and let the operation be.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        inputs: Sequence[tuple[str, Tensor]] = (),
        *,
        stop: CodeType | None = None,
        called: Line | None = None,
        outer: str = "",
        lenient: bool = False,
    ) -> None:
        super().__init__()
        self._paths: dict[int, str] = {}
        self._stack: list[str] = [outer]
        self._stop, self._called = stop, called
        self._states: dict[int, tuple[str, str, bool]] = {}
        for path, module in (pair for model in models for pair in model.named_modules()):
            self._paths.setdefault(id(module), _unwrapped(path))
            for own, is_parameter in ((module._parameters, True), (module._buffers, False)):
                for name, tensor in own.items():
                    if tensor is not None and tensor.numel():
                        self._states[tensor.data_ptr()] = (_unwrapped(path), name, is_parameter)
        self._given = {tensor.data_ptr(): name for name, tensor in inputs if tensor.numel()}
        self._events: dict[int, tuple[weakref.ref[Tensor], Event]] = {}
        self._by_storage: dict[int, tuple[weakref.ref[Tensor], Event]] = {}
        self._makers = ForwardMakers(self._states, self._given)
        self._held: list[Tensor] = []
        self._count = 0
        self._running = False
        self._thread = threading.get_ident()
        self.paused = False
        self.lenient, self.trouble = lenient, ""
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
        try:
            with _python_functions_open(), self._functions_seen(), _hooks_not_warned_of(), self._beneath():
                yield self
        finally:
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
        """What fails in looking does not fail what is looked at, if `lenient`."""
        try:
            return look(*args)
        except Exception as error:
            if not self.lenient:
                raise
            self.paused, self.trouble = True, f"{type(error).__name__}: {error}"
            return None

    def _claim_all(self, held: Any, place: Place | None) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors(held):
                self.claim(tensor, place)

    @contextmanager
    def _functions_seen(self) -> Iterator[None]:
        """Autograd Functions of the user's are operations with a name and a line."""
        function: Any = torch.autograd.Function
        before = function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or self._looks_away():
                return before.__func__(cls, *args, **kwargs)
            self._guarded(self._claim_all, (args, kwargs), None)
            out = before.__func__(cls, *args, **kwargs)
            by_hook = cls is torch.nn.modules._functions.BackwardHookFunction
            place = self._place(HOOK if by_hook else cls.__name__)
            self._guarded(self._claim_all, out, place)
            return out

        function.apply = classmethod(apply)
        try:
            yield
        finally:
            function.apply = before

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
        before = self._guarded(self._before, func, args, kwargs)
        self._running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._running = False
        if before is not None:
            self._guarded(self._after, func, args, kwargs, before, out)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> _Given:
        ins = [bare(tensor) for tensor in tensors((args, kwargs))]
        for tensor in ins:
            self.claim(tensor, None)
        held = {}
        if writes(func, kwargs):
            with torch._C.DisableTorchFunction(), _beneath_transforms():
                held = {id(t): facts(t, "") for t in ins}
        return _Given(ins, [_version(tensor) for tensor in ins], held)

    def _after(self, func: Any, args: Any, kwargs: Any, given: _Given, out: Any) -> None:
        with _beneath_transforms() as transformed:
            outs = [bare(tensor) for tensor in tensors(out)]
            self._ran(func, args, kwargs, given, outs, transformed=transformed)

    def _ran(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: _Given,
        outs: list[Tensor],
        *,
        transformed: bool,
    ) -> None:
        """An operation has run: note what isn't finite of it, and the nodes that it made."""
        ins, held = given.tensors, given.held
        written = [tensor for tensor, version in zip(ins, given.versions) if _version(tensor) != version]
        outs += [tensor for tensor in written if not any(tensor is out for out in outs)]
        if not outs:
            return
        name = op_of_function(func)
        place: Place | None = None
        bad = [] if name in _UNDEFINED else [tensor for tensor in outs if not finite(tensor)]
        if name in _STATISTICS and len(args) > 5 and args[5]:
            ins, bad = self._without_statistics(ins, bad)
        for tensor in outs:
            self._events.pop(id(tensor), None)
        ids = {id(tensor) for tensor in written}
        if bad:
            place = self._place(name)
            rerun = not written and not transformed
            self._note(place, func, args, kwargs, ins, ids, held, bad, rerun=rerun)
        if name not in _UNDEFINED:
            good = [tensor for tensor in outs if not any(tensor is one for one in bad)]
            self._makers.ran(lambda: place or self._place(name), ins, ids, good)
        if transformed:  # nobody else holds what is under a transform's wrappers
            self._held += bad
        if any(tensor.requires_grad for tensor in outs):
            place = place or self._place(name)
            if name in POLES:
                place.zeros = any(_has_zero(tensor) for tensor in (*ins, *outs))
            for tensor in outs:
                self.claim(tensor, place)

    def _without_statistics(self, ins: list[Tensor], bad: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        def is_one(tensor: Tensor) -> bool:
            known = self._states.get(tensor.data_ptr())
            return known is not None and not known[2]

        return [t for t in ins if not is_one(t)], [t for t in bad if not is_one(t)]

    def _note(
        self,
        place: Place,
        func: Any,
        args: Any,
        kwargs: Any,
        ins: list[Tensor],
        written: set[int],
        held: dict[int, TensorFacts],
        bad: list[Tensor],
        *,
        rerun: bool,
    ) -> None:
        parents: list[Event] = []
        for tensor in ins:
            known = self._event_of(tensor)
            if known is None and id(tensor) not in written and not finite(tensor):
                known = self._origin(tensor)
            if known is not None:
                parents.append(known)
        masks = all(only_minus_infinity(tensor) for tensor in bad)
        kind = "passed"
        if all(parent.meant for parent in parents):
            if (parents or writes_infinity(args, kwargs)) and (
                masks
                or (
                    parents
                    and place.op in ("neg", "mul", "div", "sub", "rsub", "abs", "square", "__getitem__")
                )
            ):
                kind = "meant"
            else:
                kind = cause_of(place.op, func, args, kwargs, bad, rerun=rerun)
        event = Event(place, self._count, kind, parents)
        self._count += 1
        place.event = event
        if kind in ("overflow", "invalid"):
            names = [_input_name(self._states.get(t.data_ptr()), n) for n, t in enumerate(ins)]
            event.inputs = [
                # What an operation has written over is told as it was; where nobody looked before, not at all.
                replace(held[id(t)], name=name) if id(t) in held else facts(t, name)
                for name, t in zip(names, ins)
                if id(t) in held or id(t) not in written
            ][:6]
            event.outputs = [facts(t, "output") for t in bad][:3]
        if kind == "overflow" and any(tensor.dtype is torch.float16 for tensor in bad):
            made = self._makers.behind(ins, written)
            event.maker = None if made is None else made.told()
        for tensor in bad:
            self._set(tensor, event)

    def _set(self, tensor: Tensor, event: Event) -> None:
        alive = weakref.ref(tensor)
        self._events[id(tensor)] = (alive, event)
        if tensor.layout is torch.strided:
            self._by_storage[tensor.untyped_storage().data_ptr()] = (alive, event)

    def _event_of(self, tensor: Tensor) -> Event | None:
        held = self._events.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        return None

    def _origin(self, tensor: Tensor) -> Event | None:
        """Of a tensor that isn't finite though no operation that was seen made it so."""
        if tensor.layout is torch.strided:
            held = self._by_storage.get(tensor.untyped_storage().data_ptr())
            if held is not None and held[0]() is not None:  # a view of what was written through another
                return held[1]
        pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
        state = self._states.get(pointer)
        mask = only_minus_infinity(tensor)
        if state is not None:
            path, name, is_parameter = state
            kind = "meant" if mask and not is_parameter else "state"
            event = Event(Place(path, name), self._count, kind, inputs=[facts(tensor, name)])
        elif pointer in self._given:
            name = self._given[pointer]
            event = Event(
                Place("", ""), self._count, "meant" if mask else "input", inputs=[facts(tensor, name)]
            )
        else:
            kind = "meant" if mask else "input" if self.module == OUTSIDE else "state"
            given = [facts(tensor, "constant")]
            unseen = tensor.grad_fn is not None
            event = Event(Place(self.module, ""), self._count, kind, inputs=given, unseen=unseen)
        self._count += 1
        self._set(tensor, event)
        return event

    def reached(self, tensor: Tensor) -> Event | None:
        """Behind a tensor that isn't finite; None if it is, or if it holds no more than a mask."""
        if finite(tensor):
            return None
        event = self._event_of(tensor) or self._origin(tensor)
        return None if event is None or event.meant else event

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


def _unwrapped(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


@contextmanager
def _beneath_transforms() -> Iterator[bool]:
    """Outside of the transforms of `torch.func` that are in force; whether there are any."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield False
        return
    with temporarily_clear_interpreter_stack():
        yield True


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_zero(tensor: Tensor) -> bool:
    seen = values(tensor)
    return seen is not None and bool((seen == 0).any())


def _input_name(state: tuple[str, str, bool] | None, number: int) -> str:
    return f"input {number}" if state is None else state[1]


@contextmanager
def _python_functions_open() -> Iterator[None]:
    """Functions that PyTorch writes in Python don't show themselves to a mode, but what they call does."""
    modules: list[Any] = [torch.nn.functional, torch.functional, torch._tensor]
    before = [
        (module, name, getattr(module, name))
        for module in modules
        for name in _ASKERS
        if hasattr(module, name)
    ]
    for module, name, _ in before:
        setattr(module, name, _no)
    try:
        yield
    finally:
        for module, name, asker in before:
            setattr(module, name, asker)


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


def _no(*_: Any) -> bool:
    return False
