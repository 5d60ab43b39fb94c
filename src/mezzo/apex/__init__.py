"""NVIDIA Apex's `amp`, which Apex removed in 2025, for scripts that still use it: `from mezzo.apex import amp`.

`optimizers`, `parallel` and `normalization` have what such scripts import besides: PyTorch's classes with Apex's
arguments. With `mezzo run --apex SCRIPT` a script's own `from apex import amp` imports these modules.
"""

from __future__ import annotations

from mezzo.core.lazy import lazy

__all__ = ["amp", "normalization", "optimizers", "parallel"]

__getattr__, __dir__ = lazy("mezzo.apex", {name: f"mezzo.apex.{name}" for name in __all__})
