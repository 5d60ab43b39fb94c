"""Mezzo for TensorFlow: the graph rewrite with a loss scale, for TF1-style optimizers and those of Keras 3 and Keras 2.

`import mezzo.tensorflow` alone imports no TensorFlow, nor does `install()`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from mezzo.core.lazy import lazy
from mezzo.runner.patches import ImportWatch, Patches

_PUBLIC = {
    "disable_mixed_precision_graph_rewrite": "mezzo.tensorflow.rewrite",
    "enable_mixed_precision_graph_rewrite": "mezzo.tensorflow.rewrite",
}
__all__ = [*_PUBLIC, "install", "uninstall"]

__getattr__, __dir__ = lazy(
    __name__,
    _PUBLIC,
    {
        "tensorflow": "Install it: pip install tensorflow, or without an NVIDIA GPU pip install tensorflow-cpu."
    },
    {
        "explain": "was removed in version 0.2. TensorFlow writes its graphs before and after the rewrite "
        "into the folder that TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH names (docs/keras.md).",
    },
)

_patches, _imports = Patches(), ImportWatch()


def install() -> None:
    """Put TF1's names back into `tf.train`, for scripts of TensorFlow 1.14 to 2.3; again changes nothing.

    `tf.train` gets the optimizers of `tf.compat.v1.train`, `get_or_create_global_step` and the related functions.
    `tf.train.experimental` gets Mezzo's two calls of the rewrite, and the TF1 loss scales that they take. Existing
    names are not replaced. Then these two lines run under today's TensorFlow, with Mezzo's loss scale::

        opt = tf.train.AdamOptimizer()
        opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
    """
    uninstall()
    _imports.install()
    _imports.when("tensorflow", _add_names)


def uninstall() -> None:
    """Remove the names that `install` added."""
    _imports.remove()
    _patches.undo()


def _add_names(tf: ModuleType) -> None:
    v1, ours = tf.compat.v1, importlib.import_module("mezzo.tensorflow.rewrite")
    optimizers = [name for name in dir(v1.train) if name.endswith("Optimizer")]
    steps = ("get_global_step", "get_or_create_global_step", "create_global_step")
    scales = ("FixedLossScale", "DynamicLossScale", "LossScale")
    for owner, source, names in (
        (tf.train, v1.train, (*optimizers, *steps)),
        (tf.train.experimental, ours, tuple(_PUBLIC)),
        (tf.train.experimental, v1.mixed_precision, scales),
    ):
        for name in names:
            if not hasattr(owner, name):
                _patches.set(owner, name, getattr(source, name))
