"""The names under which a Saver of TF1 finds what optimizers keep, with a loss scale and without."""

from typing import Any

import tensorflow as tf

from mezzo.core.loss_scale import DynamicLossScale
from mezzo.tensorflow.v1_optimizer import LossScaleOptimizer

v1 = tf.compat.v1
v1.disable_v2_behavior()


def names(wrap: Any) -> list[str]:
    with tf.Graph().as_default():
        loss = v1.get_variable("weight", initializer=[1.0]) ** 2 + v1.get_variable("bias", initializer=[1.0])
        with tf.name_scope("train"):
            wrap(v1.train.AdamOptimizer()).minimize(tf.reduce_sum(loss))
        return sorted(variable.op.name for variable in v1.global_variables())


scaled = names(lambda optimizer: LossScaleOptimizer(optimizer, DynamicLossScale()))
print("plain", *names(lambda optimizer: optimizer))
print("scaled", *(name for name in scaled if "loss_scale/" not in name))
