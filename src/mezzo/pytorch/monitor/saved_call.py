"""KeptCall: what one call of a model in a training step needs to be run again, kept until the step's end.

Arguments are kept by reference, with the versions of their tensors: one that was written since can't be used again. Of
the gradients, only those at the call's outputs are kept: from there backward is run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.pytorch.monitor.again import RandomState, changeable, copied, devices_of, put_back, same
from mezzo.pytorch.monitor.operations import Line, finite, mapped, tensors
from mezzo.pytorch.unseen import unseen


@dataclass
class Sent:
    """The gradients of one output of a call, in order: each finite, with how many times it is too large."""

    parts: list[tuple[Tensor, float]] = field(default_factory=list)

    def total(self, like: Tensor, scale: float | None = None) -> Tensor | None:
        """The sum as backward makes it, in the format and shape of `like`; None where it can't be made.

        Args:
            like: the gradient that came.
            scale: how many times too large, none of the parts being otherwise; None: the loss scale taken out.
        """
        if not self.parts or any(scale not in (None, own) for _, own in self.parts):
            return None
        whole: Tensor | None = None
        for part, own in self.parts:
            one = part if scale is not None or own == 1.0 else part.double() / own
            if one.shape != like.shape:
                return None
            one = one.to(like.dtype)
            whole = one if whole is None else whole + one
        return whole


OF_CALL = "mezzo_call"
"""Key in the metadata of a node of the graph from which on towards the leaves it belongs to a call."""


class _Graph:
    """Lives as long as the graph on which it is held by hooks."""


class KeptCall:
    """One call.

    Args:
        model: as the loop calls it.
        inner: what is under the wrappers of compilation and data parallelism.
        args, kwargs: of the call.
        enter: makes the region in which it is run again.
        line: from where it was called.
        copies: whether arguments are copied, where they are known to be written.
        random: what random numbers come next.
        number: its place among all calls that are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        enter: Callable[[], AbstractContextManager[Any]],
        line: Line | None,
        copies: bool,
        random: RandomState,
        number: int,
    ) -> None:
        self.model, self.inner, self.enter, self.line, self.number = model, inner, enter, line, number
        self.sources = [
            weakref.ref(tensor) for tensor in tensors((args, kwargs)) if tensor.grad_fn is not None
        ]
        # A graph that led here must not live longer for it: its tensors are held without.
        held = mapped((args, kwargs), _held)
        self._given = list(tensors(held, objects=True))
        self.copies = copies
        self._arguments = mapped(held, _copy) if copies else held
        self._versions = [_version(leaf) for leaf in self._given]
        self.random = random
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.attributes: list[tuple[nn.Module, str, Any, Any]] = []
        self.outputs: list[int] = []
        self._returned: list[weakref.ref[Tensor]] = []
        self.sent: dict[
            int, dict[int, Sent]
        ] = {}  # the same: what operations outside sent, where they were seen
        self.grads: dict[
            int, dict[int, Tensor]
        ] = {}  # backward -> place among the outputs -> its gradient there
        self.told: set[int] = set()  # ids of the tracers in whose backward a gradient arrived
        self.done = False
        self.retained = False  # whether another backward may come through it
        self._graph: weakref.ref[_Graph] | None = None

    def ended(self, output: Any, backward: Any) -> bool:
        """Watch the gradients of what was returned. False where nothing of it is on the graph.

        Args:
            output: what the call returned.
            backward: tells the number of the backward that is running, and whose it is.
        """
        graph = _Graph()
        for place, tensor in enumerate(tensors(output)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                self._returned.append(weakref.ref(tensor))
                self.outputs.append(place)
                metadata: Any = tensor.grad_fn.metadata
                metadata[OF_CALL] = self.number
                metadata[OF_CALL, tensor.output_nr] = place
                tensor.register_hook(_Keeper(weakref.ref(self), place, backward, graph))
        self._graph = weakref.ref(graph)
        return bool(self.outputs)

    @property
    def graph_alive(self) -> bool:
        """Whether a backward may still come to it."""
        return self._graph is not None and self._graph() is not None

    @property
    def written(self) -> bool:
        """Whether an argument has been written in place since."""
        return any(_version(leaf) != version for leaf, version in zip(self._given, self._versions))

    def spoilt(self, later: KeptCall) -> bool:
        """Whether a later call was given what this one returned, detached perhaps, and it isn't finite."""
        mine = {_storage(tensor) for one in self._returned if (tensor := one()) is not None} - {0}
        return any(_storage(tensor) in mine and not finite(tensor) for tensor in later._given)

    def put_back(self) -> None:
        """Let random numbers and what the call changes of its model be as they were when it began."""
        self.random.put_back()
        with torch.no_grad(), unseen(buffer for buffer, _ in self.buffers):
            for buffer, copy in self.buffers:
                buffer.copy_(copy)
        for module, name, was, copy in self.attributes:
            put_back(module, name, was, copy)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, off the graph, for one more call."""
        # The call itself may be what writes them: a copy serves more than once.
        kept = mapped(self._arguments, _copy) if self.copies else self._arguments
        args, kwargs = mapped(kept, _off_graph)
        return args, kwargs

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps: gradients, random state, buffers; arguments, whether the script keeps them or not."""
        held = list(tensors(self._arguments))
        held += [grad for grads in self.grads.values() for grad in grads.values()]
        held += [copy for _, copy in self.buffers]
        known = {tensor.data_ptr() for tensor in held if tensor.layout is torch.strided}
        of_uses = [
            part for sent in self.sent.values() for one in sent.values() for part, _ in one.parts
        ]  # of one use it is the output's own
        held += [part for part in of_uses if part.data_ptr() not in known]
        return sum(tensor.nbytes for tensor in held) + self.random.nbytes


class _Keeper:
    """The hook on an output: keeps its gradient for as long as the call is kept."""

    def __init__(self, call: weakref.ref[KeptCall], place: int, backward: Any, graph: _Graph) -> None:
        self._call, self._place, self._backward, self._graph = call, place, backward, graph

    def __call__(self, grad: Tensor | None) -> None:
        call = self._call()
        if call is None or grad is None:  # None: the node runs, and no gradient came to this output
            return
        number, owner = self._backward()
        grads = call.grads.setdefault(number, {})
        grads[self._place] = grad.detach()
        call.retained = torch._C._autograd._get_current_graph_task_keep_graph()
        if owner is not None:
            call.told.add(owner)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _held(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _off_graph(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Habits:
    """Of one model.

    A normalisation's running statistics are left out: in training nothing is computed from them, and else they rest.

    Args:
        model: not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._buffers = [
            buffer
            for module in self._modules
            if not isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
        ]
        self._attributes: list[tuple[nn.Module, str]] = []
        self._devices = devices_of(model)
        self._draws_in_python = False
        self._calls = 0
        self.writes_arguments = False

    def random(self) -> RandomState:
        """What random numbers come next, of the generators that calls draw from."""
        return RandomState.now(self._devices, pythons=self._draws_in_python or self._calls == 0)

    def before(self, call: KeptCall) -> None:
        """Keep with a call what it may change."""
        call.buffers = [(buffer, buffer.detach().clone()) for buffer in self._buffers]
        if self._calls == 0:
            self._attributes = [(module, name) for module in self._modules for name, _ in changeable(module)]
        for module, name in self._attributes:
            if name in module.__dict__:
                value: Any = module.__dict__[name]
                call.attributes.append((module, name, value, copied(value)))
        self._versions = [buffer._version for buffer in self._buffers]

    def after(self, call: KeptCall) -> None:
        """Learn from what it did change."""
        self.writes_arguments |= call.written
        if self._calls == 0:
            self._draws_in_python = call.random.pythons_moved()
        if self._calls == 0:
            moved = [b for b, version in zip(self._buffers, self._versions) if b._version != version]
            self._buffers = moved
            call.buffers = [
                (buffer, copy) for buffer, copy in call.buffers if any(buffer is m for m in moved)
            ]
            before = {(id(module), name): (was, copy) for module, name, was, copy in call.attributes}
            self._attributes = [
                (module, name)
                for module in self._modules
                for name, value in changeable(module)
                if not same(*before.get((id(module), name), (None, None)), value)
            ]
            changed = {(id(module), name) for module, name in self._attributes}
            call.attributes = [one for one in call.attributes if (id(one[0]), one[1]) in changed]
        self._calls += 1
