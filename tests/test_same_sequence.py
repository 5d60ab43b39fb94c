"""The cases that every framework is tested with, on PyTorch: the table of events, and the one training task.

Keras and TensorFlow: `on_keras/test_keras_fit.py`, `on_tensorflow/test_tf_rewrite.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.parametrize(("settings", "events"), [row[:2] for row in TABLE if row[1]], ids=str)
@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_the_table(make: str, settings: dict[str, Any], events: str, decides: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pure: Any = DynamicLossScale(**settings)
    names = ("growth_factor", "backoff_factor", "growth_interval", "floor", "ceiling", "hysteresis")
    scaler = mezzo.GradScaler(init_scale=pure.init, **{name: getattr(pure, name) for name in names})
    mp = None if make == "GradScaler" else mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=pure)
    seen, expected = [], []
    for event in events:
        pure = pure.next(Observation(event == "x"))
        expected.append(pure.scale)
        loss = (model.weight * torch.tensor([[1.0, float("inf") if event == "x" else -3.0]])).sum()
        if mp is None:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            mp.step(loss)
        seen.append(scaler.get_scale() if mp is None else mp.loss_scale)
    assert seen == expected


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


def batches() -> Iterator[tuple[Tensor, ...]]:
    given = one_task.task()
    return zip(*map(torch.from_numpy, (given.x, given.target, given.z.copy())))


def loss_of(model: Any, x: Tensor, target: Tensor, z: Tensor) -> Tensor:
    out, fuse = model(x, z)
    return one_task.PART_OF_ERROR * (out.float() - target).square().mean() + fuse.float().mean()


def trained(make: str, precision: str) -> tuple[list[float], list[float]]:
    model, pure = Task(), one_task.LOSS_SCALE
    optimizer = torch.optim.SGD(model.parameters(), lr=one_task.LEARNING_RATE, momentum=one_task.MOMENTUM)
    losses, scales = [], []
    mp: Any = None
    if make == "MixedPrecision":
        mp = mezzo.MixedPrecision(model, optimizer, precision, loss_scale=one_task.loss_scale(precision))
    scaler = mezzo.GradScaler(
        init_scale=pure.init,
        growth_interval=pure.growth_interval,
        ceiling=pure.ceiling,
        enabled=precision == "fp16",
    )
    for batch in batches():
        optimizer.zero_grad()
        with mezzo.autocast(precision) if mp is None else mp.autocast():
            loss = loss_of(model, *batch)
        if mp is None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            mp.step(loss)
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale() if mp is None else mp.loss_scale)
    return losses, scales


@pytest.mark.parametrize("precision", one_task.FORMATS)
@pytest.mark.parametrize("make", ["GradScaler", "MixedPrecision"])
def test_the_task(make: str, precision: str, decides: str) -> None:
    one_task.check(precision, *trained(make, precision))
