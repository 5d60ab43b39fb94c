"""Backward into one optimizer's parameters and no others'.

A discriminator's loss reaches the generator too, and a plain `loss.backward()` leaves gradients there which
the generator's next step then adds to its own. `torch.autograd.backward(inputs=...)` computes only what leads
to the parameters that are named, so that nothing is left elsewhere, and parts of the graph that lead nowhere
cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.step import parameters

_run_backward = torch.autograd.Variable._execution_engine.run_backward
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

# Its backward runs a backward of its own, and refuses to when only some inputs are asked for.
_REENTRANT = "CheckpointFunctionBackward"


def backward_into(
    loss: Tensor, seed: Tensor | None, params: list[Tensor], *, retain_graph: bool = False
) -> None:
    """Accumulate d(loss)/d(p) * seed into `p.grad` of each p of `params`, and of no other leaf.

    Args:
        loss: one element.
        seed: the gradient of the loss, of its dtype and shape; None for 1.
        params: leaves that require gradients; those that the loss does not depend on keep what they have.
        retain_graph: keep the graph for another backward.
    """
    if (
        type(loss) is not Tensor
        or torch.compiler.is_compiling()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        torch.autograd.backward(loss, seed, retain_graph=retain_graph, inputs=params)
        return
    # What torch.autograd.backward does in Python before it comes here costs a tiny model 20 microseconds a step.
    if seed is None:
        seed = torch.ones_like(loss)
    _run_backward(
        (loss,), (seed,), retain_graph, False, tuple(params), allow_unreachable=True, accumulate_grad=True
    )


def backward_around(
    loss: Tensor, seed: Tensor | None, others: Iterable[Tensor], *, retain_graph: bool = False
) -> None:
    """The same for a graph with reentrant checkpoints: a whole backward, after which `others` have what they
    had.

    It computes every gradient there is. Leaves that are not among `others` get theirs.
    """
    before = [(other, other.grad) for other in others]
    for other, _ in before:
        other.grad = None
    try:
        torch.autograd.backward(loss, seed, retain_graph=retain_graph)
    finally:
        for other, grad in before:
            other.grad = grad


def has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether the graph of a loss holds a `torch.utils.checkpoint` with `use_reentrant=True`. Walks every
    node.
    """
    seen = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.name() == _REENTRANT:
            return True
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
    return False


def leaves_of(roots: Iterable[Any]) -> list[Tensor]:
    """Every leaf tensor that a backward from these tensors or edges reaches, once each."""
    leaves: list[Tensor] = []
    stack: list[Any] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            stack.append(root.node)
        elif isinstance(root, Tensor) and root.requires_grad:
            stack.append(torch.autograd.graph.get_gradient_edge(root).node)
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node) is _AccumulateGrad:
            leaves.append(node.variable)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves


class OptimizerBackward:
    """Accumulates a loss's gradients into the parameters of one optimizer.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._reentrant: bool | None = None

    def params(self) -> list[Tensor]:
        """The parameters that get gradients.

        Raises:
            UsageError: none.
        """
        params = [p for p in parameters(self._optimizer) if p.requires_grad]
        if not params:
            raise UsageError("step(): no parameter of the optimizer requires a gradient")
        return params

    def __call__(
        self, loss: Tensor, seed: Tensor | None, others: Iterable[Tensor], *, retain_graph: bool
    ) -> None:
        """Add d(loss)/d(p) * seed to `p.grad` of each parameter.

        Args:
            loss: one element.
            seed: of its dtype and shape; None for 1.
            others: parameters of other optimizers, which a reentrant checkpoint would reach too.
            retain_graph: keep the graph for another backward.
        """
        params = self.params()
        if self._reentrant is None:  # the first loss decides for all
            self._reentrant = has_reentrant_checkpoint(loss)
        if self._reentrant:
            backward_around(loss, seed, others, retain_graph=retain_graph)
        else:
            backward_into(loss, seed, params, retain_graph=retain_graph)
