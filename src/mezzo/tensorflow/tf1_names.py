"""TF1's names, back in `tf.train`, so that a script written for TensorFlow 1.14 to 2.3 finds what it calls.

After `install()` these two lines run under today's TensorFlow, with Mezzo's loss scale::

    opt = tf.train.AdamOptimizer()
    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)

Names that `tf.train` has are not replaced. TensorFlow is not imported: the names are added when the script imports it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from mezzo.runner.patches import ImportWatch, Patches

_STEPS = ("get_global_step", "get_or_create_global_step", "create_global_step")

_patches = Patches()
_imports: ImportWatch | None = None


def install() -> None:
    """Put TF1's optimizers and the calls of its graph rewrite into `tf.train`; calling it again changes nothing.

    `tf.train` gets the optimizers of `tf.compat.v1.train` and `get_or_create_global_step` with its like;
    `tf.train.experimental` Mezzo's two calls of the rewrite, and the TF1 loss scales that they take.
    """
    global _imports
    if _imports is None:
        _imports = ImportWatch()
        _imports.install()
        _imports.when("tensorflow", _add_names)


def uninstall() -> None:
    """Take the names away again."""
    global _imports
    if _imports is not None:
        _imports.remove()
        _imports = None
    _patches.undo()


def _add_names(tf: ModuleType) -> None:
    v1, ours = tf.compat.v1, importlib.import_module("mezzo.tensorflow.rewrite")
    optimizers = [name for name in dir(v1.train) if name.endswith("Optimizer")]
    rewrite = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
    scales = ("FixedLossScale", "DynamicLossScale", "LossScale")
    for owner, source, names in (
        (tf.train, v1.train, (*optimizers, *_STEPS)),
        (tf.train.experimental, ours, rewrite),
        (tf.train.experimental, v1.mixed_precision, scales),
    ):
        for name in names:
            if not hasattr(owner, name):
                _patches.set(owner, name, getattr(source, name))
