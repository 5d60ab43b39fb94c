"""Layers for mixed precision training: `from mezzo.nn import LinearCrossEntropy`.

`LinearCrossEntropy` is a model's head and its loss in one, which never holds the whole logits; `linear_cross_entropy`
is its function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Public name -> the module that has it.
_PUBLIC = {
    "LinearCrossEntropy": "mezzo.pytorch.linear_cross_entropy",
    "linear_cross_entropy": "mezzo.pytorch.linear_cross_entropy",
}

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

if TYPE_CHECKING:
    from mezzo.pytorch.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'mezzo.nn' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
