"""Two replicas on one CPU: one of them overflows, and neither takes the step. Prints what it saw as JSON."""

from __future__ import annotations

import json

import numpy as np
import tensorflow as tf
import tf_keras

from mezzo.core.loss_scale import DynamicLossScale
from mezzo.tensorflow.keras2 import LossScaleOptimizer
from mezzo.tensorflow.v1_optimizer import LossScaleOptimizer as V1Optimizer

KINDS = {
    "v1": lambda scale: V1Optimizer(tf.compat.v1.train.MomentumOptimizer(0.125, 0.5), scale),
    "tf_keras": lambda scale: LossScaleOptimizer(
        tf_keras.optimizers.SGD(0.125, 0.5, jit_compile=False), scale
    ),
}


def steps(kind: str, strategy: tf.distribute.Strategy) -> list[dict[str, object]]:
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        optimizer = KINDS[kind](DynamicLossScale(init=4.0, growth_interval=2))

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
        skipped = int(optimizer.skipped_steps.numpy())
        told.append({"weights": each, "scale": float(optimizer.loss_scale), "skipped": skipped})
    return told


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    print(json.dumps({kind: steps(kind, strategy) for kind in KINDS}))


main()
