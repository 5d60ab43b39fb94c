"""PyTorch's own modules in a Keras model compute in their layer's format."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from conftest import BACKEND
from mezzo.core.errors import UsageError
from mezzo.keras import LossScaleOptimizer, set_policy

if BACKEND != "torch":
    pytest.skip("PyTorch's modules are on Keras's PyTorch backend", allow_module_level=True)

import torch

X = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Model(keras.Model):
    def __init__(self, body: Any) -> None:
        super().__init__(name="net")
        self.body = body  # Keras wraps a module that is an attribute
        self.head = layers.Dense(1, dtype="float32", name="head")

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


def wrapped(linear: Any) -> Any:
    return layers.TorchModuleWrapper(linear, name="body")


@pytest.mark.parametrize(
    ("wrap", "precision", "dtype"),
    [
        (wrapped, "fp16,loss_scale=1024", torch.float16),
        (lambda linear: linear, "bf16", torch.bfloat16),
        (wrapped, "fp16,module.body=fp32,loss_scale=1024", torch.float32),
    ],
)
def test_a_module_trains_as_the_layer_of_keras_does(wrap: Any, precision: str, dtype: torch.dtype) -> None:
    set_policy(precision)
    own, linear = layers.Dense(8, name="body"), torch.nn.Linear(4, 8)
    theirs, ours = Model(own), Model(wrap(linear))
    for model in (theirs, ours):
        model(X)
    kernel, bias = (one.value.detach().clone() for one in (own.kernel, own.bias))
    linear.load_state_dict({"weight": kernel.T.contiguous(), "bias": bias})
    ours.head.set_weights(theirs.head.get_weights())
    given = ours.body(torch.from_numpy(X))
    assert given.dtype == dtype
    given.sum().backward()
    assert {parameter.grad.dtype for parameter in linear.parameters()} == {torch.float32}
    for model in (ours, theirs):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    moved, expected = linear.weight.detach().T - kernel, own.kernel.value.detach() - kernel
    assert {parameter.dtype for parameter in linear.parameters()} == {torch.float32}
    # Each of six gradients is rounded to the format's 11, 8 or 24 bits, and not at the same places.
    limit = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-20}[dtype]
    assert (moved - expected).abs().max() <= limit * expected.abs().max()
    assert expected.abs().max() > 0.01


def test_a_step_that_is_skipped_leaves_a_modules_parameters() -> None:
    linear = torch.nn.Linear(4, 8)
    model = Model(wrapped(linear))
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.05), initial_scale=2.0**10)
    model.compile(optimizer, "mse")
    losses = model.fit(X, Y, epochs=20, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    before = [parameter.detach().clone() for parameter in linear.parameters()]
    model.fit(np.full_like(X, np.nan), Y, batch_size=16, verbose=0)
    assert int(optimizer.skipped_steps) == 1
    assert int(optimizer.bad_gradients.value.sum()) == len(optimizer.bad_gradients.value) == 4
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(linear.parameters(), before))


def test_an_op_without_16_bits_is_an_error_with_the_fix() -> None:
    class Values(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.dot(x[0], torch.ones(4))[None, None]  # autocast leaves it as it is

    set_policy("fp16")
    with pytest.raises(UsageError, match=r"Values in the layer 'body' cannot compute in float16.*Half"):
        Model(wrapped(Values()))(X)
    set_policy("fp16,module.body=fp32")
    assert Model(wrapped(Values()))(X).dtype == torch.float32
