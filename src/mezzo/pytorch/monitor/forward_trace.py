"""ForwardTrace: follows values that aren't finite through a forward pass, from the operation that produced them.

A function mode sees each operation as the user called it, with what Mezzo's kernels made of it; the dispatcher would
show what is inside. Functions that PyTorch writes in Python are looked into (`F.normalize` is a norm, a
clamp and a division).

-inf that somebody wrote down (a mask on scores) is no finding, nor is anything that an operation absorbs: what is asked
for at the end is what reached a given tensor.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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

from mezzo.core.finding import OUTSIDE, TensorFacts
from mezzo.pytorch.monitor import op_names, user_line
from mezzo.pytorch.monitor.events import Event, Place, cause_of, writes_infinity
from mezzo.pytorch.monitor.makers import ForwardMakers
from mezzo.pytorch.monitor.tensor_facts import bare, facts, finite, only_minus_infinity, tensors, values

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
        called: user_line.Line | None = None,
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
            place = self._place(op_names.HOOK if by_hook else cls.__name__)
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
        return Place(self.module, op, user_line.find(self._stop) or self._called)

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
        if op_names.writes(func, kwargs):
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
        name = op_names.of_function(func)
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
            if name in op_names.POLES:
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
            self.places[node] = place or Place(self.module, op_names.of_node(node), self._called)
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
