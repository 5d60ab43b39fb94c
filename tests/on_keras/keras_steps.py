"""What several tests of Keras are made of: steps with given gradients, and a model with a training step of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from conftest import BACKEND
from mezzo.core import records

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


def records_of(kind: str, path: Path | None) -> list[Any]:
    """The records of one kind in a file."""
    assert path is not None
    return [record for record in records.read(path) if record.kind == kind]


class OwnStep(keras.Model):  # type: ignore[misc]
    """Takes the gradients and applies them itself, without Keras's loss tracker; on TensorFlow and PyTorch."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.body = keras.layers.Dense(4, name="body")
        self.head = keras.layers.Dense(1, name="head", dtype="float32")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x))

    def step_with(self, optimizer: Any, x: Any, y: Any, factor: float = 1.0) -> Any:
        """One step with gradients multiplied by `factor`; returns the loss."""
        weights = self.trainable_variables

        def scaled_loss() -> tuple[Any, Any]:
            loss = keras.ops.mean((keras.ops.cast(self(x, training=True), "float32") - y) ** 2)
            return loss, optimizer.scale_loss(loss) * factor

        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss, scaled = scaled_loss()
            optimizer.apply(tape.gradient(scaled, [weight.value for weight in weights]), weights)
            return loss
        self.zero_grad()
        loss, scaled = scaled_loss()
        scaled.backward()
        with no_gradients():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        return loss.detach()

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.step_with(self.optimizer, *batch)}
