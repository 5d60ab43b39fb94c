"""StepObserver: the base class of observers of training steps, under `MixedPrecision` and under `mezzo run`.

The calls of one step, in order::

    call_begins(model, args, kwargs)      each call of a watched model that trains; its context has been entered
    call_ended(model, output)
    backward_begins(loss, scale)          each loss; gradients inside the graph will be `scale` times too large
    update_begins(optimizer, scale)       `.grad` is as backward left it: `scale` times too large
    update_ended(...)                     the optimizer has stepped, or was skipped; gradients not yet cleared

An observer must not change what the step computes: no gradient, no buffer, no random number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.overflow import OverflowReport
from mezzo.core.records import Record


class StepObserver:
    """Observes training steps; this one does nothing."""

    finding: OverflowReport | None = None
    """Why the update that ended last was skipped; None where it was not, or is not known."""

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model that trains is about to run forward, with gradients, outside of any other call and of backward.

        `model` is as the loop calls it: perhaps a wrapper of `torch.compile` or of data parallelism.
        """

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """That call has returned; `output` is on the graph."""

    def backward_begins(self, loss: Tensor, scale: Tensor | float) -> None:
        """Backward is about to run from a loss, which is not scaled.

        The seed is multiplied by `scale`, 0-dim FP32 or a number: loss scale over `accumulate`.
        """

    def update_begins(self, optimizer: Optimizer, scale: Tensor | float) -> None:
        """An optimizer's step begins: `.grad` of its parameters is complete, and `scale` times too large."""

    def update_ended(
        self,
        optimizer: Optimizer,
        *,
        index: int,
        number: int,
        skipped: Tensor | bool,
        loss_scale: Tensor | float,
    ) -> None:
        """The step of the user's optimizer is over.

        Args:
            index, number: of the update in the run, and of the optimizer, as in `UpdateRecord`.
            skipped: whether it was skipped; a tensor where only the device knows.
            loss_scale: that the step used; 1.0 without one.
        """

    def step_dropped(self) -> None:
        """Backward raised: the step will not end."""

    def drain(self) -> list[Record]:
        """The records since the last call, in order. May wait for the device."""
        return []
