"""SavedCall: what one call of a model in a training step needs to be replayed, kept until the step's end.

Arguments are kept by reference, with the versions of their tensors: one that was written since can't be used again. Of
the gradients, only those at the call's outputs are kept: from there backward is replayed. What else a call changes of
its model is learned (`SideEffects`): all is copied before the first call, and from then on what that one changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.pytorch.monitor.again import RandomState, changeable, copied, devices_of, put_back, same
from mezzo.pytorch.monitor.operations import Line, finite, mapped, over, tensors, version_of
from mezzo.pytorch.unseen import unseen
from mezzo.pytorch.wrappers import unwrapped

OF_CALL = "mezzo_call"
"""Key in the metadata of a node of the graph from which on towards the leaves it belongs to a call."""

Uses = list[tuple[Tensor, float]]
"""The gradients of one output, one for each use of it: each finite, with how many times it is too large."""


def summed(uses: Uses, like: Tensor, scale: float | None = None) -> Tensor | None:
    """The sum as backward makes it, in the format and shape of `like`; None where it can't be made.

    Args:
        uses: in order.
        like: the gradient that came.
        scale: how many times too large, none of the parts being otherwise; None: the loss scale taken out.
    """
    whole: Tensor | None = None
    for part, own in uses:
        if scale not in (None, own) or part.shape != like.shape:
            return None
        one = part.to(like.dtype) if scale is not None or own == 1.0 else over(part, own, like.dtype)
        whole = one if whole is None else whole + one
    return whole


class SideEffects:
    """What the calls of one model were seen to change besides its parameters.

    A normalisation's running statistics are left out: in training nothing is computed from them, and else they rest.

    Args:
        model: not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        plain = (module for module in self._modules if not isinstance(module, _NormBase))
        self._buffers = [buffer for module in plain for buffer in module.buffers(recurse=False)]
        self._attributes = {(module, name) for module in self._modules for name, _ in changeable(module)}
        self._devices = devices_of(model)
        self._draws_in_python = self._first = True
        self.writes_arguments = False

    def before(self, call: SavedCall) -> None:
        """Keep with a call what it may change, and what random numbers come next."""
        call.random = RandomState.now(self._devices, pythons=self._draws_in_python)
        call.buffers = [(buffer, buffer.detach().clone()) for buffer in self._buffers]
        held = [(module, name, module.__dict__.get(name)) for module, name in self._attributes]
        call.attributes = [
            (module, name, value, copied(value)) for module, name, value in held if name in module.__dict__
        ]
        self._versions = [buffer._version for buffer in self._buffers]

    def after(self, call: SavedCall) -> None:
        """Learn from what it did change."""
        self.writes_arguments |= call.written
        if not self._first:
            return
        self._first = False
        self._draws_in_python = call.random.pythons_moved()
        moved = [pair for pair, version in zip(call.buffers, self._versions) if pair[0]._version != version]
        self._buffers, call.buffers = [buffer for buffer, _ in moved], moved
        before = {(module, name): (was, copy) for module, name, was, copy in call.attributes}
        self._attributes = {
            (module, name)
            for module in self._modules
            for name, value in changeable(module)
            if not same(*before.get((module, name), (None, None)), value)
        }
        call.attributes = [one for one in call.attributes if one[:2] in self._attributes]


class _Graph:
    """Lives as long as the graph on which it is held by hooks."""


class SavedCall:
    """One call.

    Args:
        model: as the loop calls it.
        args, kwargs: of the call.
        effects: of the model under the wrappers of compilation and data parallelism.
        enter: makes the region in which it is replayed.
        line: from where it was called.
        number: its place among all calls that are kept.

    Attributes:
        told: ids of the tracers in whose backward a gradient arrived.
        grads: backward -> place among the outputs -> its gradient there.
        uses: the same: what operations outside sent, where they were seen.
        retained: whether another backward may come through it.
    """

    random: RandomState
    buffers: list[tuple[Tensor, Tensor]]
    attributes: list[tuple[nn.Module, str, Any, Any]]

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        effects: SideEffects,
        enter: Callable[[], AbstractContextManager[Any]],
        line: Line | None,
        number: int,
    ) -> None:
        self.model, self.inner, self.enter, self.line, self.number = (
            model, unwrapped(model), enter, line, number,
        )  # fmt: skip
        self.sources = [
            weakref.ref(tensor) for tensor in tensors((args, kwargs)) if tensor.grad_fn is not None
        ]
        # A graph that led here must not live longer for it: its tensors are held without.
        held = mapped((args, kwargs), _held)
        self._given = list(tensors(held, objects=True))
        self.copies = effects.writes_arguments
        self._arguments = mapped(held, _copy) if self.copies else held
        self._versions = [version_of(leaf) for leaf in self._given]
        self._returned: list[weakref.ref[Tensor]] = []
        self.uses: dict[int, dict[int, Uses]] = {}
        self.grads: dict[int, dict[int, Tensor]] = {}
        self.told: set[int] = set()
        self.done = self.retained = False
        self._graph: weakref.ref[_Graph] | None = None
        effects.before(self)

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
                metadata: Any = tensor.grad_fn.metadata
                metadata[OF_CALL] = self.number
                metadata[OF_CALL, tensor.output_nr] = place
                tensor.register_hook(_Keeper(weakref.ref(self), place, backward, graph))
        self._graph = weakref.ref(graph)
        return bool(self._returned)

    @property
    def graph_alive(self) -> bool:
        """Whether a backward may still come to it."""
        return self._graph is not None and self._graph() is not None

    @property
    def written(self) -> bool:
        """Whether an argument has been written in place since."""
        return any(version_of(leaf) != version for leaf, version in zip(self._given, self._versions))

    def spoilt(self, later: SavedCall) -> bool:
        """Whether a later call was given what this one returned, detached perhaps, and it isn't finite."""
        mine = {_storage(tensor) for one in self._returned if (tensor := one()) is not None} - {0}
        return any(_storage(tensor) in mine and not finite(tensor) for tensor in later._given)

    def put_back(self) -> None:
        """Let random numbers and what the call changes of its model be as they were when it began."""
        self.random.put_back()
        with torch.no_grad(), unseen(buffer for buffer, _ in self.buffers):
            for buffer, copy in self.buffers:
                buffer.copy_(copy)
        for attribute in self.attributes:
            put_back(*attribute)

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
        # Of one use it is the output's own.
        parts = [part for of in self.uses.values() for uses in of.values() for part, _ in uses]
        held += [part for part in parts if part.data_ptr() not in known]
        return sum(tensor.nbytes for tensor in held) + self.random.nbytes


class _Keeper:
    """The hook on an output: keeps its gradient for as long as the call is kept."""

    def __init__(self, call: weakref.ref[SavedCall], place: int, backward: Any, graph: _Graph) -> None:
        self._call, self._place, self._backward, self._graph = call, place, backward, graph

    def __call__(self, grad: Tensor | None) -> None:
        call = self._call()
        if call is None or grad is None:  # None: the node runs, and no gradient came to this output
            return
        number, owner = self._backward()
        call.grads.setdefault(number, {})[self._place] = grad.detach()
        call.retained = torch._C._autograd._get_current_graph_task_keep_graph()
        if owner is not None:
            call.told.add(owner)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _held(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _off_graph(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)
