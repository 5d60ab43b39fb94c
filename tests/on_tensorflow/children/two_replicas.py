"""Two replicas on one CPU: one of them overflows, and neither takes the step. Prints what it saw as JSON."""

from __future__ import annotations

import json

import numpy as np
import tensorflow as tf
from tf_steppers import FAMILIES

from mezzo.core.loss_scale import DynamicLossScale


def steps(kind: str, strategy: tf.distribute.Strategy) -> list[object]:
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        optimizer = FAMILIES[kind](DynamicLossScale(init=4.0, growth_interval=2))

    @tf.function
    def run(of_replica: tf.Tensor) -> None:
        def replica() -> None:
            factor = of_replica[tf.distribute.get_replica_context().replica_id_in_sync_group]
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(tf.reduce_sum(weight * factor))
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
            optimizer.apply_gradients(zip(gradients, [weight]))

        strategy.run(replica)

    told = []
    for factors in ((1.0, 2.0), (1.0, np.inf), (np.nan, 1.0), (1.0, 1.0)):
        run(tf.constant(factors, tf.float32))
        each = [part.numpy().tolist() for part in strategy.experimental_local_results(weight)]
        told.append([each, float(optimizer.loss_scale), int(optimizer.skipped_steps.numpy())])
    return told


cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print(json.dumps({kind: steps(kind, strategy) for kind in ("v1", "tf_keras")}))
