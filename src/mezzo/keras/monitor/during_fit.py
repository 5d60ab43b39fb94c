"""What variables hold in the middle of `fit`, between two batches.

On TensorFlow and PyTorch a variable holds its value at all times. On JAX the trainer takes the values out at the first
batch, hands them from step to step (`model._jax_state`), and puts them back at the end of the epoch: in between,
`variable.value` is nothing. `model.jax_state_sync()` would put all of them back, and the trainer would take them out
again for the next batch: some Python for every variable. Here only what is asked for is read, and nothing is put back.

Reading is safe in `on_train_batch_begin`, in `on_test_begin` and at an epoch's end, and in `on_train_batch_end` of a
callback that is not `async_safe`: Keras calls those in the training's own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras


def values(model: Any, variables: Sequence[Any]) -> list[Any]:
    """The backend's tensors that variables of a model or of its optimizer or metrics hold now; nobody waits.

    On JAX they are gone (donated) with the next batch: compute from them, or copy them, before it.

    Args:
        model: the Keras model in whose `fit` this is called, or that is not being fitted.
        variables: `keras.Variable`s. One that the trainer does not hold is read where it is.
    """
    held = _held(model)
    # Not `get`: on JAX a variable whose value was taken out has none to give.
    found = [held[id(one)] if id(one) in held else one.value for one in variables]  # noqa: SIM401
    return [one.detach() for one in found] if keras.backend.backend() == "torch" else found


def copies(model: Any, variables: Sequence[Any]) -> list[Any]:
    """The same as tensors of their own, which stay as they are while the training goes on."""
    found = values(model, variables)
    if keras.backend.backend() == "torch":
        return [value.clone() for value in found]
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return [jnp.array(value, copy=True) for value in found]
    import tensorflow as tf

    return [tf.identity(value) for value in found]


def reading(model: Any) -> AbstractContextManager[Any]:
    """A block in which every variable of the model, its optimizer and its metrics reads as what it holds now.

    For code that reads variables by itself, `optimizer.check()` for one. What is assigned inside is dropped on JAX.
    """
    held = _held(model)
    if not held:
        return nullcontext()
    known = {id(one): one for one in variables(model)}
    return keras.StatelessScope(state_mapping=[(known[key], value) for key, value in held.items()])


_GROUPS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def _held(model: Any) -> dict[int, Any]:
    """Id of a variable -> what JAX's trainer holds for it; empty where the variables hold their values."""
    state = getattr(model, "_jax_state", None)
    if not state or getattr(model, "_jax_state_synced", True):
        return {}
    found = {}
    for group in _GROUPS:
        found.update({id(one): value for one, value in zip(_group(model, group), state.get(group) or ())})
    return found


def variables(model: Any) -> list[Any]:
    """All of a model, its optimizer and its metrics."""
    return [one for group in _GROUPS for one in _group(model, group)]


def _group(model: Any, group: str) -> Sequence[Any]:
    if group != "optimizer_variables":
        return getattr(model, group)
    return model.optimizer.variables if model.optimizer is not None else ()
