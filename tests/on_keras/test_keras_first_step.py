"""What is told of a model whose `train_step` asks Keras for no loss, and what `add_loss` adds in 16 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from conftest import BACKEND
from mezzo.core.errors import UnknownNameError
from mezzo.keras import SixteenBitOutputWarning, set_policy

X = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    set_policy("fp32")


class Own(keras.Model):
    """A step in the backend's own words."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(name="net")
        self.body = layers.Dense(4, name="body")
        self.head = layers.Dense(1, name="head", **arguments)

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))

    if BACKEND == "tensorflow":

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(self(x), "float32") - y) ** 2)
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    elif BACKEND == "jax":

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, others, of_optimizer, of_metrics = state
            x, y = data

            def scaled(trainable: Any, others: Any) -> Any:
                given, others = self.stateless_call(trainable, others, x)
                loss = ((given.astype("float32") - y) ** 2).mean()
                return self.optimizer.stateless_scale_loss(of_optimizer, loss), (loss, others)

            (_, (loss, others)), gradients = jax.value_and_grad(scaled, has_aux=True)(trainable, others)
            trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
            return {"loss": loss}, (trainable, others, of_optimizer, of_metrics)

    else:

        def train_step(self, data: Any) -> Any:
            import torch

            x, y = data
            self.zero_grad()
            loss = ((self(x).float() - y) ** 2).mean()
            self.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                self.optimizer.apply(
                    [v.value.grad for v in self.trainable_variables], self.trainable_variables
                )
            return {"loss": loss}


def made(precision: str, loss: str | None = None, **arguments: Any) -> keras.Model:
    set_policy(precision)
    model = Own(**arguments)
    model.compile("sgd", loss)
    return model


def test_a_pattern_that_names_no_layer_is_told_after_the_first_step() -> None:
    model = made("fp16,module.head=fp32,module.boddy=fp32")
    with pytest.raises(UnknownNameError, match=r"module\.boddy names no layer .* Did you mean 'body'\?"):
        model.fit(X, Y, verbose=0)


def test_a_16_bit_output_is_told_once_after_the_first_step() -> None:
    model = made("fp16", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SixteenBitOutputWarning)
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    (told,) = (str(each.message) for each in found if each.category is SixteenBitOutputWarning)
    assert (
        'keras.layers.Dense(1, dtype="float32", name="head"), or set_policy("fp16,module.head=fp32")' in told
    )


@pytest.mark.parametrize(("loss", "arguments"), [("mse", {"dtype": "float32"}), (None, {})])
def test_what_is_right_is_not_told(loss: str | None, arguments: dict[str, Any]) -> None:
    model = made("fp16", loss, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SixteenBitOutputWarning)
        model.fit(X, Y, verbose=0)


def test_what_add_loss_was_given_in_16_bits_is_summed_in_fp32() -> None:
    class Adding(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.body = layers.Dense(4, name="body", kernel_initializer="ones")
            self.head = layers.Dense(1, name="head", kernel_initializer="zeros")

        def call(self, x: Any) -> Any:
            h = self.body(x)
            assert keras.backend.standardize_dtype(h.dtype) == "float16"
            self.add_loss(keras.ops.mean(h))
            self.add_loss(keras.ops.max(h) * 1e4)  # beyond 65504 together with the loss
            return self.head(h)

    set_policy("fp16,module.head=fp32")
    model = Adding()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.full((2, 4), 1.5, "float32")  # h is 6 everywhere
    history = model.fit(x, np.full((2, 1), 100.0, "float32"), verbose=0).history
    assert history["loss"] == [pytest.approx(10000 + 6 + 60000, rel=2**-11)]
