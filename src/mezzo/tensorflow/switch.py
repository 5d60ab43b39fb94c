"""Grappler's rewrite, on and off. A `tf.function` follows TensorFlow's option at its next call.

A Session keeps the options of when it was made; with a `ConfigProto` it ignores them, so the option is added there.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.client.session import BaseSession
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

from mezzo.core.errors import UsageError
from mezzo.runner.patches import Patches

_ON, _OFF = rewriter_config_pb2.RewriterConfig.ON, rewriter_config_pb2.RewriterConfig.OFF


class Switch:
    """The one rewrite of this process."""

    def __init__(self) -> None:
        self._option: str | None = None
        self._patches = Patches()

    @property
    def is_on(self) -> bool:
        """Whether a rewrite is on."""
        return self._option is not None

    def on(self, option: str) -> None:
        """Turn the rewrite on by a field of `RewriterConfig`; a rewrite that was on is replaced."""
        self.off()
        if global_state.non_mixed_precision_session_created():
            global_state.set_non_mixed_precision_session_created(False)  # warn once per Session
            warnings.warn(
                "a tf.compat.v1.Session was made before enable_mixed_precision_graph_rewrite: if it is in use, it goes "
                "on in FP32. Make Sessions after the call.",
                UserWarning,
                stacklevel=4,  # the line that calls enable_mixed_precision_graph_rewrite
            )
        self._option = option
        tf.config.optimizer.set_experimental_options({option: True})
        # tf_keras refuses a mixed policy where this is set.
        global_state.set_mixed_precision_graph_rewrite_enabled(True)
        self._patches.set(BaseSession, "__init__", _with_option(BaseSession.__init__, option))
        if "keras" in sys.modules:
            # jit_compile="auto" of Keras 3 may choose XLA, and XLA functions are never rewritten. jit_compile=True is
            # refused by the optimizer (`refuse_xla`).
            trainer = importlib.import_module("keras.src.trainers.trainer")
            self._patches.set(trainer.Trainer, "_resolve_auto_jit_compile", lambda model: False)

    def off(self) -> None:
        """Turn it off; existing Sessions keep it."""
        if self._option is None:
            return
        tf.config.optimizer.set_experimental_options({self._option: False})
        global_state.set_mixed_precision_graph_rewrite_enabled(False)
        self._patches.undo()
        self._option = None


def _with_option(init: Callable[..., None], option: str) -> Callable[..., None]:
    def made(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        if isinstance(config, tf.compat.v1.ConfigProto):
            given = config
            config = tf.compat.v1.ConfigProto()
            config.CopyFrom(given)
            options = config.graph_options.rewrite_options
            if getattr(options, option) != _OFF:  # the user's own OFF stays
                setattr(options, option, _ON)
        created = global_state.non_mixed_precision_session_created()
        init(self, target, graph, config)
        # TensorFlow also counts this one if `off` has set another rewrite's option to OFF.
        global_state.set_non_mixed_precision_session_created(created)

    return made


SWITCH = Switch()


def in_xla() -> bool:
    """Whether the graph that is being built is of a function with jit_compile=True."""
    return not tf.executing_eagerly() and bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse_xla() -> None:
    """Raise UsageError if the rewrite is on in a function that XLA compiles, which would train in FP32."""
    if SWITCH.is_on and in_xla():
        raise UsageError(
            "XLA compiles this training step (jit_compile=True), and TensorFlow's graph rewrite leaves such "
            "functions in FP32. Use jit_compile=False in model.compile(...) or tf.function(...); or use a policy "
            "instead of the rewrite, mezzo.keras.set_policy('fp16')."
        )


def refuse_policy(where: str) -> None:
    """Raise UsageError if Keras's global policy is mixed precision, which casts inside the model."""
    for name, reset in (
        ("keras", "mezzo.keras.set_policy('fp32')"),
        ("tf_keras", "tf_keras.mixed_precision.set_global_policy('float32')"),
    ):
        module: Any = sys.modules.get(name)
        policy = module and module.mixed_precision.global_policy()
        if policy and policy.compute_dtype != policy.variable_dtype:
            raise UsageError(
                f"{where}: the dtype policy of {name} is {policy.name!r}, which is mixed precision already. Use one of "
                f"the two: leave out enable_mixed_precision_graph_rewrite, or call {reset} first."
            )
