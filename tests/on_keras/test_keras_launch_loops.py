"""Training loops of a Keras script's own: their losses and updates, as each backend writes such a loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from keras_launching import Ran, launcher
from test_keras_launch import LINEAR, naive_losses

from conftest import BACKEND

# A loop over the batches of LINEAR; COMPILE and SCALE are filled in.
LOOPS = {
    "tensorflow": """
import tensorflow as tf
loss_fn = keras.losses.MeanSquaredError()
COMPILE
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
        scaled = SCALE(loss)
    optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
for k in range(4):
    step(tf.constant(x[10 * k : 10 * k + 10]), tf.constant(y[10 * k : 10 * k + 10]))
""",
    "torch": """
import torch
loss_fn = keras.losses.MeanSquaredError()
def step(x, y):
    model.zero_grad()
    loss = loss_fn(torch.from_numpy(y), model(x, training=True))
    SCALE(loss).backward()
    gradients = [v.value.grad for v in model.trainable_variables]
    with torch.no_grad():
        optimizer.apply(gradients, model.trainable_variables)
for k in range(4):
    step(x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10])
""",
    "jax": """
import jax
loss_fn = keras.losses.MeanSquaredError()
optimizer.build(model.trainable_variables)
def compute(weights, others, state, x, y):
    predicted, others = model.stateless_call(weights, others, x, training=True)
    loss = loss_fn(y, predicted)
    return SCALE(loss), others
gradient = jax.value_and_grad(compute, has_aux=True)
COMPILE
def step(weights, others, state, x, y):
    (loss, others), gradients = gradient(weights, others, state, x, y)
    weights, state = optimizer.stateless_apply(state, gradients, weights)
    return weights, others, state
held = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
held = (*held, [v.value for v in optimizer.variables])
for k in range(4):
    held = step(*held, x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10])
jax.block_until_ready(held)
""",
}
COMPILE = {"tensorflow": "@tf.function", "jax": "@jax.jit"}
PLAIN = "optimizer = keras.optimizers.SGD(0.05)\n"
WRAPPED = (
    "import mezzo.keras\noptimizer = mezzo.keras.LossScaleOptimizer(keras.optimizers.SGD(0.05), 1024.0)\n"
)


def loop(*, compiled: bool = False, wrapped: bool = False) -> str:
    """The script."""
    body = LOOPS[BACKEND].replace("COMPILE", COMPILE[BACKEND] if compiled else "")
    if BACKEND == "jax":
        body = body.replace(
            "SCALE(loss)", "optimizer.stateless_scale_loss(state, loss)" if wrapped else "loss"
        )
    else:
        body = body.replace("SCALE", "optimizer.scale_loss" if wrapped else "")
    return LINEAR + (WRAPPED if wrapped else PLAIN) + body


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a script under a policy in this process."""
    return launcher(tmp_path, capsys)


@pytest.mark.parametrize("compiled", [False, True] if BACKEND in COMPILE else [False])
def test_losses_and_updates_are_recorded(launch: Callable[..., Ran], compiled: bool) -> None:
    ran = launch(loop(compiled=compiled), policy="fp32", observe=True)
    assert ran.status == 0, ran.err
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(4), rtol=1e-5)
    assert [(one.optimizer, one.moved, one.loss_scale) for one in ran.of("update")] == [(0, True, 1.0)] * 4
    assert ran.of("memory")


def test_float16_without_a_loss_scale_is_told(launch: Callable[..., Ran]) -> None:
    ran = launch(loop(), policy="fp16")
    assert "its gradients are not scaled" in ran.notes
    assert "not scaled" not in launch(loop(), policy="bf16").notes


@pytest.mark.parametrize("compiled", [False, True] if BACKEND in COMPILE else [False])
def test_a_loss_that_the_script_scales_is_recorded_unscaled(
    launch: Callable[..., Ran], compiled: bool
) -> None:
    ran = launch(loop(compiled=compiled, wrapped=True), policy="fp32")
    assert ran.status == 0, ran.err
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(4), rtol=1e-5)
    updates = ran.of("update")
    assert [(one.optimizer, one.moved, one.loss_scale) for one in updates] == [(0, True, 1024.0)] * 4


@pytest.mark.skipif(BACKEND != "torch", reason="torch's optimizers step on the torch backend")
def test_torch_optimizers_of_a_keras_model_are_seen(launch: Callable[..., Ran]) -> None:
    ran = launch(
        LINEAR
        + """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for k in range(4):
    loss = ((model(x[10*k:10*k+10]) - torch.from_numpy(y[10*k:10*k+10])) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
        policy="fp32",
    )
    np.testing.assert_allclose([one.loss for one in ran.of("loss")], naive_losses(4), rtol=1e-5)
    assert len(ran.of("update")) == 4
