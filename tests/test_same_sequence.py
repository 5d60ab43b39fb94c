"""The cases that every framework is tested with, on PyTorch: the table of events, and the one training task.

Keras and TensorFlow: `on_keras/test_keras_fit.py`, `on_tensorflow/test_tf_rewrite.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import one_task
from mezzo.core.loss_scale import DynamicLossScale, Observation
from scale_cases import TABLE
from training_steps import nobody_owns_anything, who_decides  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows


class Stepper:
    """One step after another with a `GradScaler` or a `MixedPrecision`."""

    def __init__(self, make: str, model: nn.Module, precision: str, pure: Any, momentum: float = 0.0) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=one_task.LEARNING_RATE, momentum=momentum)
        names = ("growth_factor", "backoff_factor", "growth_interval", "floor", "ceiling", "hysteresis")
        self.optimizer, self.precision, self.mp = optimizer, precision, None
        if make == "MixedPrecision":
            self.mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=pure)
        elif precision == "fp16":
            settings = {name: getattr(pure, name) for name in names}
            self.scaler = mezzo.GradScaler(init_scale=pure.init, **settings)
        else:
            self.scaler = mezzo.GradScaler(enabled=False)

    def autocast(self) -> Any:
        return self.mp.autocast() if self.mp else mezzo.autocast(self.precision)

    def step(self, loss: Tensor) -> float:
        """The scale that follows."""
        if self.mp:
            self.mp.step(loss)
            return self.mp.loss_scale
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize(("settings", "events"), [row[:2] for row in TABLE if row[1]], ids=str)
@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_the_table(make: str, settings: dict[str, Any], events: str, decides: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    pure: Any = DynamicLossScale(**settings)
    stepper = Stepper(make, model, "fp16", pure)
    for event in events:
        pure = pure.next(Observation(event == "x"))
        loss = (model.weight * torch.tensor([[1.0, float("inf") if event == "x" else -3.0]])).sum()
        assert stepper.step(loss) == pure.scale


class Task(nn.Module):
    """The task's perceptron and its fuse, with the task's first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(one_task.FEATURES, one_task.HIDDEN)
        self.second = nn.Linear(one_task.HIDDEN, one_task.OUT)
        self.fuse = nn.Linear(1, 1, bias=False)
        w = {name: torch.from_numpy(value.T.copy()) for name, value in one_task.task().weights.items()}
        self.first.load_state_dict({"weight": w["w1"], "bias": w["b1"]})
        self.second.load_state_dict({"weight": w["w2"], "bias": w["b2"]})
        self.fuse.load_state_dict({"weight": w["v"]})

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(torch.tanh(self.first(x))), self.fuse(z)


@pytest.mark.parametrize("precision", one_task.FORMATS)
@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_the_task(make: str, precision: str, decides: str) -> None:
    model, given = Task(), one_task.task()
    stepper = Stepper(make, model, precision, one_task.loss_scale(precision), one_task.MOMENTUM)
    losses, scales = [], []
    for x, target, z in zip(*map(torch.from_numpy, (given.x, given.target, given.z.copy()))):
        with stepper.autocast():
            out, fuse = model(x, z)
            loss = one_task.PART_OF_ERROR * (out.float() - target).square().mean() + fuse.float().mean()
        scales.append(stepper.step(loss))
        losses.append(float(loss.detach()))
    one_task.check(precision, losses, scales)
