"""What a loss over classes was asked for: checked once, and handed through as one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.core.errors import UsageError, unknown_name

REDUCTIONS = ("mean", "none", "sum")


@dataclass(frozen=True)
class Options:
    """The options of `torch.nn.functional.cross_entropy`, but for the class weights, which are a tensor.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target with this index neither counts nor gets a gradient.
        label_smoothing: from 0 to 1: how much of each target is spread evenly over all classes.

    Raises:
        UnknownNameError: another reduction.
        UsageError: a label smoothing outside [0, 1].
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", str(self.reduction), REDUCTIONS, where="linear_cross_entropy: ")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(
                f"linear_cross_entropy: label_smoothing={self.label_smoothing}. It is a share: give 0 to 1."
            )


def check_shapes(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> None:
    """Raise a UsageError that says which of the shapes or dtypes does not go with the others."""
    where = "linear_cross_entropy: "
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"{where}input {list(input.shape)} and weight {list(weight.shape)}. Give input [..., in] and weight "
            "[classes, in], as for F.linear."
        )
    classes = weight.shape[0]
    for name, tensor in (("bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tuple(tensor.shape) != (classes,):
            raise UsageError(f"{where}{name} {list(tensor.shape)}. Give [{classes}], one number a class.")
    rows = input.shape[:-1]
    if target.is_floating_point():
        if target.shape != (*rows, classes):
            raise UsageError(
                f"{where}target {list(target.shape)} of {target.dtype}. Probabilities of the classes have the shape "
                f"{[*rows, classes]}; class indices are integers."
            )
    elif target.dtype is torch.bool or target.is_complex():
        raise UsageError(
            f"{where}target of {target.dtype}. Give class indices (int64), or their probabilities (FP32)."
        )
    elif target.shape != rows:
        raise UsageError(
            f"{where}target {list(target.shape)} with input {list(input.shape)}. Give one index a row: "
            f"{list(rows)}."
        )
