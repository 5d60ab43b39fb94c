"""`with_masters`: states that are saved, loaded, copied and pickled, and those that do not fit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mastered import OPTIMIZERS, SignOfMomentum, give_gradients, go_on, masters, model_of, same, trained
from mezzo.core.errors import UsageError
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.lowering import lower_weights


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_goes_on_to_the_bit(name: str, steps: int, order: str) -> None:
    model, optimizer = trained(name, steps)
    states = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
    other = model_of(seed=1)
    lower_weights(other)
    resumed = with_masters(OPTIMIZERS[name](other.parameters()))
    loads = [lambda: other.load_state_dict(states[0]), lambda: resumed.load_state_dict(states[1])]
    for load in loads if order == "model first" else loads[::-1]:
        load()
    assert same(masters(other, resumed), masters(model, optimizer))
    assert same(go_on(other, resumed), go_on(model, optimizer))


def test_a_state_of_the_plain_optimizer_is_taken() -> None:
    exact, model = model_of(), model_of()
    plain = OPTIMIZERS["adamw"](exact.parameters())
    lower_weights(model)
    optimizer = with_masters(OPTIMIZERS["adamw"](model.parameters()))
    give_gradients(model, exact)
    plain.step()
    optimizer.step()
    kept = masters(model, optimizer)
    give_gradients(model, exact, seed=5)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert same(masters(model, optimizer), kept)
    for p, q in zip(model.parameters(), exact.parameters()):
        assert torch.equal(optimizer.state[p]["exp_avg"], plain.state[q]["exp_avg"])
        assert optimizer.state[p]["step"] == 2


def test_a_state_that_is_there_already_is_kept_in_fp32() -> None:
    model = model_of()
    plain = OPTIMIZERS["adamw"](model.parameters())
    give_gradients(model)
    plain.step()
    wanted = plain.state[model[0].weight]["exp_avg"].clone()
    lower_weights(model)
    optimizer = with_masters(plain)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], wanted)
    low = nn.Linear(3, 3).bfloat16()
    plain = OPTIMIZERS["adamw"](low.parameters())
    give_gradients(low)
    plain.step()
    assert with_masters(plain).state[low.weight]["exp_avg"].dtype is torch.float32


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    _, optimizer = trained("adamw")
    good = copy.deepcopy(optimizer.state_dict())

    def broken(change: Callable[[Any], Any]) -> Any:
        state = copy.deepcopy(good)
        change(state)
        return state

    cases: list[tuple[Any, str]] = [
        (broken(lambda s: s["state"][0].pop("master")), r"has masters, but none for parameter 0, .*bfloat16"),
        (
            broken(lambda s: s["state"][2].update(master=torch.zeros(16))),
            r"parameter 2, which is float32 here",
        ),
        (
            broken(lambda s: s["state"][0].update(master=torch.zeros(2, 2))),
            r"'master' of parameter 0 is \(2, 2\)",
        ),
        (
            broken(lambda s: s["state"][1].update(exp_avg=torch.zeros(2))),
            r"'exp_avg' of parameter 1 is \(2,\)",
        ),
        (broken(lambda s: s["param_groups"][0]["params"].pop()), r"groups of \[5\] parameters.* of \[6\]"),
        (broken(lambda s: s["param_groups"].append({"params": []})), r"groups of \[6, 0\]"),
        ({"model": 1}, "no optimizer's state: it has model"),
    ]
    before = copy.deepcopy(optimizer.state_dict())
    for state, message in cases:
        with pytest.raises(UsageError, match=message):
            optimizer.load_state_dict(state)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_an_inner_optimizer_that_fails_to_load_leaves_all_as_it_was() -> None:
    class Fussy(SignOfMomentum):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            raise KeyError("no such thing")

    model = model_of()
    lower_weights(model)
    optimizer = with_masters(Fussy(model.parameters()))
    give_gradients(model)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    changed = copy.deepcopy(before)
    changed["param_groups"][0]["lr"] = 7.0
    changed["state"][0]["m"].fill_(3.0)
    with pytest.raises(KeyError, match="no such thing"):
        optimizer.load_state_dict(changed)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("steps", [0, 3])
def test_copies_of_model_and_optimizer_go_on_alike(copier: Callable[[Any], Any], steps: int) -> None:
    pair = trained("adamw", steps)
    model, optimizer = copier(pair)
    assert model[0].weight is not pair[0][0].weight
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    expected = go_on(*pair)
    assert same(go_on(model, optimizer), expected)
    optimizer.inner.step()
    assert not same(masters(model, optimizer), expected)
