"""One variable, one optimizer with a loss scale, and steps that overflow when told to: each family, each way to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from mezzo.core.loss_scale import LossScale
from mezzo.tensorflow.keras2 import LegacyLossScaleOptimizer, LossScaleOptimizer
from mezzo.tensorflow.keras3 import GraphRewriteOptimizer
from mezzo.tensorflow.v1_optimizer import LossScaleOptimizer as V1Optimizer

v1 = tf.compat.v1

PLAIN: dict[str, Callable[[], Any]] = {
    "v1": lambda: v1.train.MomentumOptimizer(0.125, 0.5),
    "keras3": lambda: keras.optimizers.SGD(0.125, 0.5),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.125, 0.5, jit_compile=False),
    "legacy": lambda: tf_keras.optimizers.legacy.SGD(0.125, 0.5),
}
FAMILIES: dict[str, Callable[[LossScale], Any]] = {
    "v1": lambda scale: V1Optimizer(PLAIN["v1"](), scale),
    "keras3": lambda scale: GraphRewriteOptimizer(PLAIN["keras3"](), loss_scale=scale),
    "tf_keras": lambda scale: LossScaleOptimizer(PLAIN["tf_keras"](), scale),
    "legacy": lambda scale: LegacyLossScaleOptimizer(PLAIN["legacy"](), scale),
}

UNSCALING = [family for family in FAMILIES if family != "keras3"]  # Keras 3 unscales in apply


class Eager:
    """Steps one after the other; `weights` and `slot` are read as arrays."""

    def __init__(self, family: str, pure: LossScale, compiled: bool = False) -> None:
        self.optimizer = FAMILIES[family](pure)
        kind = keras.Variable if family == "keras3" else tf.Variable
        self.variable = kind([1.0, 2.0], name="weight")
        self.step = tf.function(self._step) if compiled else self._step

    def _step(self, factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(tf.reduce_sum(tf.convert_to_tensor(self.variable) * factor))
        variable = getattr(self.variable, "value", self.variable)
        gradients = tape.gradient(loss, [variable if not callable(variable) else self.variable])
        if hasattr(self.optimizer, "get_unscaled_gradients"):
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(list(zip(gradients, [self.variable])))

    def __call__(self, bad: bool) -> None:
        self.step(tf.constant([1.0, np.inf if bad else 1.0]))

    def machine(self) -> Any:
        return self.optimizer.machine()

    def everything(self) -> list[Any]:
        """The weight and all that the inner optimizer keeps."""
        inner = self.optimizer.inner_optimizer.variables
        inner = inner() if callable(inner) else inner
        return [tf.convert_to_tensor(variable).numpy() for variable in [self.variable, *inner]]


class InSession:
    def __init__(self, family: str, pure: LossScale) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.factor = v1.placeholder(tf.float32, [2])
            self.variable = v1.get_variable("weight", initializer=[1.0, 2.0])
            self.optimizer = FAMILIES[family](pure)
            loss = tf.reduce_sum(self.variable * self.factor)
            self.global_step = v1.train.get_or_create_global_step()
            if family == "v1":
                self.op = self.optimizer.minimize(loss, global_step=self.global_step)
            else:
                gradients = self.optimizer.get_gradients(loss, [self.variable])
                self.op = self.optimizer.apply_gradients(list(zip(gradients, [self.variable])))
            self.held = self.optimizer._scaled.here()
            self.session = v1.Session(graph=self.graph)
            self.session.run(v1.global_variables_initializer())

    def __call__(self, bad: bool) -> None:
        self.session.run(self.op, {self.factor: [1.0, np.inf if bad else 1.0]})

    def machine(self) -> Any:
        from mezzo.core.loss_scale import ScaleArrays, on_host

        read = self.session.run([self.held.scale, self.held.good_steps, self.held.overflows, self.held.stuck])
        return on_host(self.optimizer._scaled.pure, ScaleArrays(*read))

    def everything(self) -> list[Any]:
        inner = self.optimizer.inner_optimizer.variables()
        return list(self.session.run([self.variable, self.global_step, *inner]))


WAYS: dict[str, Callable[[LossScale], Any]] = {
    **{f"{family} eagerly": partial(Eager, family) for family in FAMILIES},
    **{f"{family} in a function": partial(Eager, family, compiled=True) for family in FAMILIES},
    **{f"{family} in a Session": partial(InSession, family) for family in ("v1", "legacy")},
}
