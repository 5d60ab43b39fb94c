"""Functions that XLA compiles: grappler's rewrite leaves them in FP32, and assertions in them are not run."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from mezzo.core.errors import UsageError
from mezzo.tensorflow.switch import SWITCH


def in_xla() -> bool:
    """Whether the graph that is being built is of a function with jit_compile=True."""
    return not tf.executing_eagerly() and bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse_xla() -> None:
    """Nothing, unless the rewrite is on in a function that XLA compiles: it would be trained in FP32 without a word.

    Raises:
        UsageError: it is.
    """
    if SWITCH.is_on and in_xla():
        raise UsageError(
            "XLA compiles this training step (jit_compile=True), and TensorFlow's graph rewrite leaves such "
            "functions in FP32. Use jit_compile=False in model.compile(...) or tf.function(...); or use a policy "
            "in place of the rewrite, mezzo.keras.set_policy('fp16')."
        )
