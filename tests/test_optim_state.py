"""States saved and copied: training goes on to the bit. Weights of any layout, edited, lowered; and their bytes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.core.masters import bytes_per_parameter
from mezzo.optim import SGD, AdamW, FusedOptimizer, adopt, with_masters
from optimizer_steps import (
    BY_NAME,
    MASTERS,
    MODES,
    RULES,
    Rule,
    assert_same,
    bits,
    everything,
    gradients,
    one,
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
def test_a_saved_state_goes_on_to_the_bit(masters: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", "reference")  # a kernel takes seconds to compile
    rule = RULES[MODES.index((masters, state)) % len(RULES)]
    first = trained(rule, masters, state)
    first.param_groups[0].update(lr=0.003, initial_lr=0.5)
    seen: list[str] = []
    first.register_state_dict_pre_hook(lambda _: seen.append("saves"))
    first.register_state_dict_post_hook(lambda _, state: seen.append("saved"))
    checkpoint = saved_and_loaded({"weights": weights(first), "state": first.state_dict()})
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("made", MADE)
def test_copies_and_pickles_go_on_to_the_bit(made: str, steps: int, copied: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 5)).bfloat16()
    optimizer = MADE[made](model.parameters())
    run(optimizer, weights(optimizer), range(steps))
    twin, other = copied((model, optimizer))
    assert type(other) is type(optimizer)
    assert all(own is param for own, param in zip(weights(other), twin.parameters(), strict=True))
    before = everything(optimizer)
    run(other, weights(other), range(2, 5))
    assert_same(before, everything(optimizer))  # the copy shares nothing
    run(optimizer, weights(optimizer), range(2, 5))
    assert_same(everything(optimizer), everything(other))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("how", "steps"), [({"foreach": False}, 3), ({"fused": True}, 3), ({}, 0)])
def test_torch_s_state_is_loaded_and_given_back(rule: Rule, how: dict[str, bool], steps: int) -> None:
    params = parameters(torch.float32)
    theirs = rule.torch(params, **how)
    run(theirs, params, range(steps))
    ours = rule.ours([nn.Parameter(p.detach().clone()) for p in params])
    ours.load_state_dict(saved_and_loaded(theirs.state_dict()))
    back = rule.ours.TORCH([nn.Parameter(p.detach().clone()) for p in params])
    back.load_state_dict(saved_and_loaded(ours.torch_state_dict()))
    assert theirs.state_dict()["param_groups"][0].keys() == back.state_dict()["param_groups"][0].keys()
    for param, other in zip(params, weights(back)):
        for name, value in theirs.state[param].items():
            assert (value is None) == (back.state[other][name] is None)
            if value is not None:
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(back.state[other][name]))
    for optimizer in (theirs, ours, back):
        run(optimizer, weights(optimizer), range(3, 5))
    for others in zip(params, weights(ours), weights(back)):
        for other in others[1:]:
            torch.testing.assert_close(others[0], other, rtol=1e-6, atol=1e-6)


def ours(name: str, *modes: str) -> Callable[[Any], Any]:
    return lambda state: trained(BY_NAME[name], *modes).state_dict()


def plain(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[Any], Any]:
    def state_of(_: Any) -> dict[str, Any]:
        run(optimizer := make(parameters(torch.float32), **settings), weights(optimizer), range(1))
        return optimizer.state_dict()

    return state_of


# A state for AdamW with split masters, from its own or by an edit of it -> words of the error: what, as it was saved,
# what to do.
REFUSED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "masters": (ours("AdamW", "fp32"), ['masters="fp32"', 'masters="split"', "master_state_dict"]),
    "no masters": (ours("AdamW", "none"), ["no separate masters", 'masters="split"']),
    "states": (ours("AdamW", "split", "int8"), ['state="int8"', "torch_state_dict"]),
    "Adam": (ours("Adam"), ["by Adam,", "is AdamW"]),
    "shape": (lambda s: s["state"][5].update(exp_avg=torch.zeros(3)), ["'exp_avg'", "[3]", "[130, 257]"]),
    "format": (lambda s: s["state"][2].update(exp_avg=torch.zeros(5, 13).half()), ["float16", "float32"]),
    "missing": (lambda s: s["state"][2].__delitem__("exp_avg_sq"), ["'exp_avg_sq'"]),
    "groups": (lambda s: s["param_groups"].append(s["param_groups"][0]), ["[6, 6]"]),
    "setting": (lambda s: s["param_groups"][0].update(lr=-1.0), ["lr=-1.0"]),
    "no state": (lambda s: {"model": {}}, ["model", "param_groups"]),
    "torch's SGD": (plain(torch.optim.SGD, lr=0.1, momentum=0.9), ["'betas'", "class that saved it"]),
    "amsgrad": (plain(torch.optim.AdamW, amsgrad=True), ["amsgrad=True", "with_masters"]),
}


@pytest.mark.parametrize("row", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(row: str) -> None:
    change, words = REFUSED[row]
    optimizer, twin = trained(BY_NAME["AdamW"]), trained(BY_NAME["AdamW"])
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    before = everything(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError) as caught:
        optimizer.load_state_dict(change(state) or state)
    assert all(word in str(caught.value) for word in words), caught.value
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == settings
    assert_same(before, everything(optimizer))
    for each in (optimizer, twin):
        run(each, weights(each), range(3, 5))
    assert_same(everything(optimizer), everything(twin))


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


EXACT = {"fp32": 0.0, "split": 0.0, "split8": 2.0**-15, "none": 2.0**-8}  # a master's relative error


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize(("order", "shape"), [("channels", (4, 3, 5, 7)), ("transposed", (9, 65))])
def test_layouts_move_as_contiguous_weights_do(order: str, shape: tuple[int, ...], masters: str) -> None:
    def laid(value: Tensor) -> Tensor:
        if order == "channels":
            return value.to(memory_format=torch.channels_last)
        return value.t().contiguous().t()

    plain, other = (parameters(shapes=[shape])[0] for _ in range(2))
    other.data = laid(other.data)
    assert not other.is_contiguous()
    left, right = (AdamW([param], lr=0.1, masters=masters) for param in (plain, other))
    for step in range(3):
        (grad,) = gradients(step, [shape])
        plain.grad = grad
        other.grad = grad if step else laid(grad)
        left.step()
        right.step()
    assert torch.equal(bits(plain), bits(other))
    assert torch.equal(bits(left.master(plain)), bits(right.master(other)))
    assert right.state[other]["exp_avg"].stride() == other.stride()


def test_a_gradient_that_is_expanded_or_strided_is_read_right() -> None:
    optimizer = SGD([param := one(3, 4, dtype=torch.float32)], lr=1.0)
    param.grad = torch.arange(3.0)[:, None].expand(3, 4)
    optimizer.step()
    assert torch.equal(param, 1 - torch.arange(3.0)[:, None].expand(3, 4))
    param.grad = torch.arange(24.0).view(3, 8)[:, ::2]
    optimizer.step()
    assert torch.equal(param[1], 0 - torch.arange(8.0, 16.0, 2.0))


@pytest.mark.parametrize(("masters", "fmt"), [(m, "bf16") for m in MASTERS] + [("fp32", "fp16")])
def test_a_master_that_lowering_kept_or_that_is_set_is_what_is_read(masters: str, fmt: str) -> None:
    layer = nn.Linear(33, 7, bias=False)
    param = layer.weight
    # Of 32 bits, its bf16 is 1; rounded to 24 bits first, it would be the next one.
    param.data[0] = torch.tensor(0x3F807FFF, dtype=torch.int32).view(torch.float32)
    kept, value = param.detach().clone(), torch.randn(7, 33)
    mezzo.lower_weights(layer, fmt)
    lowered = param.detach().clone()
    optimizer = AdamW(layer.parameters(), masters=masters)
    assert len(optimizer.state_dict()["state"]) == 1
    assert torch.equal(bits(param), bits(lowered))
    assert ((optimizer.master(param) - kept).abs() <= kept.abs() * EXACT[masters]).all()
    optimizer.set_master(param, value)
    assert ((optimizer.master(param) - value).abs() <= value.abs() * EXACT[masters]).all()
    assert ((param.float() - value).abs() <= value.abs() * 2.0**-8).all()
    with pytest.raises(UsageError, match=r"shape \[3\]"):
        optimizer.set_master(param, torch.zeros(3))
    with pytest.raises(UsageError, match="none of its groups"):
        optimizer.master(one(2))


def test_saved_tensors_notice_that_a_step_moved_the_weight() -> None:
    weight = one(3, dtype=torch.float32)
    optimizer = SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("masters", "state"), MODES)
def test_bytes_a_parameter_are_what_the_table_says(masters: str, state: str) -> None:
    params = parameters(shapes=[(256, 128), (1024,)])
    optimizer = AdamW(params, masters=masters, state=state)
    run(optimizer, params, range(1))
    tensors = [t for p in params for t in (p, *optimizer.state[p].values()) if t.dim()]  # the step has none
    assert sum(tensor.nbytes for tensor in tensors) / sum(param.numel() for param in params) == (
        bytes_per_parameter("bf16", masters, state) - 2  # of the gradient
    )
