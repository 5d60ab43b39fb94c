"""The training task that every framework is held to, in a Session of TF1 under the graph rewrite.

The rewrite to FP16 is for GPUs. Here TensorFlow is told to simulate one, so that Mezzo turns it on, and the pass for a
CPU, which can be asked for in a Session alone, computes in FP16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

import mezzo.tensorflow as mt
import one_task
from mezzo.tensorflow.rewrite import SIMULATE_GPU

v1 = tf.compat.v1


def loss_of(w: dict[str, Any], x: Any, target: Any, z: Any) -> Any:
    hidden = tf.tanh(tf.matmul(x, w["w1"]) + w["b1"])
    error = tf.matmul(hidden, w["w2"]) + w["b2"] - target
    return one_task.PART_OF_ERROR * tf.reduce_mean(tf.square(error)) + tf.reduce_mean(tf.matmul(z, w["v"]))


def test_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMULATE_GPU, "1")
    losses, scales = [], []
    given = one_task.task()
    with tf.Graph().as_default() as graph:
        weights = {name: v1.get_variable(name, initializer=first) for name, first in given.weights.items()}
        batch = [v1.placeholder(tf.float32, part.shape[1:]) for part in (given.x, given.target, given.z)]
        optimizer = mt.enable_mixed_precision_graph_rewrite(
            v1.train.MomentumOptimizer(one_task.LEARNING_RATE, one_task.MOMENTUM),
            one_task.loss_scale("fp16"),
            precision="fp16",
        )
        loss = loss_of(weights, *batch)
        step, scale = optimizer.minimize(loss), optimizer.loss_scale
        config = v1.ConfigProto()
        config.graph_options.rewrite_options.auto_mixed_precision_cpu = RewriterConfig.ON
        with v1.Session(graph=graph, config=config) as session:
            session.run(v1.global_variables_initializer())
            for parts in zip(given.x, given.target, given.z):
                losses.append(float(session.run([loss, step], dict(zip(batch, parts)))[0]))
                scales.append(float(session.run(scale)))
    one_task.check("fp16", losses, scales)
    # The rewrite did compute in it.
    assert not np.allclose(losses[:5], one_task.expected("fp32").losses[:5], rtol=1e-6)
