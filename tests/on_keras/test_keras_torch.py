"""LossScaleOptimizer on PyTorch: the step during which the host waits for nothing, compiled steps, torch modules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras_steps import GRADIENTS, no_gradients, step, tensor, values, variables

from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.keras import LossScaleOptimizer, set_policy
from mezzo.keras import gradients as gradients_module
from mezzo.keras import loss_scale_optimizer as optimizer_module

if BACKEND != "torch":
    pytest.skip("the PyTorch backend alone", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

INF = math.inf


class NoReading(TorchDispatchMode):
    """Fails where the host would wait for an accelerator: a tensor's value read, its shape made to depend on values."""

    READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in self.READS, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for accelerators, taken on this CPU."""
    for module in (gradients_module, optimizer_module):
        monkeypatch.setattr(module, "reading_is_free", lambda tensor: False)


def sgd() -> Any:
    return keras.optimizers.SGD(0.5)


def adamw() -> Any:
    return keras.optimizers.AdamW(0.1, global_clipnorm=1.0, amsgrad=True)


def accumulating() -> Any:
    """Which reads from the device in Keras's own step."""
    return keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)


def weights_after(make: Callable[[], Any], events: str, mode: Any) -> Any:
    weights = variables([[1.0, -2.0, 3.0, -0.0], [0.5, 0.25]])
    optimizer = LossScaleOptimizer(make(), loss_scale=DynamicLossScale(init=2.0**6, growth_interval=2))
    optimizer.build(weights)
    for event in events:
        gradients = [tensor([0.5, -0.25, 2.0, 0.0]), tensor([1.0, INF if event == "x" else -4.0])]
        scaled = [gradient * optimizer.scale.value for gradient in gradients]
        with no_gradients(), mode:
            optimizer.apply(scaled, weights)
    return values(*weights, optimizer), optimizer.machine()


@pytest.mark.parametrize(("make", "mode"), [(adamw, NoReading), (accumulating, contextlib.nullcontext)])
def test_the_path_without_reading_equals_the_branching_one(make: Any, mode: Any, monkeypatch: Any) -> None:
    events = ".x..xx..."
    branching = weights_after(make, events, contextlib.nullcontext())
    as_on_a_gpu(monkeypatch)
    assert weights_after(make, events, mode()) == branching


def test_on_an_accelerator_the_patience_is_checked_every_50th_step(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    weights = variables()
    optimizer = LossScaleOptimizer(sgd(), loss_scale=StaticLossScale(2.0, patience=3))
    looked = []
    monkeypatch.setattr(LossScaleOptimizer, "check", lambda self: looked.append(int(self.skipped_steps)))
    for _ in range(120):
        step(optimizer, weights, bad=INF)
    assert looked == [50, 100]
    monkeypatch.undo()
    with pytest.raises(LossScaleCollapseError, match="weight_1"):
        optimizer.finalize_variable_values(weights)


def test_a_compiled_step() -> None:
    """As Dynamo takes it apart; Inductor, which `jit_compile=True` adds, takes half a minute."""
    weights, optimizer = variables(), LossScaleOptimizer(sgd(), initial_scale=4.0)
    optimizer.build(weights)
    assert float(optimizer.scale) == 4.0
    compiled = torch.compile(lambda *gradients: optimizer.apply(list(gradients), weights), backend="eager")
    for bad in (False, True, False):
        factor = INF if bad else float(optimizer.scale)
        with no_gradients():
            compiled(*(tensor(gradient) * factor for gradient in GRADIENTS))
    assert optimizer.machine() == DynamicLossScale(init=4.0, scale=2.0, good_steps=1)
    assert values(*weights) == [[0.5, -1.75, 1.0], [-0.5, 4.25]]


# PyTorch's modules in a Keras model compute in their layer's format

X = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Model(keras.Model):
    def __init__(self, body: Any) -> None:
        super().__init__(name="net")
        self.body = body  # Keras wraps a module that is an attribute
        self.head = layers.Dense(1, dtype="float32", name="head")

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


@pytest.mark.parametrize(
    ("named", "precision", "dtype"),
    [
        (True, "fp16,loss_scale=1024", torch.float16),
        (False, "bf16", torch.bfloat16),
        (True, "fp16,module.body=fp32,loss_scale=1024", torch.float32),
    ],
)
def test_a_module_trains_as_the_layer_of_keras_does(named: bool, precision: str, dtype: torch.dtype) -> None:
    set_policy(precision)
    own, linear = layers.Dense(8, name="body"), torch.nn.Linear(4, 8)
    theirs, ours = Model(own), Model(layers.TorchModuleWrapper(linear, name="body") if named else linear)
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


def test_an_op_without_16_bits_is_an_error_with_the_fix() -> None:
    class Values(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.dot(x[0], torch.ones(4))[None, None]  # autocast leaves it as it is

    set_policy("fp16")

    def output() -> Any:
        return Model(layers.TorchModuleWrapper(Values(), name="body"))(X)

    with pytest.raises(UsageError, match=r"Values in the layer 'body' cannot compute in float16.*Half"):
        output()
    set_policy("fp16,module.body=fp32")
    assert output().dtype == torch.float32
