"""LossScaleOptimizer over several devices, two of which this CPU pretends to be: one decision for all replicas.

Each in a process of its own, since devices are settled before the first tensor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conftest import BACKEND

COMMON = """
import json, math
import keras
import numpy as np
from mezzo.core.errors import CallOrderError, LossScaleCollapseError
from mezzo.core.loss_scale import StaticLossScale
from mezzo.keras import LossScaleOptimizer

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
ONE_SHARD = X.copy()
ONE_SHARD[12] = math.nan  # of the first batch, in the second device's half

def fitted(x, loss_scale="dynamic(init=1024)"):
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), loss_scale=loss_scale)
    made.compile(optimizer, "mse", jit_compile=keras.backend.backend() == "jax")
    made.fit(x, X.sum(axis=1, keepdims=True), batch_size=16, epochs=2, shuffle=False, verbose=0)
    machine, skipped = optimizer.machine(), int(optimizer.skipped_steps.numpy())
    weights = np.concatenate([w.numpy().ravel() for w in made.weights]).tolist()
    return weights, [machine.scale, machine.good_steps, skipped, int(optimizer.iterations.numpy())]

told = {}
"""

MIRRORED = """
import tensorflow as tf
from mezzo.keras.gradients import step_on_all_replicas

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
# One for all: a second one in the process takes up the collective keys of the first.
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

with strategy.scope():
    told["parallel"] = fitted(ONE_SHARD)
    weight = keras.Variable([1.0, 2.0])
    outside = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    outside.scale_loss(1.0)
    try:
        outside.apply([tf.constant([4.0, 4.0])], [weight])
    except CallOrderError as error:
        told["outside"] = str(error)
with tf.distribute.OneDeviceStrategy("CPU:1").scope():
    told["one device"] = fitted(ONE_SHARD)
# How replicas decide where the strategy merges nothing (a TPU's, and that of several GPUs under XLA). The step itself
# cannot run here: the variables of these two devices are merged, whatever the strategy says.
strategy.extended._use_merge_call = lambda: False

def infinite(gradients, variables):
    return gradients, tf.cast([tf.math.is_inf(gradients[0])], tf.int32)

@tf.function
def unmerged(of_replica):
    def replica():
        found, at = [], tf.distribute.get_replica_context().replica_id_in_sync_group
        step_on_all_replicas([of_replica[at]], [None], infinite, lambda step, bad: found.append(bad), None)
        return found[0]
    return strategy.experimental_local_results(strategy.run(replica))

told["unmerged"] = [bad.numpy().tolist() for bad in unmerged(tf.constant([4.0, math.inf]))]
"""

DATA_PARALLEL = """
told["one device"] = fitted(ONE_SHARD)
devices = keras.distribution.list_devices()
assert len(devices) == 2
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
told["parallel"] = fitted(ONE_SHARD)
try:
    fitted(np.full_like(X, math.nan), StaticLossScale(2.0, patience=4))
except LossScaleCollapseError as error:
    told["collapse"] = str(error)
"""


@pytest.mark.skipif(BACKEND == "torch", reason="neither tf.distribute nor DataParallel is PyTorch's")
def test_one_decision_for_all_devices() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    script = COMMON + (MIRRORED if BACKEND == "tensorflow" else DATA_PARALLEL) + "print(json.dumps(told))"
    environment = {**os.environ, "KERAS_BACKEND": BACKEND, **flags}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    # Scale, good steps, skipped ones, steps; the weights but for the order in which a batch is summed.
    assert told["one device"][1] == told["parallel"][1] == [256.0, 1, 2, 2]
    assert told["one device"][0] == pytest.approx(told["parallel"][0], rel=1e-4, abs=1e-5)
    if BACKEND == "jax":
        assert told["collapse"].startswith("gradients of ")
        return
    assert told["unmerged"] == [[1], [1]]
    assert "Call it in the function that strategy.run(...) runs." in told["outside"]
