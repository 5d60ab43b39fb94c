"""`backward()` and `autograd.grad` of a run. In fp16 they start from S; a hook on every leaf divides by S in FP32.

The hook comes before the script's own, and notes on the device whether the gradient was finite. A graph with a leaf
that no optimizer owns has no step to skip: it is run again at S/2 until its gradients are finite or S is 1. With
several ranks it is not run again, and a message says so.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import is_distributed
from mezzo.pytorch.kernels.not_traced import breaks_graph, not_traced
from mezzo.pytorch.run.own_recording import unscaled as unscaled_by_script
from mezzo.pytorch.step import numbers_of
from mezzo.pytorch.training import backward as walks

if TYPE_CHECKING:
    from mezzo.core.loss_scale import LossScale
    from mezzo.pytorch.run.optimizers import Overflows
    from mezzo.pytorch.run.session import Session

_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass
_IN_VMAP = (
    "gradients inside torch.func.vmap are scaled and unscaled, but can't be checked there: one that overflows reaches "
    "the script as NaN or infinity. Check them before the update, or use --precision bf16"
)
_TRACERS = {"FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode"}
_CHECKED = (torch.float32, torch.float64)

_NOT_AGAIN = (
    "a backward pass reached a tensor that no optimizer owns. With one process, Mezzo runs a pass that overflows again "
    "at a smaller loss scale; with several it does not, because the other ranks would not. Gradients of that tensor "
    "may be NaN or infinite: check them before use, or use --precision bf16"
)
_NO_SCALE_HELPS = (
    "gradients that no step can skip (of autograd.grad, torch.func, or a tensor without an optimizer) were NaN or "
    "infinite at loss scale 1, too: check them before use, or use --precision bf16"
)
Backward = Callable[..., Any]
_Run = Callable[[float, bool | None], Any]
leaves_of = not_traced(walks.leaves_of)


class FoundInf:
    """For each leaf of one backward pass, its flag (a view of its device's): whether its gradient was not finite."""

    def __init__(self, devices: Sequence[torch.device], inv_scale: float) -> None:
        # Ids of the optimizers that have read flags of this pass, or of those inside it, and the loss scale before.
        self.spent: dict[int, LossScale] = {}
        self._devices = devices
        counts = Counter(devices)
        self._flags = {
            device: torch.zeros(count, dtype=torch.float32, device=device) for device, count in counts.items()
        }
        self.inverses = {
            device: torch.full((), inv_scale, dtype=torch.float32, device=device) for device in counts
        }
        views = {device: iter(flags.unbind()) for device, flags in self._flags.items()}
        self.slots = [next(views[device]) for device in devices]

    def read(self) -> list[bool]:
        """Whether each leaf's gradient was not finite; waits for the devices."""
        values = {device: iter(flags.tolist()) for device, flags in self._flags.items()}
        return [next(values[device]) != 0 for device in self._devices]


Flags = list[tuple[FoundInf, int]]  # the backward passes that added to a gradient, its leaf's place in each


class Attempts:
    """One backward that is run until its gradients are finite."""

    def __init__(self, overflows: Overflows, scale: float) -> None:
        self._overflows = overflows
        self.scale = scale  # of the current attempt
        # Each leaf reached, with its gradient and flags from before the first attempt, by the leaf's id.
        self.before: dict[int, tuple[Tensor, Tensor | None, Flags]] = {}
        self.found: list[FoundInf] = []  # of the current attempt: a backward inside the backward has its own

    def reach(self, leaves: Iterable[Tensor]) -> None:
        """These leaves are about to receive gradients."""
        for leaf in leaves:
            if id(leaf) not in self.before:
                self.before[id(leaf)] = (leaf, leaf.grad, list(self._overflows.flags[id(leaf)]))
                self._reset(leaf)

    def begin(self, scale: float) -> None:
        """An attempt begins: restore every leaf."""
        self.scale = scale
        self.found.clear()
        for leaf, _, _ in self.before.values():
            self._reset(leaf)

    @property
    def overflowed(self) -> bool:
        """Whether the attempt found a gradient that is not finite."""
        return any(any(found.read()) for found in self.found)

    def _reset(self, leaf: Tensor) -> None:
        _, old, flags = self.before[id(leaf)]
        leaf.grad = None if old is None else old.clone()
        self._overflows.flags[id(leaf)][:] = flags

    @torch.no_grad()
    def write_back(self) -> None:
        """`.grad` is accumulated in place: write the sums into the tensors that were `.grad` before."""
        for leaf, old, _ in self.before.values():
            if old is not None and leaf.grad is not None and leaf.grad.layout is old.layout:
                leaf.grad = old.copy_(leaf.grad)


def make_backward(session: Session, overflows: Overflows, original: Backward) -> Backward:
    """The `torch.autograd.backward` of a run, which `Tensor.backward` calls as well."""

    observers = session.observers

    def observed(roots: Sequence[Any], scale: float, run: Callable[[], Any]) -> Any:
        for root in roots if observers.listening else ():
            if isinstance(root, Tensor):
                observers.tell("backward_begins", root, scale)
        try:
            return run()
        except BaseException:
            observers.tell("step_dropped")
            raise

    @not_traced
    def note_loss(roots: tuple[Any, ...], seeds: tuple[Any, ...]) -> None:
        value = _value(roots, seeds) if session.journal.writes else _kept(roots, seeds)
        if session.records_own:
            value = unscaled_by_script(roots[0], value) if value is not None and len(roots) == 1 else value
            if isinstance(roots[0], Tensor):
                session.resolve(roots[0].device.type)
        session.journal.loss(value)

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if session.only_counts and grad_tensors is None and type(tensors) is Tensor and _graph_task() == -1:
            is_loss = tensors.numel() == 1
            if not _get_current_dispatch_mode_stack():
                session.journal.losses += 1
                session.journal.last_loss = tensors.detach() if is_loss else None
            if (
                is_loss
                and _asks_no_more(args, kwargs)
                and tensors.dtype in _CHECKED
                and walks.is_simple(tensors)
            ):
                return walks.run_simple(
                    tensors, torch.ones_like(tensors), retain_graph=bool(args and args[0])
                )
            return original(tensors, None, *args, **kwargs)
        return counted(tensors, grad_tensors, *args, **kwargs)

    def counted(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def unscaled() -> Any:
            return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)

        if session.left_alone is not None or (session.observes and observers.busy) or _tracing():
            return unscaled()
        roots = _as_tuple(tensors)
        if _graph_task() != -1:
            return _inside(session, overflows, roots, unscaled) if session.scaling else unscaled()
        seeds = _as_tuple(grad_tensors, len(roots))
        note_loss(roots, seeds)
        if not session.scaling or len(seeds) != len(roots):
            return observed(roots, 1.0, unscaled) if session.observes and observers.listening else unscaled()

        def run(scale: float, retain: bool | None) -> None:
            scaled = tuple(_scaled(root, seed, scale) for root, seed in zip(roots, seeds))
            if is_plain and scaled[0] is not None:
                observed(
                    roots, scale, lambda: walks.run_simple(tensors, scaled[0], retain_graph=bool(retain))
                )
            else:
                observed(roots, scale, lambda: original(roots, scaled, retain, create_graph, *args, **kwargs))

        more = (retain_graph, create_graph, *args)
        is_plain = grad_tensors is None and _asks_no_more(more, kwargs) and walks.is_simple(tensors)
        leaves = leaves_of(roots)
        owners = session.ranks.owners(leaves)
        session.networks.backward(owners)
        owned = overflows.owned()
        is_owned = all(id(owner) in owned for owner in owners)
        if not is_owned and is_distributed():
            session.journal.note(_NOT_AGAIN)
        if is_owned or is_distributed():
            scale = session.scale.scale
            with unscaling(leaves, scale, overflows):
                run(scale, retain_graph)
        else:
            _run_until_finite(session, overflows, leaves, run, create_graph, retain_graph)
        return None

    return breaks_graph(backward, inner="DEFAULT")  # Dynamo does so there anyway


def _asks_no_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments of a backward besides the loss are at most `retain_graph`, or have no effect."""
    is_once = len(args) < 2 or (len(args) == 2 and not args[1])  # without `create_graph`
    return is_once and (not kwargs or (kwargs.keys() == {"inputs"} and kwargs["inputs"] is None))


def make_grad(session: Session, overflows: Overflows, original: Backward) -> Backward:
    """The `torch.autograd.grad` of a run that scales."""

    observers = session.observers
    inside = threading.local()

    @functools.wraps(original)
    def grad(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_ours = observers.busy or getattr(inside, "now", False)
        if not session.scaling or is_ours or _tracing():
            return original(outputs, inputs, grad_outputs, retain_graph, *args, **kwargs)
        wanted = tuple(inputs.values()) if isinstance(inputs, dict) else _as_tuple(inputs)
        if _graph_task() != -1:  # in a custom function's backward, whose results the outer pass divides
            with _suspended(wanted):
                return original(outputs, inputs, grad_outputs, retain_graph, *args, **kwargs)
        overflows.latest = {}
        roots = _as_tuple(outputs)
        seeds = _as_tuple(grad_outputs, len(roots))
        hooked = [t for t in wanted if isinstance(t, Tensor) and t.is_leaf and t._backward_hooks]
        by_hook = {id(leaf) for leaf in hooked}
        in_vmap = walks.in_transform("Vmap")  # where values can't be read
        if in_vmap:
            session.journal.note(_IN_VMAP)
        results: tuple[Any, ...] = ()
        ranks = session.ranks.of_graph(leaves_of, roots)

        def attempt(scale: float, retain: bool | None) -> bool:
            nonlocal results
            inside.now = True  # PyTorch shows this function to a function mode, and calls it once more
            try:
                with unscaling(hooked, scale):
                    scaled = tuple(_scaled(root, seed, scale) for root, seed in zip(roots, seeds))
                    found = original(roots, wanted, scaled, retain, *args, **kwargs)
            finally:
                inside.now = False
            results = tuple(
                g if g is None or id(t) in by_hook else g * (1.0 / scale) for t, g in zip(wanted, found)
            )
            finite = in_vmap or not any(g is not None and bool(_not_finite(g.detach())) for g in results)
            return not any(ranks.largest(not finite)) if ranks else finite

        # What `autograd.grad` returns can't be skipped: so it is finite, if any scale makes it so.
        _until_finite(session, attempt, retain_graph, keeps_graph=not in_vmap)
        return dict(zip(inputs, results)) if isinstance(inputs, dict) else results

    return breaks_graph(grad, inner="DEFAULT")


def _until_finite(session: Session, attempt: _Run, retain: bool | None, *, keeps_graph: bool = True) -> None:
    """Call `attempt(scale, retain_graph)` at smaller and smaller scales until it returns True, or the scale is 1."""
    before, scale = session.scale, session.scale.scale
    while not attempt(scale, True if keeps_graph and scale > 1.0 else retain):
        if scale <= 1.0:
            session.scale = before  # no scale helps: the skipped step is the one observation
            session.journal.note(_NO_SCALE_HELPS)
            return
        scale = session.overflowed(scale)


def _run_until_finite(
    session: Session, overflows: Overflows, leaves: list[Tensor], run: _Run, graph: bool, retain: bool | None
) -> None:
    """Backward whose gradients reach `.grad` only once they are finite, or were computed unscaled."""
    attempts = overflows.attempts = Attempts(overflows, session.scale.scale)
    attempts.reach(leaves)

    def attempt(scale: float, retain: bool | None) -> bool:
        if attempts.found:
            session.observers.backward_again()
        attempts.begin(scale)
        with unscaling(leaves, scale, overflows):
            run(scale, retain)
        return not attempts.overflowed

    try:
        _until_finite(session, attempt, retain)
    finally:
        overflows.attempts = None
        if not graph:
            attempts.write_back()
    if not session.optimizers:
        session.observe(found_inf=attempts.overflowed)


def _inside(session: Session, overflows: Overflows, roots: tuple[Any, ...], run: Callable[[], Any]) -> None:
    """A backward inside a backward, whose seeds are scaled already: parameters are unscaled, other leaves not."""
    owned = overflows.owned()
    leaves = [t for t in leaves_of(roots) if isinstance(t, torch.nn.Parameter) or id(t) in owned]
    # The outer pass may reach a leaf, too (one that a checkpoint and the loss share): its hook divides already.
    leaves = [t for t in leaves if unscaling not in map(type, t._backward_hooks or ())]
    scale = session.scale.scale
    if overflows.attempts is not None:
        overflows.attempts.reach(leaves)
        scale = overflows.attempts.scale
    with unscaling(leaves, scale, overflows):
        run()


class unscaling:  # noqa: N801, a context manager is named like a function
    """Meanwhile gradients of these leaves are divided by the scale, before any other hook."""

    def __init__(self, leaves: Sequence[Tensor], scale: float, overflows: Overflows | None = None) -> None:
        self._leaves, self._scale, self._overflows = leaves, scale, overflows

    @not_traced
    def __enter__(self) -> None:
        inverse = 1.0 / self._scale
        found = FoundInf([leaf.device for leaf in self._leaves], inverse)
        for leaf, slot in zip(self._leaves, found.slots):
            _register_first(leaf, self, _unscale_hook(inverse, found.inverses[leaf.device], slot))
        if self._overflows is not None:
            self._overflows.remember(self._leaves, found)

    def __exit__(self, *exc_info: object) -> None:
        for leaf in self._leaves:
            if leaf._backward_hooks is not None:
                leaf._backward_hooks.pop(self, None)  # type: ignore[call-overload]


@contextmanager
def _suspended(leaves: Iterable[Any]) -> Iterator[None]:
    """Meanwhile the hooks of the pass that runs are not on these leaves."""
    taken: list[tuple[Tensor, object, Callable[..., Any]]] = []
    for leaf in leaves:
        hooks: dict[Any, Any] = (isinstance(leaf, Tensor) and leaf.is_leaf and leaf._backward_hooks) or {}
        ours = [key for key in hooks if type(key) is unscaling]
        taken += [(leaf, key, hooks.pop(key)) for key in ours]
    try:
        yield
    finally:
        for leaf, key, hook in taken:
            _register_first(leaf, key, hook)


def _unscale_hook(
    inverse: float, inverse_on_device: Tensor, slot: Tensor
) -> Callable[[Tensor | None], Tensor | None]:
    def unscale(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # a custom function's backward has returned None for this leaf
            return None
        is_plain = grad.layout is torch.strided and grad.dtype in _CHECKED and type(grad) is Tensor
        if is_plain and not torch.is_grad_enabled():
            true = grad.clone()  # another consumer may hold the same tensor
            torch._amp_foreach_non_finite_check_and_unscale_([true], slot, inverse_on_device)
        else:
            true = grad * inverse  # with create_graph, part of the graph
            slot.logical_or_(_not_finite(true.detach()))
        return true

    return unscale


def _not_finite(grad: Tensor) -> Tensor:
    return numbers_of(grad).isfinite().all().logical_not()


def _register_first(leaf: Tensor, key: object, hook: Callable[..., Any]) -> None:
    """Register a hook that runs before the leaf's other hooks. (`register_hook` puts it last, and is slower.)"""
    hooks: Any = leaf._backward_hooks
    if hooks is None:
        leaf._backward_hooks = hooks = OrderedDict()
    others = list(hooks.items())
    hooks.clear()
    hooks[key] = hook
    hooks.update(others)


def _scaled(root: Any, seed: Any, scale: float) -> Any:
    """The gradient to start from, times S; None where there is none to start from, and PyTorch raises its error."""
    if isinstance(seed, Tensor):
        return seed * scale
    if isinstance(root, GradientEdge):
        raise UsageError(
            "mezzo run: with a loss scale, backward() from a GradientEdge needs its gradient. Pass "
            "grad_tensors=torch.ones(...), or use a policy without a loss scale: mezzo run --precision bf16 ..."
        )
    if isinstance(root, Tensor) and root.requires_grad and root.numel() == 1 and root.is_floating_point():
        return torch.full_like(root, scale, memory_format=torch.preserve_format, requires_grad=False)
    return seed


def _value(roots: tuple[Any, ...], seeds: tuple[Any, ...]) -> Any:
    """The number whose gradient this backward computes: the loss itself where it is one scalar without a seed."""
    if not all(isinstance(root, Tensor) for root in roots):
        return float("nan")
    parts = [r.detach() if s is None else (r.detach() * s.detach()).sum() for r, s in zip(roots, seeds)]
    if not parts or any(part.numel() != 1 for part in parts):
        return float("nan")
    return sum((part.reshape(()) for part in parts[1:]), parts[0].reshape(()).clone())


def _kept(roots: tuple[Any, ...], seeds: tuple[Any, ...]) -> Any:
    """The loss for the end of the run, without a copy; None unless it is one scalar without a seed."""
    is_loss = len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1 and seeds[0] is None
    return roots[0].detach() if is_loss else None


def _as_tuple(value: Any, length: int = 1) -> tuple[Any, ...]:
    if value is None:
        return (None,) * length
    if isinstance(value, (Tensor, GradientEdge)):
        return (value,)
    return tuple(value)


def _tracing() -> bool:
    """Whether tensors have no values here: AOTAutograd derives a compiled graph's backward by `autograd.grad`."""
    stack = _get_current_dispatch_mode_stack()
    return bool(stack) and any(type(mode).__name__ in _TRACERS for mode in stack)
