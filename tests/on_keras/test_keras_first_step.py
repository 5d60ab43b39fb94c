"""What is told of a model at its first step, under which plan it is compiled, and what `add_loss` adds in 16 bits."""

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
from mezzo.core.loss_scale import StaticLossScale
from mezzo.keras import LossScaleOptimizer, PolicyWarning, SixteenBitOutputWarning, policy, set_policy

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


@pytest.mark.every_backend
def test_a_pattern_that_names_no_layer_is_told_after_the_first_step() -> None:
    model = made("fp16,module.head=fp32,module.boddy=fp32")
    with pytest.raises(UnknownNameError, match=r"module\.boddy names no layer .* Did you mean 'body'\?"):
        model.fit(X, Y, verbose=0)


@pytest.mark.every_backend
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


class Late(keras.Model):
    """Whose layers are not known at `compile`."""

    def __init__(self) -> None:
        super().__init__(name="late")
        self.head = layers.Dense(1, name="head", dtype="float32")
        self.body = layers.Dense(4, name="body")

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


def test_a_plan_that_was_left_is_not_looked_for() -> None:
    set_policy("fp16,module.boddy=fp32")
    model = Late()
    model.compile("sgd", "mse")
    model(X)
    set_policy("fp32")
    assert not policy._CALLED
    set_policy("fp16")
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("then", ["fp32", "bf16,module.head=fp32,loss_scale=2"])
def test_a_compile_that_someone_kept_acts_under_its_own_plan_alone(then: str) -> None:
    set_policy("fp16,module.head=fp32")
    kept = keras.Model.compile
    set_policy(then)
    keras.config.set_dtype_policy("mixed_float16")
    model = Late()
    model(X)
    # What it calls in turn is Keras's own, which scales float16 in its own way.
    kept(model, "sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


def test_a_model_is_compiled_under_the_plan_that_it_was_made_under() -> None:
    set_policy("fp16,module.head=fp32,loss_scale=32")
    model = Late()
    model(X)
    set_policy("bf16,loss_scale=2")
    model.compile("sgd", "mse")
    assert model.optimizer.machine() == StaticLossScale(32.0)


def test_without_an_optimizer_it_is_the_one_of_keras() -> None:
    set_policy("fp16")
    model = Late()
    model.compile(loss="mse")
    assert type(model.optimizer.inner_optimizer).__name__ == "RMSprop"


class Growing(keras.Model):
    """Whose 16-bit weights, or layers, are made when it is built."""

    def __init__(self, what: str) -> None:
        super().__init__(name="growing")
        self.what = what
        if what == "layers":
            self.head = layers.Dense(1, name="head", dtype="float32")

    def build(self, shape: Any) -> None:
        if self.what == "layers":
            self.body = layers.Dense(4, name="body")
        else:
            self.kernel = self.add_weight(shape=(4, 1), name="kernel")

    def call(self, x: Any) -> Any:
        return self.head(self.body(x)) if self.what == "layers" else x @ self.kernel


@pytest.mark.every_backend
@pytest.mark.parametrize("what", ["layers", "weights"])
@pytest.mark.parametrize("built", [True, False])
def test_the_loss_of_a_model_is_scaled_before_it_has_its_layers(what: str, built: bool) -> None:
    set_policy("fp16")
    model = Growing(what)
    if built:
        model(X)
    model.compile("sgd")
    assert type(model.optimizer) is LossScaleOptimizer


def test_the_loss_of_layers_in_fp32_is_not_scaled() -> None:
    set_policy("fp16")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype="float32")])
    with pytest.warns(PolicyWarning, match="no layer"):
        model.compile("sgd", "mse")
    assert not isinstance(model.optimizer, LossScaleOptimizer)
    set_policy("fp32,module.critic=fp16")
    critic = keras.Sequential([keras.Input((4,)), layers.Dense(1)], name="critic")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)], name="actor")
    model.compile("sgd", "mse")
    assert not isinstance(model.optimizer, LossScaleOptimizer)
    critic.compile("sgd")
    assert isinstance(critic.optimizer, LossScaleOptimizer)


def test_compiled_before_and_after_it_is_built_a_model_is_told_once() -> None:
    set_policy("fp16")
    model = keras.Sequential([layers.Dense(1, name="head")], name="net")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SixteenBitOutputWarning)
        model.compile("sgd", "mse")
        model(X)
        model.compile("sgd", "mse")
        model.train_on_batch(X, Y)
    assert [each.category for each in found].count(SixteenBitOutputWarning) == 1


@pytest.mark.every_backend
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
