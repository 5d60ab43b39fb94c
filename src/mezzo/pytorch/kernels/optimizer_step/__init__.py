"""One whole optimizer step over all parameters: unscale, decode, update, encode; or nothing, on overflow.

The optimizer describes each parameter once, by a `Row` of tensors, and sets its gradient before a step. All
tensors of a row are dense and have one order of elements in memory; everything happens element by element in
that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper, LionHyper, SgdHyper

__all__ = ["MASTERS", "Groups", "Hyper", "Row", "Stepper", "stepper"]

MASTERS = ("own", "fp32", "split", "split8", "none")
"""Where a master is: the FP32 weight itself, an FP32 tensor, a remainder of 16 or 8 bits, nowhere."""


@dataclass(slots=True, eq=False)
class Row:
    """One parameter, for as long as its tensors are the same ones.

    Args:
        weight: FP32, bf16 or fp16; what the model computes with.
        grad: FP32, bf16 or fp16, in the weight's memory order; None: the parameter does not move.
        masters: one of `MASTERS`. ``"own"`` needs an FP32 weight, ``"fp32"`` a 16-bit one, the others bf16.
        master: FP32 for ``"fp32"``, int16 for ``"split"``, int8 for ``"split8"``, else None.
        state: one of `storage.FORMATS`.
        states: one tensor for each of the rule's states, in their order: FP32, bf16, or uint8 codes.
        scales: beside each state its bf16 scales for ``"int8"``, one a group of 64 elements, else None.
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


Hyper = AdamHyper | SgdHyper | LionHyper
Groups = Sequence[tuple[Hyper, Sequence[Row]]]  # of one call: one class of settings, one device


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
