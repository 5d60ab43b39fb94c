"""Mixed precision by graph rewrite: grappler's auto mixed precision, and a loss scale around the optimizer.

When TensorFlow optimizes a graph, its pass runs the ops on its lists in 16 bits, with casts around them: FP16 on GPUs
from compute capability 7.0, BF16 through oneDNN on CPUs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from mezzo.core.errors import UnsupportedPrecisionError, UsageError, checks_keywords, unknown_name
from mezzo.core.hardware import TENSOR_CORES_FROM
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from mezzo.core.policy_text import as_loss_scale, precision_name, print_loss_scale
from mezzo.keras.hardware import describe
from mezzo.tensorflow.switch import SWITCH, refuse_policy
from mezzo.tensorflow.v1_optimizer import LossScaleOptimizer as V1Optimizer

_WHERE = "enable_mixed_precision_graph_rewrite"

# What is chosen -> grappler's option.
OPTIONS = {"fp16": "auto_mixed_precision", "bf16": "auto_mixed_precision_onednn_bfloat16"}
_PRECISIONS = ("auto", *OPTIONS)
ASSUME_NATIVE = "MEZZO_ASSUME_NATIVE"
SIMULATE_GPU = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_SIMULATE_GPU"


@dataclass(frozen=True)
class Rewrite:
    """What one call decided: `fp16`, `bf16`, or `fp32` for no rewrite; why; the loss scale as a policy writes it."""

    precision: str
    why: str
    loss_scale: str

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})"


@checks_keywords
def enable_mixed_precision_graph_rewrite(
    optimizer: Any, loss_scale: Any = "dynamic", *, precision: str = "auto"
) -> Any:
    """Turn on TensorFlow's auto mixed precision, and return the optimizer wrapped in a loss scale.

    The two lines of TF1's tutorials, under today's TensorFlow::

        opt = tf.compat.v1.train.AdamOptimizer()
        opt = mezzo.tensorflow.enable_mixed_precision_graph_rewrite(opt)

    Call it before Sessions are made.

    Args:
        optimizer: of `tf.compat.v1.train`, of Keras 3 (on the TensorFlow backend) or of tf_keras, new or legacy.
        loss_scale: "dynamic", or "dynamic(init=1024,floor=1)"; "none"; a number; a DynamicLossScale, StaticLossScale or
            NoLossScale of Mezzo's, or a loss scale of `tf.compat.v1.mixed_precision`. "dynamic" alone means none where
            the rewrite computes in BF16 or not at all: both have FP32's range.
        precision: "fp16" on a GPU, "bf16" on a CPU, or "auto" for the fast format of this machine, otherwise fp32 (no
            rewrite). "float16" and "mixed_float16" mean fp16, "bfloat16" and "mixed_bfloat16" bf16.

    Returns:
        An optimizer of the same family. Its attribute `rewrite` has the choice and the reason.

    Raises:
        UsageError: no such optimizer, one with a loss scale already, an invalid loss scale, a mixed policy of Keras's
            that is on as well.
        UnsupportedPrecisionError: the rewrite cannot compute in that precision on this machine.
    """
    wrapper = _wrapper_for(optimizer)
    refuse_policy(_WHERE)
    chosen, why = choose(precision)
    scale = _loss_scale(loss_scale, chosen)
    wrapped = wrapper(optimizer, loss_scale=scale)
    wrapped.rewrite = rewrite = Rewrite(chosen, why, print_loss_scale(scale))
    if chosen in OPTIONS:
        SWITCH.on(OPTIONS[chosen])
    else:
        SWITCH.off()
    print(f"mezzo: graph rewrite: {rewrite}; loss scale: {rewrite.loss_scale}", file=sys.stderr)
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Turn the rewrite off. Optimizers keep their loss scale, and existing Sessions keep the rewrite."""
    SWITCH.off()


