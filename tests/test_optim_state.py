"""State dicts, copies and pickles: training goes on to the bit; what doesn't fit is refused and changes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.optim import SGD, AdamW, FusedOptimizer, adopt, with_masters
from optimizer_steps import (
    BY_NAME,
    MODES,
    RULES,
    SHAPES,
    Rule,
    assert_same,
    everything,
    parameters,
    run,
    saved_and_loaded,
    weights,
)


def trained(rule: Rule, masters: str = "split", state: str = "fp32", steps: int = 3) -> FusedOptimizer:
    params = parameters()
    optimizer = rule.make(params, masters=masters, state=state)
    run(optimizer, params, range(steps))
    return optimizer


@pytest.mark.parametrize(("masters", "state"), MODES)
def test_a_saved_state_goes_on_to_the_bit(masters: str, state: str) -> None:
    rule = RULES[MODES.index((masters, state)) % len(RULES)]
    first = trained(rule, masters, state)
    first.param_groups[0].update(lr=0.003, initial_lr=0.5)
    seen: list[str] = []
    first.register_state_dict_pre_hook(lambda _: seen.append("saves"))
    first.register_state_dict_post_hook(lambda _, state: seen.append("saved"))
    checkpoint = saved_and_loaded(
        {"weights": [p.detach() for p in weights(first)], "state": first.state_dict()}
    )
    params = [nn.Parameter(value) for value in checkpoint["weights"]]
    second = rule.make(params, masters=masters, state=state)
    second.register_load_state_dict_pre_hook(lambda _, state: seen.append("loads"))
    second.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    group = second.param_groups[0]
    second.load_state_dict(checkpoint["state"])
    assert seen == ["saves", "saved", "loads", "loaded"]
    assert second.param_groups[0] is group
    assert (group["lr"], group["initial_lr"]) == (0.003, 0.5)
    assert_same(everything(first), everything(second))
    for optimizer in (first, second):
        run(optimizer, weights(optimizer), range(3, 6))
    assert_same(everything(first), everything(second))


MADE: dict[str, Callable[[Any], Any]] = {
    "fp32 masters": lambda p: AdamW(p, lr=0.1, masters="fp32", state="bf16"),
    "split8 masters": lambda p: AdamW(p, lr=0.1, masters="split8", state="int8"),
    "adopted": lambda p: adopt(torch.optim.AdamW(p, lr=0.1), masters="split8", state="int8"),
    "with_masters": lambda p: with_masters(torch.optim.AdamW(p, lr=0.1)),
}


@pytest.mark.parametrize("way", ["copy", "pickle", "saved state"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("made", MADE)
def test_copies_pickles_and_saved_states_go_on_to_the_bit(made: str, steps: int, way: str) -> None:
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 5)).bfloat16()
    optimizer = MADE[made](model.parameters())
    run(optimizer, weights(optimizer), range(steps))
    if way == "saved state":
        twin = copy.deepcopy(model)
        other = MADE[made](twin.parameters())
        other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    else:
        copied = copy.deepcopy if way == "copy" else lambda both: pickle.loads(pickle.dumps(both))
        twin, other = copied((model, optimizer))
    assert type(other) is type(optimizer)
    assert all(one is param for one, param in zip(weights(other), twin.parameters(), strict=True))
    before = everything(optimizer)
    run(other, weights(other), range(2, 5))
    assert_same(before, everything(optimizer))  # the copy shares nothing
    run(optimizer, weights(optimizer), range(2, 5))
    assert_same(everything(optimizer), everything(other))
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    run(other, weights(other), range(1))
    schedule.step()


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_a_state_finds_its_place_in_another_memory_order(state: str) -> None:
    (plain,), (other,) = parameters(shapes=[(4, 3, 5, 7)]), parameters(shapes=[(4, 3, 5, 7)])
    first = AdamW([plain], lr=0.1, masters="split", state=state)
    run(first, [plain], range(3))
    other.data = plain.data.to(memory_format=torch.channels_last, copy=True)
    second = AdamW([other], lr=0.1, masters="split", state=state)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert torch.equal(first.master(plain), second.master(other))
    left, right = (optimizer.torch_state_dict()["state"][0] for optimizer in (first, second))
    for name in ("exp_avg", "exp_avg_sq"):
        tolerance = 0.07 if state == "int8" else 0.0
        largest = float(left[name].abs().max()) * 2.0**-16
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=largest if tolerance else 0.0
        )
    run(first, [plain], range(3, 4))
    run(second, [other], range(3, 4))
    if state == "fp32":
        assert torch.equal(first.master(plain), second.master(other))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("how", [{"foreach": False}, {"fused": True}], ids=["loop", "fused"])
def test_torch_s_state_is_loaded_and_given_back(rule: Rule, how: dict[str, bool]) -> None:
    params = parameters(torch.float32)
    theirs = rule.torch(params, **how)
    run(theirs, params, range(3))
    ours = rule.make([nn.Parameter(p.detach().clone()) for p in params])
    ours.load_state_dict(saved_and_loaded(theirs.state_dict()))
    back = rule.torch([nn.Parameter(p.detach().clone()) for p in params], **how)
    back.load_state_dict(saved_and_loaded(ours.torch_state_dict()))
    assert theirs.state_dict()["param_groups"][0].keys() == back.state_dict()["param_groups"][0].keys()
    for param, other in zip(params, weights(back)):
        for name, value in theirs.state[param].items():
            assert (value is None) == (back.state[other][name] is None)
            if value is not None:
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(back.state[other][name]))
    for optimizer in (theirs, ours, back):
        run(optimizer, weights(optimizer), range(3, 4))
    for one, two, three in zip(params, weights(ours), weights(back)):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("masters", "state"), [("fp32", "fp32"), ("split", "bf16"), ("none", "int8")])
def test_torch_s_state_is_loaded_in_every_format(masters: str, state: str) -> None:
    rule = BY_NAME["AdamW"]
    params = parameters(torch.float32)
    theirs = rule.torch(params)
    run(theirs, params, range(3))
    ours = rule.make([nn.Parameter(p.detach().bfloat16()) for p in params], masters=masters, state=state)
    ours.load_state_dict(theirs.state_dict())
    assert [entries["step"].item() for entries in ours.state.values()] == [3.0] * len(SHAPES)
    back = ours.torch_state_dict()["state"]
    for index, param in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            wanted = theirs.state[param][name]
            tolerance = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 2.0**-4}[state]
            smallest = float(wanted.abs().max()) * 2.0**-17
            torch.testing.assert_close(back[index][name], wanted, rtol=tolerance, atol=tolerance and smallest)
        assert torch.equal(ours.master(weights(ours)[index]), param.detach().bfloat16().float())
    run(ours, weights(ours), range(3, 5))


def test_torch_s_sgd_before_its_first_step_and_without_momentum() -> None:
    for momentum in (0.0, 0.9):
        (param,) = parameters(torch.float32, [(5,)])
        theirs = torch.optim.SGD([param], lr=0.1, momentum=momentum)
        ours = SGD([nn.Parameter(param.detach().clone())])
        ours.load_state_dict(theirs.state_dict())
        run(theirs, [param], range(2))
        run(ours, weights(ours), range(2))
        torch.testing.assert_close(weights(ours)[0], param)
        again = SGD([nn.Parameter(param.detach().clone())], momentum=momentum)
        again.load_state_dict(theirs.state_dict())
        fresh = torch.optim.SGD([nn.Parameter(param.detach().clone())])
        fresh.load_state_dict(again.torch_state_dict())
        for optimizer in (theirs, again, fresh):
            run(optimizer, weights(optimizer), range(2, 4))
        torch.testing.assert_close(weights(again)[0], param)
        torch.testing.assert_close(weights(fresh)[0], param)


Make = Callable[[FusedOptimizer], dict[str, Any]]


def of_mode(name: str, *modes: str) -> Make:
    return lambda optimizer: trained(BY_NAME[name], *modes).state_dict()


def altered(change: Callable[[dict[str, Any]], object]) -> Make:
    def make(optimizer: FusedOptimizer) -> dict[str, Any]:
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        return state

    return make


def of_torch(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    def make(optimizer: FusedOptimizer) -> dict[str, Any]:
        params = parameters(torch.float32)
        theirs = kind(params, **settings)  # type: ignore[call-arg]
        run(theirs, params, range(1))
        return theirs.state_dict()

    return make


def with_entry(key: int, **entries: Any) -> Make:
    return altered(lambda state: state["state"][key].update(entries))


# A state for AdamW with split masters -> words of the error: what, as it was saved, what to do.
REFUSED: dict[str, tuple[Make, list[str]]] = {
    "masters": (of_mode("AdamW", "fp32"), ['masters="fp32"', 'masters="split"', "master_state_dict"]),
    "8-bit masters": (of_mode("AdamW", "split8"), ['masters="split8"']),
    "no masters": (of_mode("AdamW", "none"), ["no masters", 'masters="split"']),
    "states": (of_mode("AdamW", "split", "int8"), ['state="int8"', "torch_state_dict"]),
    "rule": (of_mode("SGD"), ["'betas'"]),
    "Adam": (of_mode("Adam"), ["Adam's", "AdamW's"]),
    "shape": (with_entry(5, exp_avg=torch.zeros(3)), ["'exp_avg'", "[3]", "[130, 257]"]),
    "remainder": (with_entry(2, remainder=torch.zeros(3).short()), ["'remainder'", "[3]"]),
    "format": (with_entry(2, exp_avg=torch.zeros(5, 13).half()), ["torch.float16", "torch.float32"]),
    "missing": (altered(lambda s: s["state"][2].pop("exp_avg_sq")), ["'exp_avg_sq'"]),
    "no remainder": (altered(lambda s: s["state"][2].pop("remainder")), ["no masters"]),
    "count": (altered(lambda s: s["param_groups"][0]["params"].pop()), ["[5]", "[6]"]),
    "groups": (altered(lambda s: s["param_groups"].append(s["param_groups"][0])), ["[6, 6]"]),
    "setting": (altered(lambda s: s["param_groups"][0].update(lr=-1.0)), ["lr=-1.0"]),
    "no state": (lambda _: {"model": {}}, ["model", "param_groups"]),
    "torch's SGD": (of_torch(torch.optim.SGD, lr=0.1, momentum=0.9), ["another optimizer"]),
    "torch's Adam": (of_torch(torch.optim.Adam), ["Adam's", "AdamW's"]),
    "amsgrad": (of_torch(torch.optim.AdamW, amsgrad=True), ["amsgrad=True", "with_masters"]),
}


@pytest.mark.parametrize("row", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(row: str) -> None:
    make, words = REFUSED[row]
    optimizer, twin = trained(BY_NAME["AdamW"]), trained(BY_NAME["AdamW"])
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    before = everything(optimizer)
    with pytest.raises(UsageError) as caught:
        optimizer.load_state_dict(make(optimizer))
    assert all(word in str(caught.value) for word in words), caught.value
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == settings
    assert_same(before, everything(optimizer))
    for each in (optimizer, twin):
        run(each, weights(each), range(3, 5))
    assert_same(everything(optimizer), everything(twin))


def test_modes_of_masters_do_not_matter_to_fp32_weights() -> None:
    params = parameters(torch.float32)
    first = AdamW(params, masters="fp32")
    run(first, params, range(2))
    second = AdamW([nn.Parameter(p.detach().clone()) for p in params], masters="split")
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["masters"] == "split"
    for optimizer in (first, second):
        run(optimizer, weights(optimizer), range(2, 4))
    assert_same(everything(first), everything(second))


def test_a_state_of_version_0_1_0_is_loaded() -> None:
    first = trained(BY_NAME["AdamW"], "split8", "int8")
    state = first.state_dict()
    for group in state["param_groups"]:
        group["state_format"] = group.pop("state")
    params = [nn.Parameter(p.detach().clone()) for p in weights(first)]
    second = BY_NAME["AdamW"].make(params, masters="split8", state="int8")
    second.load_state_dict(state)
    assert "state_format" not in second.param_groups[0]
    assert_same(everything(first), everything(second))


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_masters_that_lowering_kept_stay_where_torch_s_state_is_loaded(masters: str) -> None:
    model = nn.Linear(33, 7)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(theirs, list(model.parameters()), range(1))
    exact = model.weight.detach().clone()
    mezzo.lower_weights(model)
    ours = AdamW(model.parameters(), masters=masters)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.master(model.weight), exact)
    assert ours.state[model.weight]["step"].item() == 1


def test_masters_that_lowering_kept_give_way_to_those_of_a_checkpoint() -> None:
    model, other = nn.Linear(33, 7), nn.Linear(33, 7)
    for each in (model, other):
        mezzo.lower_weights(each)
    first, second = (AdamW(each.parameters(), masters="split") for each in (model, other))
    run(first, list(model.parameters()), range(2))
    other.load_state_dict(model.state_dict())
    second.load_state_dict(first.state_dict())
    assert_same(everything(first), everything(second))
    run(first, list(model.parameters()), range(2, 3))
    run(second, list(other.parameters()), range(2, 3))
    assert_same(everything(first), everything(second))
