"""Adoption: the script keeps its optimizer, schedulers and hooks, and what moves the weights is Mezzo's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.core.errors import UsageError
from mezzo.optim import SGD, adopt
from optimizer_steps import RULES, Rule, assert_same, everything, parameters, run, weights


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_adopted_optimizer_moves_as_the_one_that_was_made_so(rule: Rule) -> None:
    made, own = parameters(), parameters()
    user = rule.torch(made)
    fused, plain = adopt(user, masters="split", state="fp32"), rule.make(own, masters="split", state="fp32")
    assert fused is user
    assert isinstance(fused, rule.ours)
    assert isinstance(user, torch.optim.Optimizer)
    run(user, made, range(3))
    run(plain, own, range(3))
    assert_same(everything(user), everything(plain))


def test_groups_and_state_are_shared() -> None:
    user = torch.optim.AdamW(
        [{"params": parameters()[:2], "lr": 0.5}, {"params": parameters()[2:], "eps": 1e-3}]
    )
    groups, dicts = user.param_groups, list(user.param_groups)
    fused = adopt(user, masters="split8", state="int8")
    assert fused.param_groups is groups is user.param_groups
    assert all(one is other for one, other in zip(groups, dicts))
    assert fused.state is user.state
    run(user, weights(user), range(1))
    assert len(user.state) == 6
    user.add_param_group({"params": [nn.Parameter(torch.zeros(3).bfloat16())], "lr": 0.25})
    assert len(fused.param_groups) == 3
    assert fused.param_groups[2]["masters"] == "split8"
    assert all("foreach" in group for group in fused.param_groups)
    assert repr(user).startswith("AdamW (")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_what_was_learnt_before_is_converted(rule: Rule, state: str) -> None:
    made, other = parameters(torch.float32), parameters(torch.float32)
    user, torch_s = rule.torch(made), rule.torch(other)
    run(user, made, range(3))
    run(torch_s, other, range(3))
    fused = adopt(user, masters="fp32", state=state)
    run(user, made, range(3, 5))
    run(torch_s, other, range(3, 5))
    if rule.ours is not SGD:  # torch's counts no steps
        assert {entries["step"].item() for entries in fused.state.values()} == {5.0}
    for one, two in zip(made, other):
        if state == "fp32":
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
        else:
            assert (one - two).norm() <= 0.05 * two.detach().norm() + 0.02


def test_hooks_fire_once() -> None:
    made = parameters()
    user = torch.optim.SGD(made, lr=0.1)
    seen: list[str] = []
    user.register_step_pre_hook(lambda *_: seen.append("pre"))
    adopt(user, masters="split", state="fp32")
    late = user.register_step_post_hook(lambda *_: seen.append("post"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    user.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    user._patch_step_function()  # as torch does after a copy
    try:
        run(user, made, range(1))
        assert seen == ["pre", "post", "global"]
        late.remove()
        user.state_dict()
        assert seen[3:] == ["saved"]
    finally:
        everywhere.remove()


# How an optimizer is made, the modes -> words of the error: what, the value received, what to do.
REFUSED: dict[str, tuple[Any, dict[str, str], list[str]]] = {
    "class": (lambda: torch.optim.RMSprop(parameters()), {}, ["RMSprop", "torch.optim.AdamW", "with_masters"]),
    "Mezzo's": (lambda: SGD(parameters()), {}, ["mezzo", "SGD"]),
    "amsgrad": (lambda: torch.optim.AdamW(parameters(), amsgrad=True), {}, ["amsgrad=True", "with_masters"]),
    "differentiable": (lambda: torch.optim.SGD(parameters(), lr=0.1, differentiable=True), {},
     ["differentiable=True", "with_masters"]),
    "state": (lambda: torch.optim.AdamW(parameters()), {"state": "fp8"}, ["'fp8'", "int8"]),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_what_can_t_be_adopted_is_left_as_it_was(row: str) -> None:
    make, modes, words = REFUSED[row]
    user = make()
    kind, keys = type(user), set(user.param_groups[0])
    with pytest.raises(UsageError) as caught:
        adopt(user, **{"masters": "split", "state": "fp32", **modes})
    assert all(word in str(caught.value) for word in words), caught.value
    assert type(user) is kind
    assert set(user.param_groups[0]) == keys
    if not user.param_groups[0].get("differentiable"):
        run(user, weights(user), range(1))


def test_adopting_again_gives_the_same_one() -> None:
    user = torch.optim.SGD(parameters(), lr=0.1)
    fused = adopt(user, masters="split", state="fp32")
    assert adopt(user, masters="split", state="fp32") is fused
    with pytest.raises(UsageError, match='masters="split" and state="fp32"'):
        adopt(user, masters="split8", state="fp32")


def test_a_state_that_can_t_be_converted_is_left_as_it_was() -> None:
    made, other = parameters(), parameters()
    user, plain = torch.optim.AdamW(made), torch.optim.AdamW(other)
    run(user, made, range(1))
    run(plain, other, range(1))
    user.state[made[-1]]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(UsageError, match=r"'exp_avg_sq' has the shape \[3\]"):
        adopt(user, masters="split", state="int8")
    user.state[made[-1]]["exp_avg_sq"] = plain.state[other[-1]]["exp_avg_sq"].clone()
    for optimizer in (user, plain):
        run(optimizer, weights(optimizer), range(1, 3))
    assert_same(everything(user), everything(plain))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_somebody_wrapped_is_not_lost_in_silence(scheduled: bool) -> None:
    made = parameters()
    user: Any = torch.optim.SGD(made, lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(user, 1)
    calls, inner = [], user.step

    @functools.wraps(inner)
    def counted(*args: Any) -> Any:
        calls.append(args)
        return inner(*args)

    user.step = counted
    with pytest.raises(UsageError, match=r"SGD\.step.*counted"):
        adopt(user, masters="split", state="fp32")
    run(user, made, range(1))
    assert calls == [()]
    user.step = inner
    if not scheduled:
        del user.step
    adopt(user, masters="split", state="fp32")
