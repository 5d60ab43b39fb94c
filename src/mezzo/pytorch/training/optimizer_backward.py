"""Backward of a loss into one optimizer's parameters, whatever its graph holds.

Where gradients are to be released, the optimizer's step is part of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.scaling import gradients
from mezzo.pytorch.training.backward import backward_around, backward_into, has_reentrant_checkpoint


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
        params = [p for p in gradients.parameters(self._optimizer) if p.requires_grad]
        if not params:
            raise UsageError("step(): no parameter of the optimizer requires a gradient")
        return params

    def is_reentrant(self, loss: Tensor) -> bool:
        """Whether the graph holds a reentrant checkpoint; the first loss decides for all."""
        if self._reentrant is None:
            self._reentrant = has_reentrant_checkpoint(loss)
        return self._reentrant

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
        if self.is_reentrant(loss):
            backward_around(loss, seed, others, retain_graph=retain_graph)
        else:
            backward_into(loss, seed, params, retain_graph=retain_graph)
