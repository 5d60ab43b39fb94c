"""Replay: a saved call of a model, and running it again, with its backward, without side effects."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from mezzo.pytorch.module_paths import unwrapped
from mezzo.pytorch.monitor.operations import Line
from mezzo.pytorch.nested import mapped, tensors
from mezzo.pytorch.snapshot import RandomState, has_running_statistics, keeping_versions, version_of
from mezzo.runner.patches import Patches

_VALUES = (int, float, bool, type(None), Tensor)
_CONTAINERS = (list, dict, set, deque)
_GENERATORS: tuple[Any, ...] = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _changeable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of what a call may change; nothing of `nn.Module`'s own, and no private containers."""
    for name, value in module.__dict__.items():
        if isinstance(value, _VALUES) and not isinstance(value, nn.Parameter):
            if name != "training":
                yield name, value
        elif (type(value) in _CONTAINERS and not name.startswith("_")) or isinstance(value, _GENERATORS):
            yield name, value


def _copied(value: Any) -> Any:
    """A container with the same items, a generator in the same state; any other value itself."""
    if isinstance(value, _GENERATORS):
        return copy.deepcopy(value)
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _same(kept: Any, now: Any) -> bool:
    """Whether an attribute surely holds what it held: containers and generators are copied each time."""
    if isinstance(now, Tensor):
        return isinstance(kept, Tensor) and kept.data_ptr() == now.data_ptr()
    return isinstance(now, _VALUES) and bool(kept == now)


class SideEffects:
    """What a call of a model may change besides its parameters; after `learn`, what one call was seen to change.

    Keeps no module alive.
    """

    def __init__(self, model: nn.Module, *, statistics: bool = False) -> None:
        self.root = weakref.ref(model)  # whose paths and policy name the modules
        modules = list(model.modules())
        counted = (module for module in modules if statistics or not has_running_statistics(module))
        self.buffers = [buffer for module in counted for buffer in module.buffers(recurse=False)]
        names = ((weakref.ref(module), name) for module in modules for name, _ in _changeable(module))
        self.attributes = set(names)
        self.devices = devices_of(model)
        self.pythons = True
        self._learnt = False

    def learn(self, model: nn.Module, before: ModuleState) -> None:
        """Keep from now on only what the first call has changed, and of its own state too."""
        if self._learnt:
            return
        self._learnt = True
        self.pythons = before.random.pythons_moved()
        before.buffers = [kept for kept in before.buffers if version_of(kept[0]) != kept[2]]
        self.buffers = [buffer for buffer, _, _ in before.buffers]
        known = {(module, name): kept for module, name, kept in before.attributes}
        changed = {
            (module, name)
            for module in model.modules()
            for name, value in _changeable(module)
            if not _same(known.get((module, name)), value)
        }
        self.attributes = {(weakref.ref(module), name) for module, name in changed}
        before.attributes = [one for one in before.attributes if one[:2] in changed]


class ModuleState:
    """Random numbers, and what a call may change of its model, as they are now."""

    def __init__(self, effects: SideEffects) -> None:
        self.random = RandomState.now(effects.devices, pythons=effects.pythons)
        self.buffers = [(one, one.detach().clone(), version_of(one)) for one in effects.buffers]
        self.attributes = [
            (module, name, _copied(module.__dict__[name]))
            for kept, name in effects.attributes
            if (module := kept()) is not None and name in module.__dict__
        ]

    def put_back(self) -> None:
        """Random numbers and buffers as they were, and copies of the attributes, whose originals stay as they are."""
        self.random.put_back()
        with torch.no_grad(), keeping_versions(buffer for buffer, _, _ in self.buffers):
            for buffer, kept, _ in self.buffers:
                buffer.copy_(kept)
        for module, name, kept in self.attributes:
            module.__dict__[name] = _copied(kept)


def devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """The accelerators that a model's parameters and buffers are on."""
    found = {tensor.device for group in (model.parameters(), model.buffers()) for tensor in group}
    return tuple(sorted((d for d in found if d.type in ("cuda", "xpu", "mps")), key=str))


_now = threading.local()


