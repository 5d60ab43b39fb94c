"""Optimizers for mixed precision: `from mezzo.optim import AdamW`.

`AdamW`, `Adam` and `SGD` update FP32, bf16 and fp16 weights in one fused pass; ``masters=`` and ``state=`` choose the
formats of FP32 masters and moments. `Muon` does so for the matrices of hidden layers, which `muon_groups` finds.
`with_masters` adds FP32 masters to any other optimizer, `adopt` replaces a `torch.optim` optimizer in place, and
`lower_weights` stores a model's weights in 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.core.lazy import lazy

# Public name -> the module that has it.
_PUBLIC = {
    "Adam": "mezzo.pytorch.optim.optimizers",
    "AdamW": "mezzo.pytorch.optim.optimizers",
    "FusedOptimizer": "mezzo.pytorch.optim.fused",
    "Muon": "mezzo.pytorch.optim.muon",
    "SGD": "mezzo.pytorch.optim.optimizers",
    "adopt": "mezzo.pytorch.optim.adopt",
    "lower_weights": "mezzo.pytorch.weights.stored_parameters",
    "muon_groups": "mezzo.pytorch.optim.muon",
    "with_masters": "mezzo.pytorch.optim.with_masters",
}

# Name -> what to use instead.
_REMOVED = {
    "bytes_per_parameter": "was removed in version 0.2: docs/memory.md has the bytes of every mode",
    "Lion": "was removed in version 0.2: use mezzo.optim.AdamW, or with_masters(...) around another library's Lion",
}
__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from mezzo.pytorch.optim.adopt import adopt as adopt
    from mezzo.pytorch.optim.fused import FusedOptimizer as FusedOptimizer
    from mezzo.pytorch.optim.muon import Muon as Muon
    from mezzo.pytorch.optim.muon import muon_groups as muon_groups
    from mezzo.pytorch.optim.optimizers import SGD as SGD
    from mezzo.pytorch.optim.optimizers import Adam as Adam
    from mezzo.pytorch.optim.optimizers import AdamW as AdamW
    from mezzo.pytorch.optim.with_masters import with_masters as with_masters
    from mezzo.pytorch.weights.stored_parameters import lower_weights as lower_weights

__getattr__, __dir__ = lazy("mezzo.optim", _PUBLIC, removed=_REMOVED)
