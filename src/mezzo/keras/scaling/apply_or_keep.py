"""A step of the inner optimizer that is taken or leaves no trace, on any backend of Keras.

The naive code it equals::

    if not found_inf:
        inner.apply(gradients, variables)

How the question is asked is the backend's affair:

=========== ==================================== ====================================================================
backend     where                                how
=========== ==================================== ====================================================================
TensorFlow  eager, graph, XLA                    `tf.cond`
JAX         a value that can be read             a Python branch
JAX         traced (`jit`)                       `lax.cond` over the values, with the inner step in a `StatelessScope`
PyTorch     a CPU                                a Python branch: reading is free there
PyTorch     an accelerator, under `compile`      apply, then put back with `where`, so that the host need not wait. It
                                                 holds a second copy of the variables while the step lasts
=========== ==================================== ====================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def apply_or_keep(inner: Any, step: Callable[[], None], found_inf: Any) -> None:
    """Take the step, unless `found_inf`: then the weights and all of `inner`'s variables are as before.

    Args:
        inner: the inner optimizer, built: whose step count, momentum, averages and accumulators are at stake.
        step: calls `inner.apply(...)`, and writes to nothing else.
        found_inf: boolean, shape ().
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        keras.ops.cond(found_inf, lambda: None, step)
    elif backend == "jax" and _is_traced(found_inf):
        _in_stateless_scope(inner, step, found_inf)
    elif backend == "torch" and not reading_is_free(found_inf):
        _put_back(inner, step, found_inf)
    elif not bool(found_inf):
        step()


def reading_is_free(tensor: Any) -> bool:
    """Whether a PyTorch tensor can be read on the host without a wait, and without a break in a compiled graph."""
    import torch

    return bool(tensor.device.type == "cpu") and not torch.compiler.is_compiling()


def _is_traced(value: Any) -> bool:
    import jax

    return isinstance(value, jax.core.Tracer)


def _touched(inner: Any) -> list[Any]:
    """What a step may write to: all trainable variables (averages may overwrite them), and the inner optimizer's."""
    return [*inner._trainable_variables, *inner.variables]


def _in_stateless_scope(inner: Any, step: Callable[[], None], found_inf: Any) -> None:
    touched = _touched(inner)
    before = [variable.value for variable in touched]

    def stepped() -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(touched, before))) as scope:
            step()
        return [scope.get_current_value(variable) for variable in touched]

    for variable, value in zip(touched, keras.ops.cond(found_inf, lambda: before, stepped)):
        variable.assign(value)


def _put_back(inner: Any, step: Callable[[], None], found_inf: Any) -> None:
    import torch

    touched = _touched(inner)
    with torch.no_grad():
        before = [variable.value.detach().clone() for variable in touched]
        step()
        for variable, kept in zip(touched, before):
            variable.assign(torch.where(found_inf, kept, variable.value))
