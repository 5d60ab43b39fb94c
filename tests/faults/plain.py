"""What is true of a fault, found out without a tracer: hooks on every module, and one look at each tensor.

It is slow and knows modules only, not operations. It says which rows are true, and no tracer may be asked that.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from faults.models import Loop
from faults.runs import Compute, plainly
from mezzo.core.overflow import OUTSIDE


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a nest of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif is_dataclass(value):
        yield from tensors_of(vars(value))
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)


def finite(tensors: Any) -> bool:
    return all(bool(t.detach().isfinite().all()) for t in tensors_of(tensors))


@dataclass
class Look:
    """What one loss's forward and backward looked like, module by module."""

    inputs_finite: bool = True
    bad_state: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    outputs_finite: bool = True
    loss_finite: bool = True
    arriving_finite: bool = True

    def says(self) -> tuple[str, str, str]:
        """Module, direction, and `state`, `input` or `made`."""
        if not self.inputs_finite:
            return "", "forward", "input"
        if self.bad_state:
            return self.bad_state[0], "forward", "state"
        if self.outputs_finite and not self.loss_finite:
            return OUTSIDE, "forward", "made"
        if not self.outputs_finite:
            return self.forward[0] if self.forward else "?", "forward", "made"
        if not self.arriving_finite:
            return OUTSIDE, "backward", "made"
        return self.backward[0] if self.backward else "?", "backward", "made"


class Looks:
    """Looks at the calls of models while a loss is computed, and at the gradients while its backward runs.

    Args:
        models: whose modules are looked at.
    """

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self.models = models
        self.looks: list[tuple[str, Look]] = []

    def __call__(self, part: str, mp: Any, compute: Compute) -> Tensor:
        look = Look()
        self.looks.append((part, look))
        model = self.models[part]
        handles = []
        for path, module in model.named_modules():
            look.bad_state += [
                path
                for value in (*module._parameters.values(), *module._buffers.values())
                if value is not None and not finite(value)
            ]
            handles += [
                module.register_forward_pre_hook(self._begins(look, path), with_kwargs=True),
                module.register_forward_hook(self._ended(look, path), with_kwargs=True),
            ]
        # A state that is carried from call to call changes in forward: what was there before is what counts.
        look.bad_state = list(look.bad_state)
        with mp.autocast():
            loss = compute()
        look.loss_finite = finite(loss)
        if not any(
            True for m in model.modules() if hasattr(m, "how") and m.how
        ):  # checkpoints run forward again
            for handle in handles:
                handle.remove()
        return loss

    def _begins(self, look: Look, path: str) -> Any:
        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            if path == "":
                look.inputs_finite &= finite([args, kwargs])

        return begins

    def _ended(self, look: Look, path: str) -> Any:
        def ended(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                if finite([args, kwargs]) and not finite(output):
                    look.forward.append(path)
                if path == "":
                    look.outputs_finite &= finite(output)
            state = {"bad": False}

            def leaving(gradient: Tensor) -> None:
                state["bad"] |= not finite(gradient)
                if path == "":
                    look.arriving_finite &= finite(gradient)

            def entering(gradient: Tensor) -> None:
                if not finite(gradient) and not state["bad"] and path not in look.backward:
                    look.backward.append(path)

            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(leaving)
            taken = [*tensors_of([args, kwargs]), *module._parameters.values()]
            for tensor in taken:
                if (
                    tensor is not None
                    and tensor.requires_grad
                    and not any(tensor is o for o in tensors_of(output))
                ):
                    tensor.register_hook(entering)

        return ended


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The parameters that a backward of this loss reaches: other models' too."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


class AtScaleOne:
    """Computes each loss twice: once for a backward without a loss scale, that has to be finite, then as it is.

    Attributes:
        finite: for each loss, whether it and its gradients are.
    """

    def __init__(self) -> None:
        self.finite: list[bool] = []

    def __call__(self, part: str, mp: Any, compute: Callable[[], Tensor]) -> Tensor:
        buffers = [(held, held.clone()) for held in mp.model.buffers()]
        carried = [(m, m.state) for m in mp.model.modules() if isinstance(m, Loop) and m.carried]
        random = torch.get_rng_state(), python_random.getstate(), np.random.get_state()
        own_generators = [
            (held, held.get_state())
            for module in mp.model.modules()
            for held in vars(module).values()
            if isinstance(held, torch.Generator)
        ]
        with mp.autocast():
            loss = compute()
        own = [p for group in mp.optimizer.param_groups for p in group["params"]]
        params = list({id(p): p for p in (*own, *_leaves(loss))}.values())
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        loss.backward()
        self.finite.append(
            bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in own if p.grad is not None)
        )
        for p, grad in zip(params, before):
            p.grad = grad
        torch.set_rng_state(random[0])
        python_random.setstate(random[1])
        np.random.set_state(random[2])
        for generator, drawn in own_generators:
            generator.set_state(drawn)
        with torch.no_grad():
            for held, value in buffers:
                held.copy_(value)
        for module, state in carried:
            module.state = state
        return plainly(part, mp, compute)
