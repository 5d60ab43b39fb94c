"""One optimizer step over all parameters: unscale, decode, update, encode; or nothing, on overflow.

The optimizer describes each parameter once by a `Row` of dense tensors in one memory order, and sets its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend


@dataclass(slots=True, eq=False)
class Row:
    """The tensors of one parameter."""

    weight: Tensor  # FP32, bf16 or fp16
    grad: Tensor | None  # FP32, bf16 or fp16, in the weight's memory order; None: skip the parameter
    masters: str  # "own" for an FP32 weight, "fp32" for a 16-bit one, or for bf16 "split", "split8", "none"
    master: Tensor | None  # FP32 for "fp32", int16 for "split", int8 for "split8"
    state: str  # one of formulas.state_formats
    states: tuple[Tensor, ...]  # one for each of the rule's states, in that format's dtype
    # bf16, for each state in a format with scales: one per group of 64 elements.
    scales: tuple[Tensor | None, ...]
    step: Tensor  # 0-dim FP32 on the weight's device: how often it was updated; a skipped step doesn't count
    ordinal: int  # the parameter's index in the optimizer, a key of the noise
    offset: int = 0  # of a shard: the index in the whole parameter at which the noise starts
    whole: Tensor | None = None  # of a shard: the parameter, a `DTensor`


def form(masters: str, dtype: torch.dtype) -> str:
    """The name in `formulas` of a weight's storage: ``"bf16"`` or ``"fp16"`` for one with an FP32 master."""
    return masters if masters != "fp32" else "bf16" if dtype is torch.bfloat16 else "fp16"


def address(tensor: Tensor | None) -> int:
    """Of a tensor's memory; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of an optimizer's state."""

    name: str  # its key in the optimizer's state, as in PyTorch's optimizers
    signed: bool  # the first state is, and a second one is not: its codes use the sign bit for range


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter group's settings, as the kernels take them."""

    rule: str  # one of formulas.RULES
    states: tuple[StateSpec, ...]
    numbers: tuple[float, ...]  # seven FP64 numbers, from which the rule's constants are made
    l2: float  # coefficient of an L2 term in the gradient
    maximize: bool


Groups = Sequence[tuple[Hyper, Sequence[Row]]]  # of one optimizer, on one device


class Stepper(Protocol):
    """An implementation of the step, which may cache tables between calls, by the identity of rows."""

    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Update every row that has a gradient, times `multiplier`, in place; or nothing if `found_inf` is not 0."""


def stepper(device_type: str) -> Stepper:
    """A new stepper for rows on that type of device, by `backend.implementation`."""
    made: Stepper = backend.load(__name__, device_type).DeviceStepper()
    return made
