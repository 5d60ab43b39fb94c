"""Mezzo for Keras 3, on its TensorFlow, JAX and PyTorch backends.

Each public name is fetched when it is first asked for: `import mezzo.keras` alone imports no Keras, whose backend is
settled by its own first import.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> its module.
_PUBLIC = {
    "LossScaleOptimizer": "mezzo.keras.loss_scale_optimizer",
    "PolicyWarning": "mezzo.keras.plan_check",
    "PrecisionMonitor": "mezzo.keras.monitor",
    "SixteenBitOutputWarning": "mezzo.keras.outputs",
    "check_outputs": "mezzo.keras.outputs",
    "layer_policies": "mezzo.keras.policy_table",
    "set_policy": "mezzo.keras.policy",
}

__all__ = [
    "LossScaleOptimizer",
    "PolicyWarning",
    "PrecisionMonitor",
    "SixteenBitOutputWarning",
    "check_outputs",
    "layer_policies",
    "set_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mezzo.keras' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
