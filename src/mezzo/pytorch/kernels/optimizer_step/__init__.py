"""One whole optimizer step over all parameters: unscale, decode, update, encode; or nothing, on overflow.

The optimizer describes each parameter once, by a `Row` of tensors, and sets its gradient before a step. All
tensors of a row are dense and have one order of elements in memory; everything happens element by element in
that order. What happens to an element is in `formulas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mezzo.core.masters import MASTERS, STATE_FORMATS
from mezzo.pytorch.kernels import backend

__all__ = [
    "MASTERS",
    "STATE_FORMATS",
    "Groups",
    "Hyper",
    "Row",
    "StateSpec",
    "Stepper",
    "form",
    "stepper",
]


@dataclass(slots=True, eq=False)
class Row:
    """One parameter, for as long as its tensors are the same ones.

    Args:
        weight: FP32, bf16 or fp16; what the model computes with.
        grad: FP32, bf16 or fp16, in the weight's memory order; None: the parameter does not move.
        masters: ``"own"`` for an FP32 weight, ``"fp32"`` for a 16-bit one, or for bf16 ``"split"``, ``"split8"``,
            ``"none"``.
        master: FP32 for ``"fp32"``, int16 for ``"split"``, int8 for ``"split8"``, else None.
        state: one of `STATE_FORMATS`.
        states: one tensor for each of the rule's states, in their order: FP32, bf16, or uint8 codes.
        scales: with each state its bf16 scales for ``"int8"``, one for each group of 64 elements, else None.
        step: 0-dim FP32 on the weight's device: how often it moved. A step adds 1, a skipped one nothing.
        ordinal: the parameter's index in the optimizer; it keys the noise.
    """

    weight: Tensor
    grad: Tensor | None
    masters: str
    master: Tensor | None
    state: str
    states: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]
    step: Tensor
    ordinal: int


def form(masters: str, dtype: torch.dtype) -> str:
    """How a weight and its master are stored, as `formulas` calls it: ``"bf16"`` or ``"fp16"`` with an FP32 master."""
    return masters if masters != "fp32" else "bf16" if dtype is torch.bfloat16 else "fp16"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of an optimizer's state.

    Args:
        name: its key in the optimizer's state, as PyTorch's own optimizers call it.
        signed: False for a second moment, which is never negative and needs the range instead of the sign.
    """

    name: str
    signed: bool


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter group's settings, as the kernels take them.

    Args:
        rule: one of `formulas.RULES`.
        states: the states that a parameter has.
        numbers: seven numbers in FP64, of which the rule's constants are made.
        l2: coefficient of an L2 term in the gradient.
        maximize: go up the gradient.
    """

    rule: str
    states: tuple[StateSpec, ...]
    numbers: tuple[float, ...]
    l2: float
    maximize: bool


Groups = Sequence[tuple[Hyper, Sequence[Row]]]  # of one call: one optimizer's, on one device


class Stepper(Protocol):
    """An implementation of the step, which may keep tables between calls, by the identity of rows."""

    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Move every row that has a gradient, in place.

        Args:
            groups: settings with their rows.
            multiplier: 0-dim FP32 on the rows' device, by which every gradient is multiplied first; None: 1.
            found_inf: 0-dim FP32 likewise; where it is not 0, nothing is changed at all.
            overflow: 0-dim FP32 likewise, set to 1 when a 16-bit weight is written as an infinity; it is
                never set to 0.
        """


def stepper(device_type: str) -> Stepper:
    """A new stepper for rows on that type of device, by `backend.implementation`."""
    made: Stepper = backend.load(__name__, device_type).DeviceStepper()
    return made
