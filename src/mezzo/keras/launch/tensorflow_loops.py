"""How TensorFlow's own loops tell of their losses and updates, eager and in a `tf.function`."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from mezzo.keras.launch.loops import Loops
    from mezzo.scripts.patches import Patches


class TensorFlowLoops:
    """Remembers the target of each gradient, and looks at the optimizers' counts after a `tf.function`."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._compiled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._kept: Any = None  # variable: the last loss of a tf.function, and whether there was one

    def install(self, patches: Patches) -> None:
        """From now on."""
        from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

        patches.set(tf.GradientTape, "gradient", self._make_gradient(tf.GradientTape.gradient))
        patches.set(Function, "__call__", self._make_call(Function.__call__))

    def compiling(self, optimizer: Any) -> bool:
        """Whether a `tf.function` is being traced: then this was no step, and its calls will be looked at."""
        if tf.executing_eagerly():
            return False
        self._compiled.setdefault(optimizer, -1)
        return True

    def told(self, loss: Any) -> None:
        """A loss was scaled: nothing to do until its gradients are taken."""

    def _make_gradient(self, original: Any) -> Any:
        @functools.wraps(original)
        def gradient(tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._loops.session.inside:
                self._keep(self._loops.unscaled(target))
            return original(tape, target, *args, **kwargs)

        return gradient

    def _keep(self, loss: Any) -> None:
        if not tf.is_tensor(loss):
            return
        if tf.executing_eagerly():
            self._loops.loss = loss
            return
        if self._kept is None:
            with tf.init_scope():
                self._kept = tf.Variable([0.0, 0.0], trainable=False, dtype=tf.float32)
        self._kept.assign(tf.stack([tf.reduce_mean(tf.cast(loss, tf.float32)), 1.0]))

    def _make_call(self, original: Any) -> Any:
        @functools.wraps(original)
        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._loops.session.inside or not tf.executing_eagerly():
                return original(function, *args, **kwargs)
            made = original(function, *args, **kwargs)
            for optimizer in list(self._compiled):
                self._look(optimizer)
            return made

        return called

    def _look(self, optimizer: Any) -> None:
        """Record a step if the optimizer made one."""
        made = int(optimizer.iterations)
        skips = getattr(optimizer, "skipped_steps", None)
        count = made + (0 if skips is None else int(skips))
        before, self._compiled[optimizer] = self._compiled[optimizer], count
        if count <= max(before, 0):
            return
        if count - max(before, 0) > 1 and before >= 0:
            self._loops.session.journal.note(
                "a tf.function makes several updates in a call: they count as one step, whose loss is the last"
            )
        if self._kept is not None:
            loss, there = self._kept.numpy()
            if there:
                self._loops.loss = float(loss)
                self._kept.assign([0.0, 0.0])
        self._loops.applied(optimizer)
