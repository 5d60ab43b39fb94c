"""The training task that every framework is held to, on this backend of Keras."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import mezzo.keras
import one_task
from conftest import BACKEND

POLICIES = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}


class Task(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(one_task.HIDDEN, activation="tanh")
        self.second = keras.layers.Dense(one_task.OUT)
        self.fuse = keras.layers.Dense(1, use_bias=False)

    def call(self, given: Any) -> Any:
        x, z = given
        return self.second(self.first(x)), self.fuse(z)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **others: Any) -> Any:
        out, fuse = (keras.ops.cast(one, "float32") for one in y_pred)
        whole = one_task.PART_OF_ERROR * keras.ops.mean(keras.ops.square(keras.ops.subtract(out, y)))
        return whole + keras.ops.mean(fuse)


@pytest.mark.every_backend
@pytest.mark.parametrize("precision", POLICIES if BACKEND == "torch" else ["fp16"])
def test_the_task(precision: str) -> None:
    keras.config.set_dtype_policy(POLICIES[precision])
    given, model = one_task.task(), Task()
    model((given.x[0], given.z[0].copy()))
    w = given.weights
    model.set_weights([w["w1"], w["b1"], w["w2"], w["b2"], w["v"]])
    optimizer = mezzo.keras.LossScaleOptimizer(
        keras.optimizers.SGD(one_task.LEARNING_RATE, momentum=one_task.MOMENTUM),
        loss_scale=one_task.loss_scale(precision),
    )
    model.compile(optimizer, jit_compile=BACKEND == "jax")
    losses, scales = [], []
    for x, target, z in zip(given.x, given.target, given.z.copy()):
        model.reset_metrics()
        losses.append(float(model.train_on_batch((x, z), target)))
        scales.append(float(optimizer.scale.numpy()))
    one_task.check(precision, losses, scales)
