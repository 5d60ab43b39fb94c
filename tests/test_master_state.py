"""A model's state in FP32: out of every kind of optimizer and back to the bit; what does not fit changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.pytorch.optim.adopt import adopt
from mezzo.pytorch.optim.optimizers import AdamW
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.lowering import has_master, lower_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("apart", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.norm(self.token(x)))))


def adopted(params: Any) -> Any:
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    adopt(optimizer, masters="split", state="fp32")
    return optimizer


def handed_over(params: Any) -> Any:
    optimizer = torch.optim.RMSprop(params, lr=1e-2)
    with_masters(optimizer)
    return optimizer


# Name -> (the weights' format, how the optimizer is made)
OWNERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "split": ("bf16", lambda p: AdamW(p, lr=1e-2, masters="split")),
    "separate": ("bf16", lambda p: AdamW(p, lr=1e-2, masters="fp32")),
    "fp16": ("fp16", lambda p: AdamW(p, lr=1e-2, masters="fp32")),
    "adopted": ("bf16", adopted),
    "with_masters": ("bf16", lambda p: with_masters(torch.optim.RMSprop(p, lr=1e-2))),
    "handed over": ("bf16", handed_over),
    "with_masters fp16": ("fp16", lambda p: with_masters(torch.optim.RMSprop(p, lr=1e-2))),
    "several": (
        "bf16",
        lambda p: [AdamW(p[:2], masters="split"), with_masters(torch.optim.SGD(p[2:], lr=0.1))],
    ),
    "plain torch": ("bf16", lambda p: torch.optim.SGD(p, lr=1e-2)),
    "none": ("bf16", lambda p: []),
}


def made(owner: str, seed: int = 0) -> tuple[Tied, Any]:
    torch.manual_seed(seed)
    model = Tied()
    fmt, make = OWNERS[owner]
    lower_weights(model, fmt)
    return model, make(list(model.parameters()))


def train(model: nn.Module, optimizer: Any, fmt: str, steps: int = 3) -> None:
    for index in range(steps):
        x = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(index))
        with mezzo.autocast(fmt, "cpu"):
            loss = F.cross_entropy(model(x), x)
        model.zero_grad()
        loss.backward()
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()


def equal(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("owner", OWNERS)
def test_before_the_first_step_it_is_the_fp32_model(owner: str) -> None:
    torch.manual_seed(0)
    exact = Tied()
    model, optimizer = made(owner)
    state = mezzo.master_state_dict(model, optimizer)
    assert equal(state, exact.state_dict())
    assert equal(mezzo.master_state_dict(model, optimizer), exact.state_dict()), (
        "reading it takes nothing away"
    )
    assert state["token.weight"] is state["head.weight"]
    assert not any(value.requires_grad for value in state.values())
    assert state["low"].dtype is torch.bfloat16
    exact.load_state_dict(state)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("owner", OWNERS)
def test_it_comes_back_to_the_bit(owner: str, steps: int) -> None:
    model, optimizer = made(owner)
    train(model, optimizer, OWNERS[owner][0], steps)
    state = copy.deepcopy(mezzo.master_state_dict(model, optimizer))
    assert not torch.equal(state["body.weight"], model.body.weight.float()), "a master, not the weight"
    other, resumed = made(owner, seed=1)
    mezzo.load_master_state_dict(other, resumed, state)
    assert equal(of(other), of(model))
    assert equal(mezzo.master_state_dict(other, resumed), state)
    train(model, optimizer, OWNERS[owner][0], 2)
    if steps == 0:  # the moments are not a part of it
        train(other, resumed, OWNERS[owner][0], 2)
        assert equal(mezzo.master_state_dict(other, resumed), mezzo.master_state_dict(model, optimizer))


@pytest.mark.parametrize("owner", ["split", "with_masters"])
def test_masters_are_what_the_next_step_starts_from(owner: str) -> None:
    model, optimizer = made(owner)
    train(model, optimizer, "bf16")
    state = mezzo.master_state_dict(model, optimizer)
    assert state["body.weight"].dtype is torch.float32
    assert not torch.equal(state["body.weight"], model.body.weight.float())
    assert torch.equal(state["body.weight"], optimizer.master(model.body.weight))
    with torch.no_grad():
        model.body.weight.zero_()
    now = mezzo.master_state_dict(model, optimizer)["body.weight"]
    assert now.abs().max() < torch.finfo(torch.float32).tiny  # a remainder that is left over from before


def test_a_16_bit_state_loads_too_and_its_weights_are_the_masters() -> None:
    model, optimizer = made("split")
    state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in Tied().state_dict().items()}
    mezzo.load_master_state_dict(model, optimizer, state)
    got = mezzo.master_state_dict(model, optimizer)
    assert all(torch.equal(got[name].float(), state[name].float()) for name in state)


def test_loading_without_an_optimizer_keeps_the_masters_for_the_next() -> None:
    torch.manual_seed(5)
    state = Tied().state_dict()
    model, _ = made("none")
    mezzo.load_master_state_dict(model, [], state)
    assert has_master(model.body.weight)
    optimizer = AdamW(model.parameters(), masters="split")
    assert torch.equal(optimizer.master(model.body.weight), state["body.weight"])


BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda s: s.pop("body.bias"), r"'body.bias' is missing from the state \(and 0 more\)"),
    (lambda s: s.update(bodi=torch.zeros(1)), r"the model has no 'bodi'"),
    (lambda s: s.update({"body.wieght": torch.zeros(1)}), r"no 'body.wieght'. Did you mean 'body.weight'"),
    (lambda s: s.update({"body.weight": torch.zeros(6, 5)}), r"'body.weight' is \(6, 5\) .* and \(6, 6\)"),
    (lambda s: s.update({"norm.running_var": torch.zeros(2)}), r"'norm.running_var' is \(2,\)"),
    (lambda s: s.update({"body.weight": [1.0]}), r"'body.weight' is list"),
    (lambda s: s.update({"body.bias": torch.full((6,), 3.4e38)}), r"'body.bias' .* overflows its bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
@pytest.mark.parametrize("owner", ["split", "with_masters", "none"])
def test_a_state_that_does_not_fit_changes_nothing(
    owner: str, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    model, optimizer = made(owner)
    before = copy.deepcopy(mezzo.master_state_dict(model, optimizer))
    weights = of(model)
    state = dict(Tied().state_dict())
    change(state)
    with pytest.raises(UsageError, match=f"{message}.*Nothing was changed"):
        mezzo.load_master_state_dict(model, optimizer, state)
    assert equal(of(model), weights)
    assert equal(mezzo.master_state_dict(model, optimizer), before)


def test_something_else_than_an_optimizer_is_refused() -> None:
    model, _ = made("none")
    with pytest.raises(UsageError, match="take an optimizer or several, received str"):
        mezzo.master_state_dict(model, ["adam"])  # type: ignore[list-item]
