"""Gradients unscaled in FP32, and which of them are not finite: on any backend of Keras.

The naive code it equals, for each gradient::

    unscaled = float32(gradient) / scale
    bad      = not all(isfinite(as_the_variable_holds_it(unscaled)))

What is looked at is the unscaled gradient, as in the machine's specification: a scale below 1 makes numbers larger.
Where the variable is of 16 bits, what is looked at is the gradient in that format, since the inner optimizer casts it
to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from mezzo.keras.dtypes import NARROW


def is_narrow(thing: Any) -> bool:
    """Whether a tensor or variable holds fewer bits than FP32 does."""
    return keras.backend.standardize_dtype(thing.dtype) in NARROW


def is_overwritten(variable: Any) -> bool:
    """Whether the variable's "gradient" is its next value (FP8's scales), which no loss scale has touched."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def unscale(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Any, *, in_variables_format: bool
) -> tuple[list[Any], list[Any]]:
    """The unscaled gradients, and of each whether it is not finite.

    Args:
        gradients: tensors, `tf.IndexedSlices`, or None where there is none, one for each of `variables`.
        variables: those that the gradients are of.
        scale: FP32, shape (): what the loss was multiplied by.
        in_variables_format: cast them back to the variable's format, which a gradient accumulator of 16 bits needs.

    Returns:
        The gradients in the order given, in FP32 where they were narrower (one that overwrites its variable as it is,
        None as None); and for each a boolean of shape (), or None.
    """
    if keras.backend.backend() == "torch":
        from mezzo.keras.scaling.torch_gradients import unscale_together

        together = unscale_together(gradients, variables, scale, in_variables_format)
        if together is not None:
            return together
    unscaled = [
        _unscaled(gradient, variable, scale, in_variables_format)
        for gradient, variable in zip(gradients, variables)
    ]
    return unscaled, [_is_bad(gradient, variable) for gradient, variable in zip(unscaled, variables)]


def _unscaled(gradient: Any, variable: Any, scale: Any, in_variables_format: bool) -> Any:
    if gradient is None or is_overwritten(variable):
        return gradient
    if _is_slices(gradient):
        values = _unscaled(gradient.values, variable, scale, in_variables_format)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    gradient = keras.ops.convert_to_tensor(gradient)
    wide = keras.ops.cast(gradient, "float32") if is_narrow(gradient) else gradient
    wide = keras.ops.divide(wide, keras.ops.cast(scale, wide.dtype))
    narrow_again = in_variables_format and is_narrow(variable)
    return keras.ops.cast(wide, keras.backend.standardize_dtype(variable.dtype)) if narrow_again else wide


def _is_bad(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return None
    values = keras.ops.convert_to_tensor(gradient.values if _is_slices(gradient) else gradient)
    if is_narrow(variable) and not is_overwritten(variable):
        values = keras.ops.cast(values, keras.backend.standardize_dtype(variable.dtype))
    return keras.ops.logical_not(keras.ops.all(keras.ops.isfinite(values)))


def _is_slices(gradient: Any) -> bool:
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(gradient, tf.IndexedSlices)
