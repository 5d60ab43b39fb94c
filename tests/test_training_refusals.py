"""MixedPrecision: what is refused, each with its mend."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.core.errors import (
    CallOrderError,
    UnknownNameError,
    UsageError,
)
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    Waits,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)


def make(
    model: nn.Module | None = None, optimizer: Any = None, precision: str = "fp16", **arguments: Any
) -> Any:
    model = network() if model is None else model
    optimizer = OPTIMIZERS["sgd"](model.parameters()) if optimizer is None else optimizer(model)
    return mezzo.MixedPrecision(model, optimizer, precision, **arguments)


STRANGER = nn.Linear(2, 2)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no parameters": (
        {"model": nn.Tanh(), "optimizer": lambda m: OPTIMIZERS["sgd"](STRANGER.parameters())},
        UsageError,
        "no parameters",
    ),
    "no module": (
        {"model": 3, "optimizer": lambda m: OPTIMIZERS["sgd"](STRANGER.parameters())},
        UsageError,
        "give a torch.nn.Module",
    ),
    "no optimizer": (
        {"optimizer": lambda m: [OPTIMIZERS["sgd"](m.parameters())]},
        UsageError,
        "give a torch.optim.Optimizer",
    ),
    "another's optimizer": (
        {"optimizer": lambda m: OPTIMIZERS["sgd"](STRANGER.parameters())},
        UsageError,
        "belongs to this",
    ),
    "lbfgs": ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, UsageError, "mezzo.GradScaler"),
    "half model": ({"model": nn.Linear(2, 2).half()}, UsageError, "keep the model FP32"),
    "unknown precision": ({"precision": "f16"}, UnknownNameError, "Did you mean"),
    "16-bit parameters": (
        {"precision": "params=bf16,compute=fp32"},
        UsageError,
        "Use compute=bf16",
    ),
    "clip_norm": ({"clip_norm": 0.0}, UsageError, "clip_norm is 0.0"),
    "clip_value": ({"clip_value": NAN}, UsageError, "clip_value is nan"),
    "accumulate": ({"accumulate": 0}, UsageError, "accumulate is 0"),
    "watch": ({"watch": -1, "weights": "split"}, UsageError, "watch is -1"),
    "watch, in parts": ({"watch": 0.5}, UsageError, "watch is 0.5"),
    "watch, in words": ({"watch": "yes"}, UsageError, "watch is 'yes'; give True, False, or the updates"),
    "trace, in words": ({"trace": "yes"}, UsageError, "trace is 'yes'; give True"),
    "trace, a number": ({"trace": 1}, UsageError, "trace is 1; give True"),
    "records, a path": ({"records": "run.jsonl"}, UsageError, "records is 'run.jsonl'; give a RecordWriter"),
    "accumulate float": ({"accumulate": 2.0}, UsageError, "accumulate is 2.0"),
    "scheduler": ({"scheduler": 3}, UsageError, "has no step"),
    "ema": ({"ema": 3}, UsageError, "update_parameters"),
    "loss scale": ({"loss_scale": -1.0}, UsageError, "scale is -1"),
    "loss scale, a word": ({"loss_scale": "dynamc"}, UsageError, "MixedPrecision: loss_scale: "),
    "loss scale, True": ({"loss_scale": True}, UsageError, r'loss_scale is True; give .* or "dynamic"'),
    "loss scale, its class": ({"loss_scale": mezzo.DynamicLossScale}, UsageError, "loss_scale is <class"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_can_not_be_trained_is_refused_with_its_mend(row: str) -> None:
    arguments, error, message = REFUSED[row]
    with pytest.raises(error, match=message):
        make(**arguments)


def test_a_plateau_scheduler_is_refused() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(UsageError, match=r"result\.moved"):
        mezzo.MixedPrecision(
            model, optimizer, "fp16", scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.0, "is a float"),
        (torch.ones(2, requires_grad=True), "reduce it to one number"),
        (torch.ones(()), "needs no gradient"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "real floating"),
        (torch.ones((), requires_grad=True) * 2, "depends on no parameter"),
    ],
)
def test_losses_that_backward_can_not_start_from(loss: Any, message: str) -> None:
    mp = make()
    with pytest.raises(UsageError, match=message):
        mp.step(loss)
    assert run(mp).moved


def test_shared_parameters_are_refused_until_the_other_is_closed_or_gone() -> None:
    model = network()
    first = make(model)
    with pytest.raises(UsageError, match="already has some of these parameters"):
        make(model)
    first.close()
    second = make(model)
    del second
    make(model)


def test_flush_before_any_step_is_an_error() -> None:
    with pytest.raises(CallOrderError, match=r"mp\.step\(loss\)"):
        make().flush()


def test_frozen_parameters_are_an_error_and_thawed_ones_train() -> None:
    model = network()
    mp = make(model)
    x = torch.ones(2, 4, requires_grad=True)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        mp.step(model(x).sum())
    model[3].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    assert mp.step(model(x).sum()).moved
    assert not torch.equal(before["3.bias"], model[3].bias)
    assert torch.equal(before["0.bias"], model[0].bias)
    assert x.grad is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamic", mezzo.DynamicLossScale()),
        ("dynamic(init=1024)", mezzo.DynamicLossScale(init=1024.0)),
        ("2**10", mezzo.StaticLossScale(1024.0)),
    ],
)
def test_a_loss_scale_may_be_written_as_a_policy_writes_it(text: str, expected: Any) -> None:
    net = network()
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=text)
    assert mp._in_force.machine.on_host() == expected
    mp.close()
