"""What `amp` keeps between calls: options, loss scalers, and the handle of O1. Scripts read it as `amp._amp_state`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mezzo.apex.options import Options
from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, Observation, StaticLossScale, checked_scale

if TYPE_CHECKING:
    from mezzo.apex.casts import Handle


class LossScaler:
    """The scale of one loss, in Apex's names, which scripts read and write; `mezzo.core.loss_scale` moves it."""

    def __init__(self, loss_scale: float | str, lowest: float | None, highest: float) -> None:
        self.dynamic = isinstance(loss_scale, str)
        self.found_inf = False  # since the last update
        self._unskipped = 0
        self._pure: DynamicLossScale | StaticLossScale
        if isinstance(loss_scale, str):
            ceiling = checked_scale("amp.initialize: max_loss_scale", highest)
            first = min(ceiling, DynamicLossScale.init)
            floor = min(DynamicLossScale.floor, first) if lowest is None else lowest
            if not 0 < floor <= first:
                raise UsageError(
                    f"amp.initialize: min_loss_scale is {lowest!r}. Use one from 2**-126 to {first:g}."
                )
            self._pure = DynamicLossScale(init=first, floor=floor, ceiling=ceiling)
        else:
            self._pure = StaticLossScale(loss_scale)
        self._loss_scale = self._pure.scale

    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self._loss_scale

    def update(self) -> None:
        """The scale after a backward pass: doubled after 2,000 good ones in a row, halved after an overflow."""
        found_inf, self.found_inf = self.found_inf, False
        if isinstance(self._pure, DynamicLossScale):
            scale = self._pure.allowed(self._loss_scale)
            now = replace(self._pure, scale=scale, good_steps=self._unskipped).next(Observation(found_inf))
            self._pure, self._loss_scale, self._unskipped = now, now.scale, now.good_steps
        else:
            self._pure = replace(self._pure, scale=self._loss_scale).next(Observation(found_inf))
            self._unskipped = 0 if found_inf else self._unskipped + 1


@dataclass
class AmpState:
    """The state of `amp` in this process."""

    opt_properties: Options | None = None  # None before `initialize`
    loss_scalers: list[LossScaler] = field(default_factory=list)
    handle: Handle | None = None
    verbosity: int = 1
    allow_incoming_model_not_fp32: bool = False

    def tell(self, message: str) -> None:
        """Print a message on the first rank, unless verbosity is 0."""
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.verbosity > 0 and not (together and torch.distributed.get_rank()):
            print(f"amp: {message}")


state = AmpState()
