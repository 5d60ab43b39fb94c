"""The end of `fit`, where Keras has an optimizer finalize the weights; on JAX when `fit` fails, too, in its `finally`.

There the error that is on its way to the user must come through, and the variables may be of no use: the trainer has
taken their values out, or given them away (donated) to the step that failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import keras


def finalize(inner: Any, variables: Sequence[Any], state: Any) -> bool:
    """Let the inner optimizer finalize the weights, in the way of no error that `fit` is failing with.

    Args:
        inner: the optimizer that takes the steps.
        variables: the trainable ones.
        state: a variable of the outer optimizer.

    Returns:
        Whether the patience is to be looked at: nothing has failed, and `state` can be read.
    """
    error = _failing()
    with nullcontext() if error is None else suppress(Exception):
        inner.finalize_variable_values(variables)
        if keras.backend.backend() == "jax" and inner.use_ema:
            _part(variables, inner.variables)
    return error is None and _readable(state)


def _failing() -> BaseException | None:
    """The error that whoever called `finalize_variable_values` is failing with.

    Not one that is being handled further out: a `fit` in somebody's `except` is a `fit` like any other.
    """
    error = sys.exc_info()[1]
    caller: Any = sys._getframe(2)
    while caller is not None and caller.f_code.co_name == "finalize_variable_values":  # a subclass's too
        caller = caller.f_back
    trace = None if error is None else error.__traceback__
    while trace is not None:
        if trace.tb_frame is caller:
            return error
        trace = trace.tb_next
    return None


def _part(variables: Sequence[Any], others: Sequence[Any]) -> None:
    """Give variables a buffer of their own where they share one.

    Keras makes the average's buffer the weight's, and the first step of the next `fit` would donate it twice.
    """
    import jax.numpy as jnp

    held = {id(one.value) for one in others}
    for variable in variables:
        if id(variable.value) in held:
            variable.assign(jnp.array(variable.value, copy=True))


def _readable(variable: Any) -> bool:
    if keras.backend.backend() != "jax":
        return True
    value = variable._value
    return value is not None and not value.is_deleted()