def running_again() -> bool:
    """Whether this thread is replaying a call: observers of training steps must ignore it."""
    return bool(getattr(_now, "again", False))


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """Run a model inside, compiled parts eagerly; random numbers, buffers and attributes of modules are put back."""
    state = ModuleState(SideEffects(model, statistics=True))
    modules = [(module, dict(module._buffers), dict(module.__dict__)) for module in model.modules()]
    leaves = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    patches = Patches()
    before = running_again()
    try:
        _now.again = True
        for leaf, _ in leaves:
            leaf._backward_hooks = None
        state.put_back()  # from here on the model works on copies
        with keeping_versions(model.buffers()):
            try:
                # Of PyTorch's own class: an open context puts a subclass in its place, which calls it.
                classes = torch_checkpoint.CheckpointFunction.__mro__
                genuine = next(one for one in classes if one.__module__ == torch_checkpoint.__name__)
                patches.set(genuine, "apply", staticmethod(lambda run, preserve, *args: run(*args)))
                with eager():
                    yield
            finally:
                patches.undo()
                for module, buffers, attributes in modules:
                    module._buffers.update(buffers)
                    for name in module.__dict__.keys() - attributes.keys():
                        del module.__dict__[name]
                state.put_back()
                for module, _, attributes in modules:
                    module.__dict__.update(attributes)
    finally:
        _now.again = before
        for leaf, hooks in leaves:
            leaf._backward_hooks = hooks


def within_compiled() -> bool:
    """Whether a compiled function is being run, in a part of it that is not compiled."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


def eager() -> AbstractContextManager[Any]:
    """Compiled functions run as they were written."""
    applies = "torch._dynamo" in sys.modules and not within_compiled()
    return torch.compiler.set_stance("force_eager") if applies else nullcontext()


OF_CALL = "mezzo_call"
"""Key in the metadata of a node of the graph from which on towards the leaves it belongs to a saved call."""


class SavedCall:
    """One call of a model from a line, kept until the step's end. `enter` makes the context in which it is replayed."""

    backward = 0  # number of the backward that runs, counted over all tracers
    _numbers = itertools.count(1)

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        effects: SideEffects,
        enter: Callable[[], AbstractContextManager[Any]],
        line: Line | None,
    ) -> None:
        self.model, self.inner = model, unwrapped(model)
        self.root = effects.root() or self.inner
        self.enter, self.line, self.number = enter, line, next(SavedCall._numbers)
        given = (args, kwargs)
        self.sources = [weakref.ref(tensor) for tensor in tensors(given) if tensor.grad_fn is not None]
        # Detached, so that a graph that led here does not live longer for it.
        self._arguments = mapped(given, lambda t: t if t.grad_fn is None else _off_graph(t))
        self._versions = [(leaf, version_of(leaf)) for leaf in tensors(self._arguments, objects=True)]
        self._keepers: list[weakref.ref[Any]] = []
        # Number of a backward -> place among the outputs -> gradient.
        self.grads: dict[int, dict[int, Tensor]] = {}
        self.retained = self.done = False  # another backward may come through it; none comes
        self.state = ModuleState(effects)

    def ended(self, output: Any) -> bool:
        """Watch the gradients of what was returned. False where nothing of it is on the graph."""
        for place, tensor in enumerate(tensors(output)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                keeper = self._keeper(place)
                self._keepers.append(weakref.ref(keeper))
                metadata: Any = tensor.grad_fn.metadata
                metadata[OF_CALL] = self.number
                tensor.register_hook(keeper)
        return bool(self._keepers)

    def _keeper(self, place: int) -> Callable[[Tensor | None], None]:
        """A hook that keeps an output's gradient for as long as the call is kept."""
        kept = weakref.ref(self)

        def keep(grad: Tensor | None) -> None:
            call = kept()
            # No gradient: the node runs, and none came to this output.
            # `is_grads_batched`: a batch of gradients, which PyTorch can't detach.
            batched = grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)
            if call is not None and grad is not None and not batched:
                call.grads.setdefault(SavedCall.backward, {})[place] = grad.detach()
                call.retained = torch._C._autograd._get_current_graph_task_keep_graph()

        return keep

    @property
    def graph_alive(self) -> bool:
        """Whether a backward may still come to it: the graph holds its hooks."""
        return any(keeper() is not None for keeper in self._keepers)

    @property
    def written(self) -> bool:
        """Whether an argument has been written in place since."""
        return any(version_of(leaf) != version for leaf, version in self._versions)

    @contextmanager
    def again(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Run the model inside as in this call, with these arguments, and find everything as before afterwards."""
        with nothing_left(self.inner), torch.enable_grad():
            self.state.put_back()
            yield mapped(self._arguments, _off_graph)

    def gradients(self, number: int, outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of the outputs of a replay, those to which a gradient came in a backward, each with that gradient."""
        came = [(outputs[place], grad) for place, grad in self.grads[number].items() if place < len(outputs)]
        return [(output, grad) for output, grad in came if output.requires_grad]

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps: gradients, random state, buffers; arguments, whether the script keeps them or not."""
        held = [*tensors(self._arguments), *(kept for _, kept, _ in self.state.buffers)]
        held += [grad for grads in self.grads.values() for grad in grads.values()]
        return sum(tensor.nbytes for tensor in held) + self.state.random.nbytes


def _off_graph(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)
