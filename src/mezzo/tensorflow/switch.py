"""Grappler's rewrite, on and off: TensorFlow's options, its op lists in the environment, and TF1's Sessions.

A `tf.function` follows the option at its next call, also one that was traced before. A Session keeps what it was
made with: it takes TensorFlow's options unless it is given a `ConfigProto`, so the option is put into that as well.

TensorFlow has four lists of ops: `allow` (always 16 bits), `infer` (16 bits unless a deny op is upstream), `deny`
(FP32, and what follows it) and `clear` (the format of its neighbours). An op on no list, here `other`, stays in FP32.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.client.session import BaseSession
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.training.experimental import mixed_precision_global_state as global_state

from mezzo.core.errors import UnknownNameError, UsageError, unknown_name
from mezzo.runner.patches import Patches

_ON, _OFF = rewriter_config_pb2.RewriterConfig.ON, rewriter_config_pb2.RewriterConfig.OFF

_LISTS = ("allow", "infer", "deny", "clear")
_PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
VARIABLES = tuple(
    f"{_PREFIX}{name}_{verb}"
    # TensorFlow reads the former names of three lists too, after the present ones.
    for name in (*(f"{each.upper()}LIST" for each in _LISTS), "WHITELIST", "GRAYLIST", "BLACKLIST")
    for verb in ("ADD", "REMOVE")
)
"""The environment variables that add ops to lists and remove them."""


def list_of_each(lists: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Op -> the list that it is moved to.

    Args:
        lists: `{"deny": ["Tanh"], "infer": [...]}`.

    Raises:
        UnknownNameError: a key that is no list, or an op that TensorFlow has not.
        UsageError: no such mapping, or an op that two lists claim.
    """
    if not isinstance(lists, Mapping) or any(isinstance(ops, (str, Mapping)) for ops in lists.values()):
        raise UsageError(f'op_lists is {lists!r}. Give a mapping of lists, such as {{"deny": ["Tanh"]}}.')
    found: dict[str, str] = {}
    for name, ops in lists.items():
        if name not in (*_LISTS, "other"):
            raise unknown_name("list", str(name), [*_LISTS, "other"], where="op_lists: ")
        for op in ops:
            if op_def_registry.get(op) is None:
                near = difflib.get_close_matches(op, dir(tf.raw_ops), n=1)
                fix = f" Did you mean {near[0]!r}?" if near else ""
                raise UnknownNameError(f"op_lists: unknown op {op!r}. Use a name that tf.raw_ops has.{fix}")
            if found.setdefault(op, name) != name:
                raise UsageError(
                    f"op_lists: {op!r} is under both {found[op]!r} and {name!r}. Keep one of them."
                )
    return found


def environment_of(list_of: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """All of `VARIABLES` that put each op on its list and on no other; what `environ` says of other ops stays."""
    words = {
        name: {op for op in environ.get(name, "").split(",") if op and op not in list_of}
        for name in VARIABLES
    }
    for op, wanted in list_of.items():
        for name in _LISTS:
            words[f"{_PREFIX}{name.upper()}LIST_{'ADD' if name == wanted else 'REMOVE'}"].add(op)
    return {name: ",".join(sorted(ops)) for name, ops in words.items() if ops}


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
        tf.config.optimizer.set_experimental_options({option: True})
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
        tf.config.optimizer.set_experimental_options({self._option: False})
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


def in_xla() -> bool:
    """Whether the graph that is being built is of a function with jit_compile=True."""
    return not tf.executing_eagerly() and bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse_xla() -> None:
    """Raise UsageError if the rewrite is on in a function that XLA compiles, which would train in FP32."""
    if SWITCH.is_on and in_xla():
        raise UsageError(
            "XLA compiles this training step (jit_compile=True), and TensorFlow's graph rewrite leaves such "
            "functions in FP32. Use jit_compile=False in model.compile(...) or tf.function(...); or use a policy "
            "in place of the rewrite, mezzo.keras.set_policy('fp16')."
        )


def refuse_policy(where: str) -> None:
    """Raise UsageError if Keras's global policy is mixed precision, which puts casts of its own into the model."""
    for name, reset in (
        ("keras", "mezzo.keras.set_policy('fp32')"),
        ("tf_keras", "tf_keras.mixed_precision.set_global_policy('float32')"),
    ):
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        policy = module.config.dtype_policy() if name == "keras" else module.mixed_precision.global_policy()
        if policy.compute_dtype != policy.variable_dtype:
            raise UsageError(
                f"{where}: the dtype policy of {name} is {policy.name!r}, which is mixed precision already. Use one of "
                f"the two: leave out enable_mixed_precision_graph_rewrite, or call {reset} first."
            )
