"""Muon's step: the kernels average the gradients, PyTorch orthogonalizes the average, the kernels update the weights.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Parameters come one after another, so
that one FP32 matrix exists at a time besides the iteration's own. Rows of other rules are stepped together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, stepper

ADJUSTMENTS = ("original", "match_rms_adamw")
"""How the learning rate follows a matrix's shape; see `MuonHyper.rate`."""


@dataclass(frozen=True, slots=True)
class MuonHyper(Hyper):
    """One group's settings: `Hyper`'s are those of the rule ``average``."""

    lr: float
    decay: float  # by which a weight is multiplied first
    adjustment: str  # one of ADJUSTMENTS
    iteration: tuple[tuple[float, float, float], int, float]  # as `orthogonalized` takes it

    def rate(self, rows: int, columns: int) -> float:
        """The learning rate of a matrix; ``match_rms_adamw`` is Liu et al., "Muon is Scalable", arXiv 2502.16982."""
        if self.adjustment == "original":
            return self.lr * math.sqrt(max(1.0, rows / columns))
        return self.lr * (0.2 * math.sqrt(max(rows, columns)))


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> Tensor:
    """About ``U @ V.T`` of a matrix ``U @ S @ V.T``, as bf16: a few steps of Newton and Schulz's iteration in bf16.

    Naive code, for a matrix [rows, columns] that is not taller than wide (else it is transposed before and after)::

        x = matrix.bfloat16() / matrix.norm().clamp(min=eps)    # no singular value is above 1
        for _ in range(iterations):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x

    With `torch.optim.Muon`'s coefficients the singular values end between about 0.7 and 1.2, those near 0 below. The
    operations and their order are those of `torch.optim.Muon`, so the bits are too.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.bfloat16)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(iterations):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonStepper:
    """The step of `MuonHyper`'s rows and of others; see `Stepper`."""

    def __init__(self, device_type: str) -> None:
        self._others, self._first, self._last = (stepper(device_type) for _ in range(3))
        # By ordinal, because the inner steppers cache tables by the identity of rows.
        self._parts: dict[int, tuple[Row, Row, Row]] = {}

    @torch.no_grad()
    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Update every row that has a gradient; see `Stepper`."""
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf.item() != 0:
            return  # on other devices the kernels skip, and the iteration's result is not used
        others = [(hyper, rows) for hyper, rows in groups if not isinstance(hyper, MuonHyper)]
        self._others(others, multiplier=multiplier, found_inf=found_inf, overflow=overflow)
        for hyper, rows in groups:
            if not isinstance(hyper, MuonHyper):
                continue
            for row in rows:
                if row.grad is None:
                    continue
                first, last = self._parts_of(row)
                first.weight = torch.empty_like(row.weight, dtype=torch.float32)
                first.grad, last.weight = row.grad, row.weight
                self._first([(hyper, [first])], multiplier=multiplier, found_inf=found_inf, overflow=None)
                update = orthogonalized(first.weight, *hyper.iteration)
                last.grad = torch.empty_like(row.weight, dtype=torch.bfloat16).copy_(update)
                numbers = (-hyper.rate(*row.weight.shape), 0.0, 0.0, 0.0, hyper.decay, 0.0, 0.0)
                plain = Hyper("plain", (), numbers, 0.0, False)
                self._last([(plain, [last])], multiplier=None, found_inf=found_inf, overflow=overflow)
                first.weight, first.grad, last.grad = row.weight, None, None

    def _parts_of(self, row: Row) -> tuple[Row, Row]:
        """A row with the state, whose weight will be the average, and one with the master, without a state."""
        known = self._parts.get(row.ordinal)
        if known is None or known[0] is not row:
            first = replace(row, masters="own", master=None, step=row.step.clone())
            last = replace(row, state="fp32", states=(), scales=())
            known = self._parts[row.ordinal] = row, first, last
        return known[1], known[2]
