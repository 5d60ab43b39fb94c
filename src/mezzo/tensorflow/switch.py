"""Grappler's rewrite, on and off: TensorFlow's options, the environment that the pass reads, and TF1's Sessions.

A `tf.function` follows the option at its next call, also one that was traced before. A Session keeps what it was
made with: it takes TensorFlow's options unless it is given a `ConfigProto`, so the option is put into that as well.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.client.session import BaseSession
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

from mezzo.scripts.patches import Patches

_ON, _OFF = rewriter_config_pb2.RewriterConfig.ON, rewriter_config_pb2.RewriterConfig.OFF


class Switch:
    """The one rewrite of this process, and what there was before it."""

    def __init__(self) -> None:
        self._option: str | None = None
        self._before: dict[str, str | None] = {}
        self._patches = Patches()

    @property
    def is_on(self) -> bool:
        """Whether a rewrite is on."""
        return self._option is not None

    def on(self, option: str, environment: Mapping[str, str]) -> None:
        """Turn the rewrite on; one that was on is replaced.

        Args:
            option: the field of `RewriterConfig`.
            environment: what the pass shall find in the environment.
        """
        if self.is_on:
            self.off()
        if global_state.non_mixed_precision_session_created():
            warnings.warn(
                "a tf.compat.v1.Session was made before enable_mixed_precision_graph_rewrite: it goes on in FP32. "
                "Make the Session after it.",
                UserWarning,
                stacklevel=4,
            )
        self._option = option
        for name, value in environment.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        tf.config.optimizer.set_experimental_options({option: True})
        # Where tf_keras looks before it lets a policy be set as well.
        global_state.set_mixed_precision_graph_rewrite_enabled(True)
        self._patches.set(BaseSession, "__init__", _with_option(BaseSession.__init__, option))
        if "keras" in sys.modules:
            # Keras 3 compiles by XLA where jit_compile is "auto", and such a function is never rewritten.
            trainer = importlib.import_module("keras.src.trainers.trainer")
            self._patches.set(trainer, "model_supports_jit", lambda model: False)

    def off(self) -> None:
        """Turn it off; Sessions that exist keep it."""
        if self._option is None:
            return
        tf.config.optimizer.set_experimental_options({self._option: False})
        global_state.set_mixed_precision_graph_rewrite_enabled(False)
        self._patches.undo()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()
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
        init(self, target, graph, config)

    return made


SWITCH = Switch()
