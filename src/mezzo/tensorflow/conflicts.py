"""What cannot be used together with the graph rewrite: a mixed policy of Keras's, and XLA. Both are refused.

A mixed policy puts casts into the model, and the rewrite would put others into the same graph. The optimizer that the
rewrite wrapped may have no loss scale, and under mixed_float16 it would lose small gradients without a word. Functions
that XLA compiles are never rewritten.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale
from mezzo.tensorflow.switch import SWITCH


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


def refuse_policy_before(where: str) -> None:
    """Raise UsageError if a mixed policy is on when the rewrite is asked for."""
    for _, policy, reset in _global_policies():
        if _is_mixed(policy):
            raise UsageError(
                f"{where}: Keras's dtype policy is {policy.name!r}, which is mixed precision already. Use one of the "
                f"two: leave out this call, or call {reset} first."
            )


def refuse_policy_after(library: str, rewrite: Any, pure: LossScale) -> None:
    """Raise UsageError if a mixed policy was set after the rewrite.

    A policy is no harm where the rewrite is off again, if the optimizer has the loss scale that the policy needs.

    Args:
        library: the optimizer's, `keras` or `tf_keras`.
        rewrite: what the rewrite decided for this optimizer; None where it is not the rewrite's.
        pure: the optimizer's loss scale.
    """
    for whose, policy, reset in _global_policies():
        if whose == library and _collides(policy, rewrite, pure):
            raise _second(f"Keras's dtype policy was set to {policy.name!r}", f"call {reset}")


# Called while a user's tf.function is traced, it would be converted too: AutoGraph keeps placeholders of a loop's
# names, and the scan of all objects would meet them.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def refuse_mixed_layers(variables: Iterable[Any], rewrite: Any, pure: LossScale) -> None:
    """Raise UsageError if one of Keras 3's layers that hold these variables has a mixed policy; as above."""
    if not SWITCH.is_on and rewrite is None:
        return
    trained = {id(variable) for variable in variables}
    kind = sys.modules["keras"].Layer
    # Every layer that there is: a variable does not know whose it is, an optimizer no model. By type(), since
    # isinstance() asks proxies and lazy modules, which would then import something.
    for layer in (thing for thing in gc.get_objects() if issubclass(type(thing), kind)):
        own = getattr(layer, "_trainable_variables", ())  # without those of the layers inside it
        if any(id(variable) in trained for variable in own) and _collides(layer.dtype_policy, rewrite, pure):
            raise _second(
                f"layer {layer.name!r} has the dtype policy {layer.dtype_policy.name!r}",
                "make the model under the policy 'float32'",
            )


def _collides(policy: Any, rewrite: Any, pure: LossScale) -> bool:
    if not _is_mixed(policy) or SWITCH.is_on:
        return _is_mixed(policy)
    return rewrite is not None and isinstance(pure, NoLossScale) and policy.compute_dtype == "float16"


def _second(what: str, mend: str) -> UsageError:
    return UsageError(
        f"{what}, which is mixed precision, and this optimizer is from enable_mixed_precision_graph_rewrite. Use one "
        f"of the two: for the rewrite {mend}; for the policy call disable_mixed_precision_graph_rewrite() and compile "
        "the model with the optimizer as it was before that call."
    )


def _is_mixed(policy: Any) -> bool:
    return bool(policy.compute_dtype != policy.variable_dtype)


def _global_policies() -> Iterator[tuple[str, Any, str]]:
    """Of each Keras that is imported: its name, its policy, and the call that sets FP32."""
    if "keras" in sys.modules:
        from mezzo.keras.plan import plan_behind

        policy = sys.modules["keras"].config.dtype_policy()
        theirs = "keras.config.set_dtype_policy('float32')"
        yield "keras", policy, "mezzo.keras.set_policy('fp32')" if plan_behind(policy) is not None else theirs
    if "tf_keras" in sys.modules:
        policy = sys.modules["tf_keras"].mixed_precision.global_policy()
        yield "tf_keras", policy, "tf_keras.mixed_precision.set_global_policy('float32')"
