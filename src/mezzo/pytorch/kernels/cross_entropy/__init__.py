"""Cross entropy on 16-bit logits: computed in FP32 without an FP32 copy, with a 16-bit gradient (`loss`)."""

from __future__ import annotations

from mezzo.pytorch.kernels.cross_entropy.loss import cross_entropy_loss
from mezzo.pytorch.kernels.cross_entropy.rows import rows_gradient, rows_loss

__all__ = ["cross_entropy_loss", "rows_gradient", "rows_loss"]
