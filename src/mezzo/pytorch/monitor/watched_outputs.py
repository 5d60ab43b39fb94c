"""WatchedOutputs: what a model's modules return in a step, and the gradients that come back to it, counted in place.

Hooks are on the modules for that step alone. Three calls of a module are told apart: one within a call of the model
that trains, which counts; one that repeats it in backward (activation checkpointing), whose output was counted already,
but in a reentrant checkpoint has the only gradient; and any other, which is none of the step's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as _graph_task  # -1 outside a backward pass

from mezzo.pytorch.monitor.exponent_rows import ExponentRows
from mezzo.pytorch.monitor.module_paths import Paths, joined
from mezzo.pytorch.monitor.operations import tensors, version_of

ACTIVATION, GRADIENT = "activation", "activation gradient"


class WatchedOutputs:
    """Counts the outputs of modules and their gradients, from `begin` to `end`.

    Args:
        kinds: which of the two are wanted.
        distinct: count a tensor that several modules return, one within the other, for the first alone.
    """

    def __init__(self, kinds: Collection[str], *, distinct: bool = False) -> None:
        self._kinds, self._distinct = kinds, distinct
        self._counted: dict[int, tuple[ref[Tensor], int]] = {}  # id of a tensor -> it, and its version then
        self.rows = ExponentRows()
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self._calling: ref[nn.Module] | None = None  # the model whose call is running
        self._root: str | None = None  # the path that its own output counts for
        self._backward = 0  # number of the backward pass that is being counted; 0: none is
        self._passes = 0

    @property
    def wanted(self) -> bool:
        """Whether there is anything for it to count."""
        return ACTIVATION in self._kinds or GRADIENT in self._kinds

    def call_begins(self, model: nn.Module, paths: Paths, prefix: str = "") -> None:
        """A model's call that counts begins; no backward is running. Paths in rows begin with the prefix."""
        self._calling, self._backward = ref(model), 0
        self._root = prefix if paths.seen.get("") is model else None
        for path, module in paths.seen.items():
            if id(module) not in self._hooked and module is not model:
                self._hooked.add(id(module))
                self._handles.append(module.register_forward_hook(self._hook(joined(prefix, path))))

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """A call has ended, perhaps one that was not told of before."""
        if self._calling is not None and self._calling() is model and self._root is not None:
            self._count(self._root, output)
        self._calling = None

    def backward_begins(self) -> None:
        """A backward pass begins whose gradients count."""
        self._calling = None
        self._passes += 1
        self._backward = self._passes

    def backward_ended(self) -> None:
        """It is over."""
        self._backward = 0

    def end(self) -> ExponentRows:
        """Take all hooks away; what was counted."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._counted.clear()
        self._calling, self._backward = None, 0
        rows, self.rows = self.rows, ExponentRows()
        return rows

    def _hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if self._counts() or (self._backward and _graph_task() != -1):
                self._count(path, output)

        return hook

    def _counts(self) -> bool:
        """Whether a call is part of one that trains. One that raised has no end, and evaluation may follow it."""
        model = None if self._calling is None else self._calling()
        return model is not None and model.training and _graph_task() == -1

    def _count(self, path: str, output: Any) -> None:
        repeats = _graph_task() != -1
        for tensor in {id(tensor): tensor for tensor in tensors(output)}.values():
            # A parameter is nothing that was computed; and to detach one makes a region forget its casts.
            if isinstance(tensor, nn.Parameter) or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if self._distinct and not self._first_seen(tensor):
                continue
            if ACTIVATION in self._kinds and not repeats:
                self.rows.add(path, ACTIVATION, tensor)
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            if GRADIENT in self._kinds and tensor.requires_grad and not wrapped:
                self._handles.append(tensor.register_hook(self._gradient_hook(path)))

    def _first_seen(self, tensor: Tensor) -> bool:
        """Whether no module has returned this tensor yet, as it is now."""
        known = self._counted.get(id(tensor))
        version = version_of(tensor)
        self._counted[id(tensor)] = ref(tensor), version
        return known is None or known[0]() is not tensor or known[1] != version

    def _gradient_hook(self, path: str) -> Any:
        counted = 0

        def hook(gradient: Tensor | None) -> None:
            nonlocal counted
            # Once a backward pass of ours: gradient release may run one graph twice, and a penalty's own
            # torch.autograd.grad is no backward of the loss.
            if gradient is not None and self._backward and counted != self._backward:
                counted = self._backward
                self.rows.add(path, GRADIENT, gradient)

        return hook
