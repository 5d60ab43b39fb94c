"""Layers for mixed precision training: `from mezzo.nn import LinearCrossEntropy`.

`LinearCrossEntropy` is a model's last linear layer together with its cross entropy; it never stores all logits.
`linear_cross_entropy` is the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.core.lazy import lazy

# Public name -> the module that has it.
_PUBLIC = {
    "LinearCrossEntropy": "mezzo.pytorch.linear_cross_entropy",
    "linear_cross_entropy": "mezzo.pytorch.linear_cross_entropy",
}
__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from mezzo.pytorch.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from mezzo.pytorch.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy

__getattr__, __dir__ = lazy("mezzo.nn", _PUBLIC)
