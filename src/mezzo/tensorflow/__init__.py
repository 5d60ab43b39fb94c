"""Mezzo for TensorFlow: the graph rewrite with a loss scale, for TF1-style optimizers and those of Keras 3 and Keras 2.

Each public name is fetched when it is first asked for: `import mezzo.tensorflow` alone imports no TensorFlow.
"""

from __future__ import annotations

from mezzo.core.lazy import lazy

_PUBLIC = {
    "disable_mixed_precision_graph_rewrite": "mezzo.tensorflow.rewrite",
    "enable_mixed_precision_graph_rewrite": "mezzo.tensorflow.rewrite",
    "install": "mezzo.tensorflow.tf1_names",
    "uninstall": "mezzo.tensorflow.tf1_names",
}
__all__ = list(_PUBLIC)

__getattr__, __dir__ = lazy(
    __name__,
    _PUBLIC,
    {
        "tensorflow": "Install it with pip install 'mezzo[tensorflow]'; on a CPU, pip install tensorflow-cpu.",
    },
    {
        "explain": "was removed in version 0.2. TensorFlow writes its graphs before and after the rewrite "
        "into the folder that TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH names (docs/tensorflow.md).",
    },
)
