"""Mezzo for TensorFlow: the graph rewrite with a loss scale, TF1-style optimizers, Keras 2, and what was painted why.

Each public name is fetched when it is first asked for: `import mezzo.tensorflow` alone imports no TensorFlow.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mezzo.core.lazy import lazy

# Public name -> its module.
_PUBLIC = {
    "enable_mixed_precision_graph_rewrite": "mezzo.tensorflow.rewrite",
    "disable_mixed_precision_graph_rewrite": "mezzo.tensorflow.rewrite",
    "install": "mezzo.tensorflow.install",
    "uninstall": "mezzo.tensorflow.install",
    "explain": "mezzo.tensorflow.explain",
}

__all__ = [
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "explain",
    "install",
    "uninstall",
]


__getattr__, __dir__ = lazy(
    __name__,
    _PUBLIC,
    {
        "tensorflow": "Install it with pip install 'mezzo[tensorflow]'; on a CPU, pip install tensorflow-cpu.",
    },
)


class _Package(ModuleType):
    """A package whose functions are not hidden by the modules that they come from: `import` binds those by name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
