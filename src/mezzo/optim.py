"""Optimizers for mixed precision: `from mezzo.optim import AdamW`.

`AdamW`, `Adam` and `SGD` update FP32, bf16 and fp16 weights in one fused pass; ``masters=`` and ``state=`` choose the
formats of FP32 masters and moments. `Muon` does so for the matrices of hidden layers, which `muon_groups` finds.
`with_masters` adds FP32 masters to any other optimizer, `adopt` replaces a `torch.optim` optimizer in place, and
`lower_weights` stores a model's weights in 16 bits.
"""

import torch  # noqa: F401, first: then `mezzo run` imports whole modules of Mezzo

from mezzo.core.lazy import lazy
from mezzo.pytorch.optim.adopt import adopt
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.muon import Muon, muon_groups
from mezzo.pytorch.optim.optimizers import SGD, Adam, AdamW
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.stored_parameters import lower_weights

__all__ = ["SGD", "Adam", "AdamW", "FusedOptimizer", "Muon"]
__all__ += ["adopt", "lower_weights", "muon_groups", "with_masters"]

# Name -> what to use instead.
_REMOVED = {
    "bytes_per_parameter": "was removed in version 0.2: docs/memory.md has the bytes of every mode",
    "Lion": "was removed in version 0.2: use mezzo.optim.AdamW, or with_masters(...) around another library's Lion",
}

# For errors, with the name that was meant.
__getattr__, __dir__ = lazy("mezzo.optim", dict.fromkeys(__all__, ""), removed=_REMOVED)
