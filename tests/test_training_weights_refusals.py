"""MixedPrecision with 16-bit weights: what is refused, and that nothing has changed then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mezzo
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.pytorch.optim.optimizers import AdamW
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.lowering import lower_weights
from training_modes import ADAMW, made
from training_steps import (  # noqa: F401
    INF,
    NAN,
    OPTIMIZERS,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)


def test_an_average_in_16_bits_is_refused() -> None:
    model = network()
    lower_weights(model, "bf16")
    with pytest.raises(UsageError, match=r"ema\.float\(\)"):
        made("given split", model, ema=AveragedModel(model))
    assert run(made("given split", model, ema=AveragedModel(model).float())).moved


def test_states_of_other_weights_are_refused_but_fp32_goes_on_in_16_bits() -> None:
    split, masters, fp32 = made("split"), made("masters bf16"), made("fp32 int8")
    for mp in (split, masters, fp32):
        run(mp)
    with pytest.raises(
        UsageError, match="weights bf16 with masters=split; here they are bf16 with masters=fp32"
    ):
        masters.load_state_dict(split.state_dict())
    with pytest.raises(UsageError, match="here they are fp32"):
        fp32.load_state_dict(split.state_dict())
    masters.load_state_dict(fp32.state_dict())
    open_window = made("fp32 int8", accumulate=2)
    run(open_window)
    with pytest.raises(UsageError, match="weights fp32; here"):
        made("split", accumulate=2).load_state_dict(open_window.state_dict())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown weights": ({"weights": "spilt"}, UnknownNameError, "Did you mean 'split'"),
    "unknown state": ({"state": "int4"}, UnknownNameError, "Did you mean 'int8'"),
    "split fp16": ({"precision": "fp16", "weights": "split"}, UsageError, "weights='masters'"),
    "split fp32": ({"precision": "fp32", "weights": "split"}, UsageError, "precision='bf16'"),
    "against the policy": (
        {"precision": "bf16,params=bf16", "weights": "split8"},
        UsageError,
        "Leave one of the two out",
    ),
    "fp32 against the policy": (
        {"precision": "bf16,params=bf16", "weights": "fp32"},
        UsageError,
        "Leave one of the two out",
    ),
    "policy computes wider": ({"precision": "fp32,params=bf16"}, UsageError, "compute=bf16"),
    "split rmsprop": (
        {"weights": "split", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "masters",
    ),
    "state rmsprop": (
        {"state": "int8", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "RMSprop",
    ),
    "amsgrad": (
        {"weights": "split", "optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
        UsageError,
        "amsgrad",
    ),
    "other masters": (
        {"weights": "split", "optimizer": lambda p: AdamW(p)},
        UsageError,
        "Make it with masters='split'",
    ),
    "other state": (
        {"weights": "split", "state": "int8", "optimizer": lambda p: AdamW(p, masters="split")},
        UsageError,
        "Make it with state='int8'",
    ),
    "pattern": ({"precision": "bf16,module.head=fp32", "weights": "split"}, UnknownNameError, "matches no"),
    "overrides": (
        {
            "precision": "bf16,module.3=fp32",
            "weights": "split",
            "optimizer": lambda p: torch.optim.RMSprop(p),
        },
        UsageError,
        "with_masters",
    ),
    "release rmsprop": (
        {"release_gradients": True, "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "release_gradients=True steps inside backward",
    ),
    "release rmsprop masters": (
        {"release_gradients": True, "weights": "masters", "optimizer": lambda p: torch.optim.RMSprop(p)},
        UsageError,
        "release_gradients=True steps inside backward",
    ),
    "release clip_value": (
        {"release_gradients": True, "weights": "split", "clip_value": 1.0},
        UsageError,
        "Use clip_norm",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_leaves_model_and_optimizer_as_they_were(row: str) -> None:
    arguments, error, message = REFUSED[row]
    arguments = {"precision": "bf16", "optimizer": ADAMW} | arguments
    model = network()
    optimizer = arguments.pop("optimizer")(model.parameters())
    model(batch()[0]).sum().backward()
    optimizer.step()  # so that there is a state to be left alone
    bits = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    own = dict(vars(optimizer))
    with pytest.raises(error, match=message):
        mezzo.MixedPrecision(model, optimizer, **arguments)
    left = [model.state_dict(), optimizer.state_dict()]
    assert bits[0].keys() == left[0].keys()
    assert all(torch.equal(bits[0][key], left[0][key]) for key in bits[0])
    assert all(left[0][key].dtype is bits[0][key].dtype for key in bits[0])
    for index, entries in bits[1]["state"].items():
        for name, value in entries.items():
            assert torch.equal(left[1]["state"][index][name], value)
    assert {k: v for k, v in vars(optimizer).items() if callable(v)} == {
        k: v for k, v in own.items() if callable(v)
    }
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    optimizer.zero_grad()
    assert run(mezzo.MixedPrecision(model, optimizer, "bf16")).moved


@pytest.mark.parametrize(
    ("convert", "precision", "message"),
    [
        (nn.Module.half, "fp16", "weights='masters'"),
        (nn.Module.bfloat16, "bf16", "split"),
    ],
)
def test_16_bit_parameters_without_masters_are_refused(
    convert: Callable[[nn.Module], nn.Module], precision: str, message: str
) -> None:
    model = convert(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=message):
        mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision)
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), precision, weights="masters")
    with mp.autocast():
        loss = model(torch.ones(1, 2)).mean()
    assert mp.step(loss).moved


def test_masters_do_not_hide_that_an_optimizer_needs_a_closure() -> None:
    model = network()
    lower_weights(model, "bf16")
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        mezzo.MixedPrecision(model, with_masters(torch.optim.LBFGS(model.parameters())), "bf16")


def test_16_bit_parameters_of_another_format_are_refused() -> None:
    model = nn.Linear(2, 2).bfloat16()
    for precision in ("fp32", "fp16"):
        with pytest.raises(UsageError, match="precision='bf16'"):
            mezzo.MixedPrecision(model, AdamW(model.parameters()), precision)
