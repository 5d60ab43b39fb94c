"""TF1's names, back in `tf.train`: so that a script written for TensorFlow 1.14 to 2.3 finds what it calls.

After `install()` these two lines run under today's TensorFlow, with Mezzo's loss scale::

    opt = tf.train.AdamOptimizer()
    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)

A name that `tf.train` has is never replaced. Nothing is imported: if TensorFlow isn't yet, the names come with it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from mezzo.runner.patches import ImportWatch, Patches

_REWRITE = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
_LOSS_SCALES = ("FixedLossScale", "DynamicLossScale", "LossScale")
_STEPS = ("get_global_step", "get_or_create_global_step", "create_global_step")

_patches = Patches()
_watch: ImportWatch | None = None


def install() -> None:
    """Put TF1's optimizers and the calls of its graph rewrite into `tf.train`, now or when TensorFlow is imported.

    Again is as once. `tf.train` gets the optimizers of `tf.compat.v1.train` and `get_or_create_global_step` with its
    like; `tf.train.experimental` the two calls of the rewrite, Mezzo's, and TF1's loss scales, which they take.
    """
    global _watch
    if _watch is None:
        _watch = ImportWatch()
        _watch.install()
        _watch.when("tensorflow", _put)


def uninstall() -> None:
    """Take the names away again."""
    global _watch
    if _watch is not None:
        _watch.remove()
        _watch = None
    _patches.undo()


def _put(tf: ModuleType) -> None:
    v1 = tf.compat.v1
    optimizers = [name for name in dir(v1.train) if name.endswith("Optimizer")]
    _absent(tf.train, v1.train, (*optimizers, *_STEPS))
    _absent(tf.train.experimental, importlib.import_module("mezzo.tensorflow.rewrite"), _REWRITE)
    _absent(tf.train.experimental, v1.mixed_precision, _LOSS_SCALES)


def _absent(owner: Any, source: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(owner, name):
            _patches.set(owner, name, getattr(source, name))
