"""The reference of the whole step: against scalar arithmetic, and what it must not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import patterns
import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master
from mezzo.pytorch.optim.optimizers import adam_hyper, sgd_hyper

MAKE: dict[str, Callable[..., Hyper]] = {"adam": adam_hyper, "sgd": sgd_hyper}
ADAM = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "decoupled": True}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adam", ADAM),
    "adam": ("adam", {**ADAM, "beta1": 0.8, "weight_decay": 0.1, "decoupled": False, "maximize": True}),
    "adam without decay": ("adam", {**ADAM, "beta1": 0.0, "weight_decay": 0.0, "decoupled": False}),
    "sgd": ("sgd", SGD),
    "sgd with momentum": ("sgd", {**SGD, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": ("sgd", {**SGD, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
}
HYPERS = {name: MAKE[family](**settings) for name, (family, settings) in SETTINGS.items()}
RULES = pytest.mark.parametrize("rule", sorted(HYPERS))
MASTERS = pytest.mark.parametrize("masters", sorted(cases.WEIGHTS))


def row(values: Tensor, hyper: Hyper, masters: str = "own", state: str = "fp32", ordinal: int = 0) -> Row:
    """A row of a parameter with these values, as far as its weight's format has them, that was never stepped."""
    made = cases.row(hyper, (masters, state, torch.float32), len(values), ordinal)
    made.weight.copy_(values)
    if made.master is not None:
        made.master.copy_(made.weight if made.master.is_floating_point() else torch.zeros(()))
    return made


def step(hyper: Hyper, grad: Tensor, *rows: Row, **tensors: Tensor) -> None:
    for each in rows:
        each.grad = grad
    cases.reference_move(hyper, rows, **tensors)


def gradients(count: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, generator=generator) * torch.logspace(-6, 1, count) for _ in range(steps)]


def start(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(99)) * 0.3


# Scalar arithmetic: Python's, rounded to FP32 after every operation.


def f(x: float) -> float:
    """To FP32. One FP64 operation and this is one FP32 operation: 53 bits are more than twice 24 and 2."""
    return patterns.to_fp32(x)


def scalar_adam(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    lr, beta1, beta2, decay = h["lr"], h["beta1"], h["beta2"], h["weight_decay"]
    if h["decoupled"]:
        w = f(w * f(1 - lr * decay))
    elif decay:
        g = patterns.fma(f(decay), w, g)
    m = f(s[0] + f(f(1 - beta1) * f(g - s[0])))
    v = f(f(f(beta2) * s[1]) + f(f(f(1 - beta2) * g) * g))
    down = f(f(f(math.sqrt(v)) * f(1 / math.sqrt(1 - beta2**t))) + f(h["eps"]))
    return f(w - f(f(f(lr / (1 - beta1**t)) * m) / down)), [m, v]


def scalar_sgd(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    if h["weight_decay"]:
        g = patterns.fma(f(h["weight_decay"]), w, g)
    if h["momentum"]:
        b = g if t == 1 else patterns.fma(f(1 - h["dampening"]), g, f(f(h["momentum"]) * s[0]))
        g = patterns.fma(f(h["momentum"]), b, g) if h["nesterov"] else b
        s = [b]
    return patterns.fma(-f(h["lr"]), g, w), s


SCALAR = {"adam": scalar_adam, "sgd": scalar_sgd}


@RULES
@pytest.mark.parametrize("scaled", [False, True])
def test_every_bit_is_that_of_scalar_arithmetic(rule: str, scaled: bool) -> None:
    hyper, count = HYPERS[rule], 40
    family, settings = SETTINGS[rule]
    values = start(count)
    values[:3] = torch.tensor([0.0, 1e-40, 1e30])
    ours = row(values, hyper)
    tensors = {"multiplier": torch.tensor(0.37)} if scaled else {}
    ws, states = values.tolist(), [[0.0] * len(hyper.states)] * count
    for t, grad in enumerate(gradients(count, 4), start=1):
        grad[5] = 0.0
        step(hyper, grad, ours, **tensors)
        for i, g in enumerate(grad.tolist()):
            g = f(g * f(0.37)) if scaled else g
            g = -g if hyper.maximize else g
            ws[i], states[i] = SCALAR[family](ws[i], g, states[i], t, settings)
        assert ours.weight.tolist() == ws
        assert [s.tolist() for s in ours.states] == [list(column) for column in zip(*states)]
    assert float(ours.step) == 4


@MASTERS
def test_small_steps_are_not_lost(masters: str) -> None:
    hyper = sgd_hyper(1e-3)
    ours = row(torch.ones(20_000), hyper, masters)
    for _ in range(20):
        step(hyper, torch.ones(20_000), ours)
    exact = decode_master(ours.masters, ours.weight, ours.master)
    assert float(ours.weight.float().mean()) == pytest.approx(0.98, abs=2e-3 if masters != "none" else 1e-3)
    assert float(exact.mean()) == pytest.approx(0.98, abs=3e-4 if masters == "none" else 1e-5)


@RULES
def test_what_is_not_finite_reaches_its_own_element_alone(rule: str) -> None:
    for bad in (math.nan, math.inf):
        ours = row(start(200), HYPERS[rule], "split")
        grad = gradients(200, 1)[0]
        grad[70] = bad
        step(HYPERS[rule], grad, ours)
        assert ours.weight.isfinite().sum() >= 199
        assert math.isinf(bad) or bool(ours.weight[70].isnan())
