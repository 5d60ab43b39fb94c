"""One step with scaled gradients on any backend of Keras: unscale them, look for overflow, take the step or skip it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from mezzo.core.errors import CallOrderError
from mezzo.keras.plan import NARROW


def unscale(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Any, *, in_variables_format: bool
) -> tuple[list[Any], list[Any]]:
    """The unscaled gradients, in FP32 or `in_variables_format`; and for each a boolean: is it not finite?"""
    unscaled: list[Any] = list(gradients)
    bad: list[Any] = [None] * len(unscaled)
    here = [at for at, gradient in enumerate(gradients) if gradient is not None]
    # The "gradient" of an overwritten variable is its next value (FP8 scales), which the loss scale does not touch.
    scaled = [at for at in here if not getattr(variables[at], "overwrite_with_gradient", False)]
    dense = {at: gradients[at].values if _is_slices(gradients[at]) else gradients[at] for at in here}
    values = {at: keras.ops.convert_to_tensor(gradient) for at, gradient in dense.items()}
    wide = [keras.ops.cast(values[at], "float32") if _is_narrow(values[at]) else values[at] for at in scaled]
    for at, divided in zip(scaled, _divided(wide, scale)):
        values[at] = divided
        if _is_narrow(variables[at]):
            values[at] = keras.ops.cast(divided, keras.backend.standardize_dtype(variables[at].dtype))
        made = values[at] if in_variables_format else divided
        given = gradients[at]
        unscaled[at] = type(given)(made, given.indices, given.dense_shape) if _is_slices(given) else made
    for at, flag in zip(here, _not_finite([values[at] for at in here])):
        bad[at] = flag
    return unscaled, bad


def _is_narrow(thing: Any) -> bool:
    return keras.backend.standardize_dtype(thing.dtype) in NARROW


def _is_slices(gradient: Any) -> bool:
    """Whether it is a `tf.IndexedSlices`."""
    return hasattr(gradient, "dense_shape") and hasattr(gradient, "values")


# PyTorch does either in a few kernels, whatever the number of gradients: a GPU step is bound by launches.


def _divided(gradients: Sequence[Any], scale: Any) -> Sequence[Any]:
    if keras.backend.backend() == "torch" and gradients:
        import torch

        with torch.no_grad():
            return torch._foreach_div(list(gradients), scale)
    return [keras.ops.divide(gradient, keras.ops.cast(scale, gradient.dtype)) for gradient in gradients]


def _not_finite(gradients: Sequence[Any]) -> Sequence[Any]:
    """For each whether an element is NaN or infinite: booleans of shape ()."""
    if keras.backend.backend() == "torch" and gradients:
        import torch

        with torch.no_grad():
            # The largest magnitude is NaN if any is, and of nothing 0.
            padded = [one if one.numel() else one.new_zeros(1) for one in gradients]
            largest = torch._foreach_norm(padded, float("inf"))
            return torch.stack(list(largest)).isfinite().logical_not().unbind()
    return [keras.ops.logical_not(keras.ops.all(keras.ops.isfinite(one))) for one in gradients]


def step_on_all_replicas(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    examine: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], Any]],
    conclude: Callable[[Callable[[], None], Any], None],
    apply: Callable[[Sequence[Any], Sequence[Any]], None],
) -> None:
    """One step on TensorFlow, whose decision is the same on all replicas: `conclude` gets the summed bad gradients."""
    import tensorflow as tf

    if tf.distribute.in_cross_replica_context():
        raise CallOrderError(
            "apply() was called outside strategy.run(...), where gradients belong to no replica. "
            "Call it in the function that strategy.run(...) runs."
        )
    replica = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        unscaled, bad = examine(gradients, variables)
        if replica.num_replicas_in_sync > 1:
            bad = replica.all_reduce(tf.distribute.ReduceOp.SUM, bad)
        conclude(lambda: apply(unscaled, variables), bad)
        return

    def across(strategy: Any, gradients: Any, variables: Any) -> None:
        each = strategy.extended.call_for_each_replica
        unscaled, bad = each(examine, args=(gradients, variables))
        bad = strategy.reduce(tf.distribute.ReduceOp.SUM, bad, axis=None)
        # The branch is outside the replicas: the inner step merges them, which a branch inside one may not.
        conclude(lambda: each(apply, args=(unscaled, variables)), bad)

    replica.merge_call(across, args=(gradients, variables))


def apply_or_keep(inner: Any, step: Callable[[], None], found_inf: Any) -> None:
    """Take the step, unless `found_inf`; PyTorch's accelerators put it back instead, so that the host never waits."""
    backend = keras.backend.backend()
    # All that a step may write to: every trainable variable (averages may overwrite them), and the optimizer's.
    written = [*inner._trainable_variables, *inner.variables]
    if backend == "tensorflow":
        keras.ops.cond(found_inf, lambda: None, step)
    elif backend == "jax" and is_traced(found_inf):
        _in_stateless_scope(written, step, found_inf)
    elif backend == "torch" and not reading_is_free(found_inf):
        _put_back(written, step, found_inf)
    elif not bool(found_inf):
        step()


def reading_is_free(tensor: Any) -> bool:
    """Whether the host can read a PyTorch tensor without waiting, and without breaking a compiled graph."""
    import torch

    return bool(tensor.device.type == "cpu") and not torch.compiler.is_compiling()


def is_traced(value: Any) -> bool:
    """Whether a JAX value is one of a function that is being traced."""
    import jax

    return isinstance(value, jax.core.Tracer)


def _in_stateless_scope(written: Sequence[Any], step: Callable[[], None], found_inf: Any) -> None:
    before = [variable.value for variable in written]

    def stepped() -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(written, before))) as scope:
            step()
        return [scope.get_current_value(variable) for variable in written]

    for variable, value in zip(written, keras.ops.cond(found_inf, lambda: before, stepped)):
        variable.assign(value)


def _put_back(written: Sequence[Any], step: Callable[[], None], found_inf: Any) -> None:
    import torch

    with torch.no_grad():
        before = [variable.value.detach().clone() for variable in written]
        step()
        for variable, kept in zip(written, before):
            variable.assign(torch.where(found_inf, kept, variable.value))
