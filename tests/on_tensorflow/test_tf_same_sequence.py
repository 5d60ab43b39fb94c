"""The training task that every framework is held to, on TensorFlow.

It runs under the graph rewrite: in a Session with an optimizer of TF1, and in a function with one of tf_keras.
The rewrite to FP16 is for GPUs. Here TensorFlow is told to simulate one, so that Mezzo turns it on, and the pass for a
CPU, which can be asked for in a Session alone, computes in FP16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

import mezzo.tensorflow as mt
import one_task
from mezzo.tensorflow.rewrite import SIMULATE_GPU

v1 = tf.compat.v1


def loss_of(w: dict[str, Any], x: Any, target: Any, z: Any) -> Any:
    hidden = tf.tanh(tf.matmul(x, w["w1"]) + w["b1"])
    error = tf.matmul(hidden, w["w2"]) + w["b2"] - target
    return one_task.PART_OF_ERROR * tf.reduce_mean(tf.square(error)) + tf.reduce_mean(tf.matmul(z, w["v"]))


def rewritten(optimizer: Any, precision: str) -> Any:
    scale = one_task.loss_scale(precision)
    return mt.enable_mixed_precision_graph_rewrite(optimizer, scale, precision=precision)


def in_a_session(precision: str) -> tuple[list[float], list[float]]:
    losses, scales = [], []
    given = one_task.task()
    with tf.Graph().as_default() as graph:
        weights = {name: v1.get_variable(name, initializer=first) for name, first in given.weights.items()}
        batch = [v1.placeholder(tf.float32, part.shape[1:]) for part in (given.x, given.target, given.z)]
        optimizer = rewritten(
            v1.train.MomentumOptimizer(one_task.LEARNING_RATE, one_task.MOMENTUM), precision
        )
        loss = loss_of(weights, *batch)
        step = optimizer.minimize(loss)
        scale = optimizer._scaled.here().scale
        config = v1.ConfigProto()
        if precision == "fp16":
            config.graph_options.rewrite_options.auto_mixed_precision_cpu = RewriterConfig.ON
        with v1.Session(graph=graph, config=config) as session:
            session.run(v1.global_variables_initializer())
            for parts in zip(given.x, given.target, given.z):
                losses.append(float(session.run([loss, step], dict(zip(batch, parts)))[0]))
                scales.append(float(session.run(scale)))
    return losses, scales


def in_a_function(precision: str) -> tuple[list[float], list[float]]:
    given = one_task.task()
    weights = {name: tf.Variable(first, name=name) for name, first in given.weights.items()}
    sgd = tf_keras.optimizers.SGD(one_task.LEARNING_RATE, one_task.MOMENTUM, jit_compile=False)
    optimizer = rewritten(sgd, precision)

    @tf.function
    def step(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, *batch)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, list(weights.values())))
        optimizer.apply_gradients(zip(gradients, weights.values()))
        return loss

    losses, scales = [], []
    for parts in zip(given.x, given.target, given.z):
        losses.append(float(step(*map(tf.constant, parts))))
        scales.append(optimizer.machine().scale)
    return losses, scales


RUNS = [(in_a_session, "fp16"), (in_a_function, "bf16")]


@pytest.mark.parametrize(("where", "precision"), RUNS, ids=lambda part: getattr(part, "__name__", part))
def test_the_task(where: Any, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if precision == "fp16":
        monkeypatch.setenv(SIMULATE_GPU, "1")
    losses, scales = where(precision)
    one_task.check(precision, losses, scales)
    # The rewrite did compute in it.
    assert not np.allclose(losses[:5], one_task.expected("fp32").losses[:5], rtol=1e-6)
