"""The graph rewrite and a mixed policy of Keras's exclude each other: whichever comes second is refused.

A mixed policy puts casts into the model, and the rewrite would put others into the same graph. And the optimizer that
the rewrite wrapped may have no loss scale, since the rewrite needs none here, which `compile` cannot see: under
mixed_float16 small gradients would be lost without a word.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale
from mezzo.tensorflow.switch import SWITCH


def refuse_policy_before(where: str) -> None:
    """Nothing, unless a mixed policy is on when the rewrite is asked for.

    Raises:
        UsageError: it is.
    """
    for _, policy, reset in _global_policies():
        if _is_mixed(policy):
            raise UsageError(
                f"{where}: Keras's dtype policy is {policy.name!r}, which is mixed precision already. Use one of the "
                f"two: leave out this call, or call {reset} first."
            )


def refuse_policy_after(library: str, rewrite: Any, pure: LossScale) -> None:
    """Nothing, unless a mixed policy was set after the rewrite.

    Args:
        library: the optimizer's, `keras` or `tf_keras`.
        rewrite: what the rewrite decided for this optimizer; None where it is not the rewrite's.
        pure: the optimizer's loss scale.

    Raises:
        UsageError: it was, and the rewrite is on, or the policy needs a loss scale that this optimizer does not have.
    """
    for whose, policy, reset in _global_policies():
        if whose == library and _collides(policy, rewrite, pure):
            raise _second(f"Keras's dtype policy was set to {policy.name!r}", f"call {reset}")


# Called while a user's tf.function is traced, it would be converted too: AutoGraph keeps placeholders of a loop's
# names, and the scan of all objects would meet them.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def refuse_mixed_layers(variables: Iterable[Any], rewrite: Any, pure: LossScale) -> None:
    """Nothing, unless one of Keras 3's layers that hold these variables has a mixed policy.

    Args:
        variables: those that are trained.
        rewrite: what the rewrite decided for this optimizer; None where it is not the rewrite's.
        pure: the optimizer's loss scale.

    Raises:
        UsageError: one has, and the rewrite is on, or the policy needs a loss scale that this optimizer does not have.
    """
    if not SWITCH.is_on and rewrite is None:
        return
    trained = {id(variable) for variable in variables}
    for layer in _layers():
        own = getattr(layer, "_trainable_variables", ())  # without those of the layers inside it
        if any(id(variable) in trained for variable in own):
            policy = layer.dtype_policy
            if _collides(policy, rewrite, pure):
                raise _second(
                    f"layer {layer.name!r} has the dtype policy {policy.name!r}",
                    "make the model under the policy 'float32'",
                )


def _collides(policy: Any, rewrite: Any, pure: LossScale) -> bool:
    if not _is_mixed(policy):
        return False
    if SWITCH.is_on:
        return True
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
        ours = plan_behind(policy) is not None
        yield (
            "keras",
            policy,
            "mezzo.keras.set_policy('fp32')" if ours else "keras.config.set_dtype_policy('float32')",
        )
    if "tf_keras" in sys.modules:
        policy = sys.modules["tf_keras"].mixed_precision.global_policy()
        yield "tf_keras", policy, "tf_keras.mixed_precision.set_global_policy('float32')"


def _layers() -> Iterator[Any]:
    """Every layer of Keras 3's that there is: a variable does not know whose it is, an optimizer no model."""
    kind = sys.modules["keras"].Layer
    # By type(), since isinstance() asks proxies and lazy modules, which would then import something.
    return (thing for thing in gc.get_objects() if issubclass(type(thing), kind))
