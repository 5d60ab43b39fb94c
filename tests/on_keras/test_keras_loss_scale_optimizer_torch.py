"""LossScaleOptimizer on PyTorch: the step during which the host waits for nothing, torch modules, compiled steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras_steps import GRADIENTS, no_gradients, step, tensor, values, variables

from conftest import BACKEND
from mezzo.core.errors import LossScaleCollapseError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.keras import LossScaleOptimizer
from mezzo.keras import gradients as gradients_module
from mezzo.keras import loss_scale_optimizer as optimizer_module

if BACKEND != "torch":
    pytest.skip("the PyTorch backend alone", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.every_backend

INF = math.inf


class NoReading(TorchDispatchMode):
    """Fails where the host would wait for an accelerator: a tensor's value read, its shape made to depend on values."""

    READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in self.READS, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for accelerators, taken on this CPU."""
    for module in (gradients_module, optimizer_module):
        monkeypatch.setattr(module, "reading_is_free", lambda tensor: False)


def sgd(**settings: Any) -> Any:
    return keras.optimizers.SGD(0.5, **settings)


# An optimizer, and whether Keras's own step of it reads from the device.
INNER: dict[str, tuple[Callable[[], Any], bool]] = {
    "sgd": (lambda: sgd(momentum=0.9, weight_decay=0.01), True),
    "adam": (lambda: keras.optimizers.Adam(0.1, amsgrad=True, weight_decay=0.01), False),
    "adamw, global_clipnorm": (lambda: keras.optimizers.AdamW(0.1, global_clipnorm=1.0), False),
    "nadam, clipnorm": (lambda: keras.optimizers.Nadam(0.1, clipnorm=1.0), False),
    "rmsprop": (lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True), False),
    "lion, clipvalue": (lambda: keras.optimizers.Lion(0.1, clipvalue=1.0), False),
    "ema": (lambda: keras.optimizers.Adam(0.1, use_ema=True), False),
    "ema, written back": (lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2), True),
    "accumulation": (lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2), True),
}


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


@pytest.mark.parametrize(("make", "reads"), INNER.values(), ids=INNER)
def test_the_path_without_reading_equals_the_branching_one(
    make: Callable[[], Any], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ".x..xx..."
    branching = weights_after(make, events, contextlib.nullcontext())
    for module in (gradients_module, optimizer_module):
        monkeypatch.setattr(module, "reading_is_free", lambda tensor: False)
    assert weights_after(make, events, contextlib.nullcontext()) == branching
    if not reads:
        assert weights_after(make, events, NoReading()) == branching
        return
    with pytest.raises(
        AssertionError, match="makes the host wait"
    ):  # and so does Keras's optimizer by itself
        weights_after(make, events, NoReading())
    plain, weights = make(), variables()
    plain.build(weights)
    with pytest.raises(AssertionError, match="makes the host wait"), no_gradients(), NoReading():
        plain.apply([tensor(gradient) for gradient in GRADIENTS], weights)


def test_the_branching_path_copies_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "_put_back", None)
    weights = variables()
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build(weights)
    held = [variable.value.data_ptr() for variable in (*weights, *optimizer.variables)]

    class NoCopies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies = func.__name__.split(".")[0] in ("clone", "_to_copy")
            assert not (copies and args[0].data_ptr() in held[: len(weights)]), func
            return func(*args, **(kwargs or {}))

    with NoCopies():
        step(optimizer, weights)
    assert [variable.value.data_ptr() for variable in (*weights, *optimizer.variables)] == held


def test_gradients_one_by_one_equal_those_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """`unscale_together` against its specification, with NaN, infinities and formats mixed."""
    from mezzo.keras.gradients import unscale

    weights = [
        *variables([[1.0, 1.0]] * 5),
        *variables([[1.0, 1.0]] * 4, "float16"),
        *variables([[1.0, 1.0]], "bfloat16"),
        *variables([[1.0, 1.0]], "float64"),
    ]
    weights[4].overwrite_with_gradient = True
    gradients = [
        *map(tensor, ([1.0, 2.0], [math.nan, 1.0], [1.0, -INF], [INF, math.nan], [3.0, 4.0])),
        *(tensor(g, "float16") for g in ([300.0, 2.0**-20], [INF, 0.0], [65504.0, 0.0])),
        None,
        tensor([1.0, 3e38], "bfloat16"),
        tensor([1e300, 1.0], "float64"),
    ]
    for scale in (2.0**-10, 3.0, 2.0**16):
        for again in (False, True):
            arguments = (gradients, weights, tensor(scale))
            together = unscale(*arguments, in_variables_format=again)
            for at, gradient in enumerate(gradients):  # alone, too: None alone, one that overwrites alone
                one, found = unscale([gradient], [weights[at]], tensor(scale), in_variables_format=again)
                torch.testing.assert_close(one[0], together[0][at], rtol=0, atol=0, equal_nan=True)
                assert found == [together[1][at]]
            with monkeypatch.context() as patch:
                patch.setattr(gradients_module, "unscale_together", lambda *_: None)
                singly = unscale(*arguments, in_variables_format=again)
            for ours, theirs in zip(together[0], singly[0]):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            flags = [
                [None if flag is None else bool(flag) for flag in found] for _, found in (together, singly)
            ]
            assert flags[0] == flags[1]
    assert flags[0] == [False, True, True, True, False, False, True, False, None, False, False]


KERNELS = {
    "dense": ([[1.0]], True),
    "empty": ([torch.zeros(0)], False),
    "integers": ([torch.ones(1, dtype=torch.int32)], False),
    "sparse": ([torch.ones(1).to_sparse()], False),
    "two devices": ([torch.ones(1), torch.ones(1, device="meta")], False),
    "an array": ([np.ones(1, "float32")], False),
}


@pytest.mark.parametrize(("gradients", "taken"), KERNELS.values(), ids=KERNELS)
def test_what_the_kernels_for_lists_are_handed(gradients: list[Any], taken: bool) -> None:
    from mezzo.keras.gradients import unscale_together

    weights = variables([[1.0]] * len(gradients))
    if taken:
        gradients = list(map(tensor, gradients))
    assert (unscale_together(gradients, weights, tensor(2.0), False) is not None) == taken


def test_an_empty_variable_is_no_obstacle() -> None:
    weights = variables([[1.0], []])
    optimizer = LossScaleOptimizer(sgd())
    step(optimizer, weights, [[1.0], []])
    assert values(*weights) == [[0.5], []]


def test_reading_is_free_on_a_cpu_alone() -> None:
    assert gradients_module.reading_is_free(torch.zeros(()))
    assert not gradients_module.reading_is_free(torch.zeros((), device="meta"))


def test_on_an_accelerator_the_patience_is_looked_at_every_50th_step(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# torch's own modules


X = torch.tensor(np.random.default_rng(0).normal(size=(16, 3)), dtype=torch.float32)
Y = X.sum(dim=1, keepdim=True)


def test_a_wrapped_torch_module_in_a_model() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    model = keras.Sequential([keras.layers.TorchModuleWrapper(module), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.05), initial_scale=2.0**10)
    model.compile(optimizer, "mse")
    losses = model.fit(X.numpy(), Y.numpy(), epochs=20, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    before = [parameter.detach().clone() for parameter in module.parameters()]
    model.fit(np.full_like(X.numpy(), np.nan), Y.numpy(), batch_size=16, verbose=0)
    assert int(optimizer.skipped_steps) == 1
    assert int(optimizer.bad_gradients.value.sum()) == len(optimizer.bad_gradients.value) == 4
    for parameter, kept in zip(module.parameters(), before):
        assert torch.equal(parameter, kept)


class Net(torch.nn.Module):
    """A torch module that holds Keras layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
        self.hidden.build((None, 3))
        self.out.build((None, 4))

    def forward(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def test_a_torch_module_of_keras_layers_in_a_custom_loop() -> None:
    net = Net()
    weights = [*net.hidden.trainable_weights, *net.out.trainable_weights]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)
    losses = []
    for at in range(20):
        net.zero_grad()
        loss = ((net(X * (INF if at == 5 else 1)) - Y) ** 2).mean()
        optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert int(optimizer.skipped_steps) == 1


def test_a_compiled_step() -> None:
    """As Dynamo takes it apart; Inductor, which `jit_compile=True` adds, takes half a minute."""
    weights = variables()
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=4.0)
    optimizer.build(weights)
    assert float(optimizer.scale) == 4.0
    compiled = torch.compile(lambda *gradients: optimizer.apply(list(gradients), weights), backend="eager")
    alone = variables()
    plain = keras.optimizers.Adam(0.1)
    for bad in (False, True, False):
        gradients = [tensor(gradient) for gradient in GRADIENTS]
        with no_gradients():
            compiled(*(gradient * (INF if bad else float(optimizer.scale)) for gradient in gradients))
            if not bad:
                plain.apply(gradients, alone)
    assert int(optimizer.skipped_steps) == 1
    assert optimizer.machine() == DynamicLossScale(init=4.0, scale=2.0, good_steps=1)
    np.testing.assert_allclose(np.concatenate(values(*weights)), np.concatenate(values(*alone)), rtol=1e-6)
