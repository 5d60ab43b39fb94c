"""Grappler's rewrite, on and off: TensorFlow's options, the environment that the pass reads, and TF1's Sessions.

A `tf.function` follows the option at its next call, also one that was traced before. A Session keeps what it was
made with: it takes TensorFlow's options unless it is given a `ConfigProto`, so the option is put into that as well.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.client.session import BaseSession
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

from mezzo.scripts.patches import Patches
from mezzo.tensorflow.op_lists import LEVEL, VARIABLES

_ON, _OFF = rewriter_config_pb2.RewriterConfig.ON, rewriter_config_pb2.RewriterConfig.OFF

# TensorFlow keeps what it made of a function under the options that it was made with, and the environment is none of
# them. So each set of op lists has a number, and its negative is given as the size of the smallest graph that is
# optimized: any below 1 means every graph.
_LEAST = "min_graph_nodes"
_numbers: dict[tuple[tuple[str, str], ...], int] = {(): 0}


def _number_of_lists() -> int:
    """The number of the op lists that the environment says; 0 where it says nothing."""
    said = [(name, os.environ[name]) for name in (*VARIABLES, LEVEL) if name in os.environ]
    return _numbers.setdefault(tuple(said), len(_numbers))


class Switch:
    """The one rewrite of this process, and what there was before it."""

    def __init__(self) -> None:
        self._option: str | None = None
        self._before: dict[str, str | None] = {}
        self._patches = Patches()
        self._least: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether a rewrite is on."""
        return self._option is not None

    def environ(self) -> dict[str, str]:
        """The environment without what the rewrite that is on has put there: with the user's own op lists."""
        found = dict(os.environ)
        _put(found, self._before)
        return found

    def on(self, option: str, environment: Mapping[str, str] | None) -> None:
        """Turn the rewrite on; one that was on is replaced.

        Args:
            option: the field of `RewriterConfig`.
            environment: those of `VARIABLES` that the pass shall find; None for what the user has set.
        """
        self.off()
        if global_state.non_mixed_precision_session_created():
            global_state.set_non_mixed_precision_session_created(False)  # each is told of once
            warnings.warn(
                "a tf.compat.v1.Session was made before enable_mixed_precision_graph_rewrite: if it is in use, it goes "
                "on in FP32. Make Sessions after the call.",
                UserWarning,
                stacklevel=3,  # the line that calls enable_mixed_precision_graph_rewrite
            )
        self._option = option
        if environment is not None:
            self._before = {name: os.environ.get(name) for name in VARIABLES}
            _put(os.environ, {name: environment.get(name) for name in VARIABLES})
        self._least = tf.config.optimizer.get_experimental_options().get(_LEAST)
        number = _number_of_lists()
        tf.config.optimizer.set_experimental_options(
            {option: True, _LEAST: -number} if number else {option: True}
        )
        # Where tf_keras looks before it lets a policy be set as well.
        global_state.set_mixed_precision_graph_rewrite_enabled(True)
        self._patches.set(BaseSession, "__init__", _with_option(BaseSession.__init__, option))
        if "keras" in sys.modules:
            # Keras 3 compiles by XLA where jit_compile is "auto", and such a function is never rewritten. Who asks
            # for True is told by the optimizer (`refuse_xla`).
            trainer = importlib.import_module("keras.src.trainers.trainer")
            self._patches.set(trainer.Trainer, "_resolve_auto_jit_compile", lambda model: False)

    def off(self) -> None:
        """Turn it off; Sessions that exist keep it."""
        if self._option is None:
            return
        options: dict[str, Any] = {self._option: False}
        if tf.config.optimizer.get_experimental_options().get(_LEAST, 0) < 0:
            options[_LEAST] = self._least
        tf.config.optimizer.set_experimental_options(options)
        global_state.set_mixed_precision_graph_rewrite_enabled(False)
        self._patches.undo()
        _put(os.environ, self._before)
        self._before = {}
        self._option = None


def _put(environ: MutableMapping[str, str], values: Mapping[str, str | None]) -> None:
    """Set each of `values`, and unset those that are None."""
    for name, value in values.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


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
