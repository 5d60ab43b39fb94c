"""Mixed precision by rewriting the graph: a loss scale around the optimizer, and grappler's auto mixed precision.

The model stays as it is written, in FP32. When TensorFlow optimizes a graph, the ops that its lists allow are run in 16
bits, with casts around them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from mezzo.core.policy_text import as_loss_scale, print_loss_scale
from mezzo.tensorflow.op_list_overrides import overrides_of
from mezzo.tensorflow.op_lists import op_lists as lists_of
from mezzo.tensorflow.precision import MODES, Choice, choose
from mezzo.tensorflow.switch import SWITCH
from mezzo.tensorflow.two_ways import refuse_policy_before
from mezzo.tensorflow.v1_optimizer import LossScaleOptimizer as V1Optimizer

_WHERE = "enable_mixed_precision_graph_rewrite"


@dataclass(frozen=True)
class Rewrite:
    """What one call decided; the returned optimizer has it as `rewrite`.

    Args:
        precision: `fp16`, `bf16`, or `fp32` for no rewrite.
        why: in words.
        loss_scale: as a policy writes it.
        environment: what the pass was given of op lists, as environment variables; where op lists were given, it
            finds no others.
    """

    precision: str
    why: str
    loss_scale: str
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})"


def enable_mixed_precision_graph_rewrite(
    optimizer: Any,
    loss_scale: LossScale | float | str | Any = "dynamic",
    *,
    precision: str = "auto",
    op_lists: Mapping[str, Iterable[str]] | str | os.PathLike[str] | None = None,
) -> Any:
    """Turn grappler's auto mixed precision on, and return the optimizer with a loss scale around it.

    The two lines of TF1's tutorials, under today's TensorFlow::

        opt = tf.compat.v1.train.AdamOptimizer()
        opt = mezzo.tensorflow.enable_mixed_precision_graph_rewrite(opt)

    Call it before Sessions are made. Where the optimizer is given is where the type of the result comes from: an
    optimizer of `tf.compat.v1.train`, of Keras 3 (on the TensorFlow backend) or of tf_keras, new or legacy.

    Args:
        optimizer: the optimizer.
        loss_scale: "dynamic", or "dynamic(init=1024,floor=1)"; "none"; a number; a DynamicLossScale, StaticLossScale or
            NoLossScale of Mezzo's, or a loss scale of `tf.compat.v1.mixed_precision`. "dynamic" alone means none where
            the rewrite computes in BF16 or not at all: both have FP32's range.
        precision: "fp16" on a GPU, "bf16" on a CPU, or "auto" for what this machine is fast in. "float16" and
            "mixed_float16" are fp16 too, "bfloat16" and "mixed_bfloat16" bf16.
        op_lists: ops to move to another of the rewrite's lists, `{"deny": ["Tanh"]}`, or the path of a TOML file that
            says so: see `mezzo.tensorflow.op_lists`. In force until the rewrite is turned off or on anew.

    Returns:
        An optimizer of the same family. Its `rewrite` says what was chosen.

    Raises:
        UsageError: no such optimizer, one with a loss scale already, a loss scale that is none, a list or an op that is
            unknown, or a mixed policy of Keras's that is on as well.
        UnsupportedPrecisionError: the rewrite cannot compute in that precision on this machine.
    """
    wrap = _wrapper_for(optimizer)
    refuse_policy_before(_WHERE)
    chosen = choose(precision)
    scale = _loss_scale(loss_scale, chosen)
    mode = MODES.get(chosen.precision)
    moved = overrides_of(op_lists) if op_lists is not None else {}
    # From where the user has the ops, not from where a rewrite that is on has moved them.
    lists = lists_of(mode, moved, environ=SWITCH.environ()) if mode else None
    environment = lists.environment() if lists and moved else None
    rewrite = Rewrite(
        chosen.precision, chosen.why, print_loss_scale(scale), tuple(sorted((environment or {}).items()))
    )
    wrapped = wrap(scale)
    wrapped.rewrite = rewrite
    if lists:
        SWITCH.on(lists.option, environment)
    else:
        SWITCH.off()
    print(f"mezzo: graph rewrite: {rewrite}; loss scale: {rewrite.loss_scale}", file=sys.stderr)
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Turn the rewrite off and put op lists back; optimizers keep their loss scale, Sessions that exist the rewrite."""
    SWITCH.off()


def _loss_scale(given: Any, chosen: Choice) -> LossScale:
    if isinstance(given, str) and given.strip() == "dynamic" and chosen.precision != "fp16":
        return NoLossScale()
    theirs = tf.compat.v1.mixed_precision
    if isinstance(given, theirs.FixedLossScale):
        return StaticLossScale(given.get_config()["loss_scale_value"])
    if isinstance(given, theirs.DynamicLossScale):
        of = given.get_config()
        return DynamicLossScale(
            init=of["initial_loss_scale"],
            growth_interval=of["increment_period"],
            growth_factor=of["multiplier"],
            backoff_factor=1 / of["multiplier"],
        )
    scale = as_loss_scale(given, _WHERE)
    if scale is None:
        raise UsageError(f'{_WHERE}: loss_scale is None; for no loss scale give loss_scale="none"')
    return scale


def _wrapper_for(optimizer: Any) -> Callable[[LossScale], Any]:
    """What wraps this optimizer in a loss scale. Keras's and tf_keras's are imported already if it is one of theirs."""
    v1 = tf.compat.v1
    keras2, keras3 = sys.modules.get("tf_keras"), sys.modules.get("keras")
    scaled: list[Any] = [v1.mixed_precision.MixedPrecisionLossScaleOptimizer]
    scaled += [keras2.mixed_precision.LossScaleOptimizer] if keras2 else []
    scaled += [keras3.optimizers.LossScaleOptimizer] if keras3 else []
    if isinstance(optimizer, (*scaled, V1Optimizer)):
        raise UsageError(
            f"{_WHERE}: {type(optimizer).__name__} scales the loss already. Give the optimizer that is inside it."
        )
    if isinstance(optimizer, v1.train.Optimizer):
        return lambda scale: V1Optimizer(optimizer, scale)
    if keras3 is not None and isinstance(optimizer, keras3.optimizers.Optimizer):
        if keras3.config.backend() != "tensorflow":
            raise UsageError(
                f"{_WHERE}: Keras runs on {keras3.config.backend()} here, and the graph rewrite is TensorFlow's. "
                "Set KERAS_BACKEND=tensorflow, or use mezzo.keras.set_policy('fp16')."
            )
        from mezzo.tensorflow.keras3 import GraphRewriteOptimizer

        return lambda scale: GraphRewriteOptimizer(optimizer, loss_scale=scale)
    if keras2 is not None and isinstance(
        optimizer, (keras2.optimizers.Optimizer, keras2.optimizers.legacy.Optimizer)
    ):
        from mezzo.tensorflow import keras2 as ours

        legacy = isinstance(optimizer, keras2.optimizers.legacy.Optimizer)
        wrapper = ours.LegacyLossScaleOptimizer if legacy else ours.LossScaleOptimizer
        return lambda scale: wrapper(optimizer, scale)
    what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"{optimizer!r}"
    mend = f" Call it: {optimizer.__name__}(...)." if isinstance(optimizer, type) else ""
    raise UsageError(
        f"{_WHERE}: optimizer is {what}; give an optimizer of tf.compat.v1.train, such as AdamOptimizer(1e-3), of "
        f"Keras 3 or of tf_keras.{mend}"
    )
