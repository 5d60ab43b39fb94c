"""What several tests of Keras are made of: steps with given gradients, and a model with a training step of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from conftest import BACKEND

START = ([1.0, -2.0, 3.0], [0.5, 0.25])
GRADIENTS = ([0.5, -0.25, 2.0], [1.0, -4.0])


def variables(start: Sequence[Sequence[float]] = START, dtype: str = "float32") -> list[Any]:
    return [keras.Variable(np.array(value, dtype), name=f"weight_{at}") for at, value in enumerate(start)]


def tensor(value: Any, dtype: str = "float32") -> Any:
    return keras.ops.convert_to_tensor(np.asarray(value), dtype)


@contextlib.contextmanager
def no_gradients() -> Iterator[None]:
    if BACKEND != "torch":
        yield
        return
    import torch

    with torch.no_grad():
        yield


def step(
    optimizer: Any, weights: Sequence[Any], gradients: Sequence[Any] = GRADIENTS, *, bad: float | None = None
) -> None:
    """One eager step with these gradients, given unscaled; `bad` (NaN or infinity) is put in the last one's place."""
    scaled = [None if g is None else keras.ops.multiply(tensor(g), optimizer.scale) for g in gradients]
    if bad is not None:
        scaled[-1] = tensor(np.full(np.shape(gradients[-1]), bad))
    with no_gradients():
        optimizer.apply(scaled, weights)


def values(*held: Any) -> list[list[float]]:
    """Of all these variables and optimizers the values, to compare bit by bit."""
    flat = [each for one in held for each in (getattr(one, "variables", None) or [one])]
    return [keras.ops.convert_to_numpy(each.value).ravel().tolist() for each in flat]


class OwnStep(keras.Model):  # type: ignore[misc]
    """Takes the gradients and applies them itself, and never tells Keras's loss tracker."""

    def __init__(self, **head: Any) -> None:
        super().__init__(name="net")
        self.body = keras.layers.Dense(4, name="body")
        self.head = keras.layers.Dense(1, name="head", **head)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x))

    def _loss(self, made: Any, y: Any) -> Any:
        return keras.ops.mean((keras.ops.cast(made, "float32") - y) ** 2)

    def step_with(self, optimizer: Any, x: Any, y: Any, factor: float = 1.0) -> Any:
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self._loss(self(x, training=True), y)
                scaled = optimizer.scale_loss(loss) * factor
            weights = self.trainable_variables
            optimizer.apply(tape.gradient(scaled, weights), weights)
            return loss
        self.zero_grad()
        loss = self._loss(self(x, training=True), y)
        (optimizer.scale_loss(loss) * factor).backward()
        with no_gradients():
            weights = self.trainable_variables
            optimizer.apply([one.value.grad for one in weights], weights)
        return loss

    def jax_step(self, state: Any, batch: Any) -> Any:
        import jax

        weights, others, held, metrics = state

        def loss_of(weights: Any, others: Any) -> Any:
            made, others = self.stateless_call(weights, others, batch[0], training=True)
            loss = self._loss(made, batch[1])
            return self.optimizer.stateless_scale_loss(held, loss), (loss, others)

        (_, (loss, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others)
        weights, held = self.optimizer.stateless_apply(held, gradients, weights)
        return {"loss": loss}, (weights, others, held, metrics)

    def train_step(self, *args: Any) -> Any:
        if BACKEND == "jax":
            return self.jax_step(*args)
        return {"loss": self.step_with(self.optimizer, *args[0])}