def choose(precision: str) -> tuple[str, str]:
    """The precision on this hardware, `fp16`, `bf16` or `fp32`; and why, in words."""
    given, precision = precision, precision_name(precision)
    if precision not in _PRECISIONS:
        raise unknown_name("precision", str(given), _PRECISIONS, where=f"{_WHERE}: ")
    gpu = _gpu()
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") not in ("0", "false")
    refused = None
    if precision == "fp16" and gpu is None:
        refused = "computes in FP16 on NVIDIA GPUs from compute capability 7.0, and TensorFlow sees none here"
    elif precision == "bf16" and gpu is not None:
        refused = f"computes in BF16 on CPUs alone, and here is {gpu}"
    elif precision == "bf16" and not onednn:
        refused = "computes in BF16 through oneDNN, which TF_ENABLE_ONEDNN_OPTS=0 turns off"
    if refused is not None:
        raise UnsupportedPrecisionError(
            f"precision={given!r}: TensorFlow's graph rewrite {refused}. Use precision='auto', or a policy "
            "instead of the rewrite, mezzo.keras.set_policy('bf16')."
        )
    if gpu is not None:
        return "fp16", f"on {gpu}"
    if not onednn:
        return "fp32", "no GPU, and TF_ENABLE_ONEDNN_OPTS=0 leaves none of the rewrites for a CPU"
    assumed = os.environ.get(ASSUME_NATIVE)
    if "bf16" in (describe("")["native_formats"] if assumed is None else assumed.split(",")):
        return "bf16", "no GPU, and this CPU multiplies BF16 through oneDNN"
    if precision == "bf16":
        return "bf16", "as asked; this CPU has no BF16 instructions, so expect it to be slower than FP32"
    return "fp32", "no GPU, and this CPU has no BF16 instructions; precision='bf16' would emulate them"


def _gpu() -> str | None:
    """The name of a GPU that the rewrite serves, if TensorFlow may use one."""
    for device in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        if tuple(details.get("compute_capability") or (0, 0)) >= TENSOR_CORES_FROM["fp16"]:
            return str(details.get("device_name") or device.name)
    return "the GPU that TensorFlow simulates" if os.environ.get(SIMULATE_GPU, "") in ("1", "true") else None


def _loss_scale(given: Any, chosen: str) -> LossScale:
    if isinstance(given, str) and given.strip() == "dynamic" and chosen != "fp16":
        return NoLossScale()
    theirs = tf.compat.v1.mixed_precision
    if isinstance(given, theirs.FixedLossScale):
        return StaticLossScale(given.get_config()["loss_scale_value"])
    if isinstance(given, theirs.DynamicLossScale):
        of = given.get_config()
        factor = of["multiplier"]
        return DynamicLossScale(of["initial_loss_scale"], factor, 1 / factor, of["increment_period"])
    scale = as_loss_scale(given, _WHERE)
    if scale is None:
        raise UsageError(f'{_WHERE}: loss_scale is None. For no loss scale use loss_scale="none"')
    return scale


def _wrapper_for(optimizer: Any) -> type[Any]:
    """The class that wraps this optimizer in a loss scale. If it is of Keras or tf_keras, that is imported already."""
    v1 = tf.compat.v1
    keras2, keras3 = sys.modules.get("tf_keras"), sys.modules.get("keras")
    scaled = isinstance(optimizer, v1.mixed_precision.MixedPrecisionLossScaleOptimizer)
    if scaled or hasattr(optimizer, "inner_optimizer"):
        raise UsageError(f"{_WHERE}: {optimizer!r} scales the loss already. Give the optimizer inside it.")
    if isinstance(optimizer, v1.train.Optimizer):
        return V1Optimizer
    if keras3 is not None and isinstance(optimizer, keras3.optimizers.Optimizer):
        if keras3.config.backend() != "tensorflow":
            raise UsageError(
                f"{_WHERE}: the graph rewrite needs the TensorFlow backend, and Keras runs on "
                f"{keras3.config.backend()}. Set KERAS_BACKEND=tensorflow, or use mezzo.keras.set_policy('fp16')."
            )
        from mezzo.tensorflow.keras3 import GraphRewriteOptimizer

        return GraphRewriteOptimizer
    for_legacy = keras2 is not None and isinstance(optimizer, keras2.optimizers.legacy.Optimizer)
    if for_legacy or (keras2 is not None and isinstance(optimizer, keras2.optimizers.Optimizer)):
        from mezzo.tensorflow import keras2 as ours

        return ours.LegacyLossScaleOptimizer if for_legacy else ours.LossScaleOptimizer
    raise UsageError(
        f"{_WHERE}: optimizer is {optimizer!r}. Give an instance of an optimizer of tf.compat.v1.train, such as "
        "AdamOptimizer(1e-3), of Keras 3 or of tf_keras."
    )
