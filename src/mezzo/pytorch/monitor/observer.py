"""StepObserver: the base class of observers of training steps, under `MixedPrecision` and under `mezzo run`."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.overflow import OverflowReport
from mezzo.core.records import Record

Scale: TypeAlias = Tensor | float


class StepObserver:
    """Observes training steps, whose calls come in the order of the methods, and must not change what they compute."""

    finding: OverflowReport | None = None
    """Why the update that ended last was skipped; None where it was not, or is not known."""

    def __init__(self) -> None:
        self._records: list[Record] = []  # for `drain`

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model that trains is about to run forward, outside of any other call and of backward; perhaps wrapped."""

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """That call has returned; `output` is on the graph."""

    def backward_begins(self, loss: Tensor, scale: Scale) -> None:
        """Backward is about to run from an unscaled loss; gradients in its graph will be `scale` times too large."""

    def update_begins(self, optimizer: Optimizer, scale: Scale) -> None:
        """An optimizer's step begins: `.grad` is complete, and `scale` times too large."""

    def update_ended(
        self, optimizer: Optimizer, *, index: int, number: int, skipped: Tensor | bool, loss_scale: Scale
    ) -> None:
        """The step is over, or was `skipped` (a tensor where only the device knows); `number` is the optimizer's."""

    def step_dropped(self) -> None:
        """Backward raised: the step will not end."""

    def drain(self) -> list[Record]:
        """The records since the last call, in order. May wait for the device."""
        found, self._records = self._records, []
        return found
