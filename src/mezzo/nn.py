"""Layers for mixed precision training: `from mezzo.nn import LinearCrossEntropy`.

`LinearCrossEntropy` is a model's last linear layer together with its cross entropy; it never stores all logits.
`linear_cross_entropy` is the function.
"""

import torch  # noqa: F401, first: then `mezzo run` imports whole modules of Mezzo

from mezzo.core.lazy import lazy
from mezzo.pytorch.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

__getattr__, __dir__ = lazy("mezzo.nn", dict.fromkeys(__all__, ""))  # for errors, with the name meant
