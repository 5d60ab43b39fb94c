"""Loss scaling and the optimizers: both GradScalers, multipliers in FP32, steps that are skipped whole."""

from __future__ import annotations

import math

import pytest
import torch

from mezzo.optim import AdamW
from optimizer_steps import (
    MODES,
    SCALERS,
    assert_same,
    everything,
    gradients,
    one,
    parameters,
    run,
)


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
def test_both_grad_scalers_drive_it(scaler: str, unscaled: bool, masters: str) -> None:
    plain, scaled = parameters(shapes=[(65,), (3, 4)]), parameters(shapes=[(65,), (3, 4)])
    left, right = (AdamW(params, lr=0.1, masters=masters, state="int8") for params in (plain, scaled))
    scale = SCALERS[scaler](256.0)
    for step in range(4):
        grads = gradients(step, [(65,), (3, 4)])
        before = everything(right)
        scale.scale(torch.ones(()))
        for param, other, grad in zip(plain, scaled, grads):
            param.grad = grad.clone()
            other.grad = grad * scale.get_scale()
        if step == 2:
            scaled[0].grad[3] = math.inf
        if unscaled:
            scale.unscale_(right)
        scale.step(right)
        scale.update()
        if step == 2:
            assert_same(before, everything(right))
        else:
            left.step()
            assert_same(everything(left), everything(right))
    assert scale.get_scale() == 128
    assert not hasattr(right, "grad_scale")
    assert not hasattr(right, "found_inf")


def test_fp16_gradients_are_unscaled_in_fp32() -> None:
    param, other = one(3, dtype=torch.float16), one(3, dtype=torch.float16)
    tiny = torch.full((3,), 2.0**-30)
    param.grad = (tiny * 2.0**16).half()
    optimizer = AdamW([param], lr=0.1, eps=1e-30)
    optimizer.step(multiplier=torch.tensor(2.0**-16))
    other.grad_dtype = None
    other.grad = tiny
    exact = AdamW([other], lr=0.1, eps=1e-30)
    exact.step()
    assert_same(everything(optimizer), everything(exact))


@pytest.mark.parametrize(("masters", "state"), MODES)
def test_a_step_that_found_an_infinity_changes_nothing(masters: str, state: str) -> None:
    params = parameters()
    optimizer = AdamW(params, lr=0.1, masters=masters, state=state)
    run(optimizer, params, range(2))
    before = everything(optimizer)
    for param in params:
        param.grad = torch.full_like(param, math.nan)
    optimizer.step(found_inf=torch.tensor(1.0))
    assert_same(before, everything(optimizer))
    optimizer.step(found_inf=torch.tensor(0.0))
    assert params[-1].isnan().all()
