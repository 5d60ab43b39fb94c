"""The reference, until it is compiled."""

from __future__ import annotations

from mezzo.pytorch.kernels.cross_entropy.reference import rows_gradient, rows_loss

__all__ = ["rows_gradient", "rows_loss"]
