"""The optimizers in a training loop: groups, schedulers, late and frozen parameters, edits, scalers, refusals."""

from __future__ import annotations

import copy
import gc
import math
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import mezzo
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.optim import SGD, Adam, AdamW, Lion, bytes_per_parameter
from optimizer_steps import (
    BY_NAME,
    MASTERS,
    MODES,
    RULES,
    SCALERS,
    STATES,
    Rule,
    assert_same,
    bits,
    everything,
    gradients,
    parameters,
    run,
)


def one(*shape: int, dtype: torch.dtype = torch.bfloat16, value: float = 1.0) -> nn.Parameter:
    param = nn.Parameter(torch.full(shape, value, dtype=dtype))
    param.grad = torch.full(shape, 0.5, dtype=dtype)
    return param


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("masters", "state"), MODES)
def test_every_mode_follows_fp32(rule: Rule, masters: str, state: str) -> None:
    lean, params = rule.make(low := parameters(), masters=masters, state=state), parameters(torch.float32)
    run(lean, low, range(5))
    run(rule.make(params), params, range(5))
    for start, weight, exact in zip(parameters(torch.float32), low, params):
        moved, off = ((one_ - other).detach().norm() for one_, other in ((exact, start), (weight, exact)))
        assert off <= 0.25 * moved + 0.02 * start.detach().norm()
        assert moved > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gradient_may_have_another_format_than_its_weight(dtype: torch.dtype, grad: torch.dtype) -> None:
    moved = []
    for kind in (grad, torch.float32):
        param = nn.Parameter(torch.linspace(-1, 1, 70).to(dtype))
        param.grad_dtype = None
        optimizer = AdamW([param], lr=0.1)
        param.grad = ((torch.arange(70) - 40) / 16).to(kind)
        optimizer.step()
        moved.append(bits(optimizer.master(param)))
    assert torch.equal(*moved)


def test_weights_that_have_no_gradient_are_left_alone() -> None:
    moving, frozen, late = one(3), one(3), one(3)
    frozen.requires_grad_(False)
    frozen.grad = None
    late.grad = None
    optimizer = AdamW([moving, frozen, late], lr=0.1, masters="split")
    optimizer.step()
    assert set(optimizer.state) == {moving}
    assert torch.equal(late, torch.ones(3))
    assert torch.equal(frozen, torch.ones(3))
    frozen.requires_grad_(True)
    frozen.grad, late.grad = torch.ones(3).bfloat16(), torch.ones(3).bfloat16()
    optimizer.step()
    assert float(optimizer.state[moving]["step"]) == 2
    assert float(optimizer.state[late]["step"]) == float(optimizer.state[frozen]["step"]) == 1


def test_a_group_that_joins_late_has_modes_and_settings_of_its_own() -> None:
    first, second, third = one(65), one(65), one(65, dtype=torch.float32)
    optimizer = AdamW([first], lr=0.1, masters="split")
    optimizer.step()
    optimizer.add_param_group({"params": [second], "lr": 0.0, "masters": "split8", "state": "int8"})
    optimizer.add_param_group({"params": [third]})
    optimizer.step()
    assert optimizer.state[first]["remainder"].dtype is torch.int16
    assert optimizer.state[second]["remainder"].dtype is torch.int8
    assert optimizer.state[second]["exp_avg"].dtype is torch.uint8
    assert optimizer.state[second]["exp_avg_scale"].shape == (2,)
    assert set(optimizer.state[third]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(second, torch.ones(65))
    assert not torch.equal(first, second)


def test_groups_are_edited_by_hand_between_steps() -> None:
    """As programs do that add and remove points: another parameter, with another shape's state, in its place."""
    old, new = one(5), one(8)
    optimizer = AdamW([old], lr=0.1, masters="split")
    optimizer.step()
    state = optimizer.state.pop(old)
    for name in ("exp_avg", "exp_avg_sq", "remainder"):
        state[name] = torch.cat([state[name], torch.zeros(3, dtype=state[name].dtype)])
    optimizer.state[new] = state
    optimizer.param_groups[0]["params"][0] = new
    optimizer.step()
    assert float(optimizer.state[new]["step"]) == 2
    assert optimizer.state[new]["exp_avg"].shape == (8,)
    optimizer.state.clear()
    optimizer.step()
    assert float(optimizer.state[new]["step"]) == 1
    optimizer.state[new]["exp_avg"] = torch.full((8,), 7.0)
    optimizer.step()
    assert (optimizer.state[new]["exp_avg"] > 6).all()


def test_removed_parameters_are_not_kept_alive() -> None:
    import weakref

    optimizer = AdamW([old := one(5)], masters="split")
    optimizer.step()
    watch = weakref.ref(old)
    optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = one(6)
    optimizer.step()
    del old
    gc.collect()
    assert watch() is None


def test_gradients_are_not_kept_alive() -> None:
    import weakref

    optimizer = AdamW([param := one(5)])
    watch = weakref.ref(param.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert watch() is None


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


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("masters", MASTERS)
def test_a_weight_s_layout_and_format_may_change_on_the_way(masters: str, state: str) -> None:
    param = parameters(shapes=[(4, 3, 5, 7)])[0]
    optimizer = AdamW([param], lr=0.01, masters=masters, state=state)
    run(optimizer, [param], range(2))
    before = optimizer.master(param)
    moment = optimizer.state[param]["exp_avg"].clone()
    param.data = param.data.to(memory_format=torch.channels_last)
    assert torch.equal(optimizer.master(param), before)
    if state != "int8":
        assert torch.equal(optimizer.state[param]["exp_avg"], moment)
    run(optimizer, [param], range(2, 4))
    assert float(optimizer.state[param]["step"]) == 4
    param.data = param.data.float()
    run(optimizer, [param], range(4, 5))
    assert "remainder" not in optimizer.state[param]
    assert "master" not in optimizer.state[param]
    param.data = param.data.bfloat16()
    run(optimizer, [param], range(5, 6))
    assert float(optimizer.state[param]["step"]) == 6
    assert ("remainder" in optimizer.state[param]) is masters.startswith("split")


def test_a_new_storage_is_moved_and_not_the_old_one() -> None:
    optimizer = AdamW([param := one(5)], lr=0.1, masters="split")
    optimizer.step()
    old = param.data
    kept = old.clone()
    param.data = torch.full((5,), 3.0, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(old, kept)
    assert (param < 3).all()
    assert (param > 2.8).all()


EDITS = {
    "zero": lambda weight: weight.data.zero_(),
    "clamp": lambda weight: weight.data.clamp_(-0.25, 0.25),
    "copy": lambda weight: weight.data.copy_(torch.linspace(-3, 3, weight.numel()).view_as(weight)),
    "prune": lambda weight: weight.data.mul_(torch.arange(weight.numel()).view_as(weight) % 2),
    "infinity": lambda weight: weight.data.view(-1)[:3].fill_(math.inf),
}


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_weight_is_never_nan_and_off_by_an_ulp_at_most(edit: str, masters: str) -> None:
    (weight,) = parameters(shapes=[(130, 7)])
    optimizer = SGD([weight], lr=1e-3, masters=masters)
    run(optimizer, [weight], range(3))
    EDITS[edit](weight)
    wanted = weight.detach().float().clone()
    master = optimizer.master(weight)
    ulp = torch.maximum(wanted.abs(), torch.tensor(2.0**-126)) * 2.0**-7
    finite = wanted.isfinite()
    assert ((master - wanted).abs() <= ulp)[finite].all()
    assert (master[~finite] >= 3.39e38).all()  # from there on a master's weight is infinite
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert not weight.isnan().any()
    assert torch.equal(weight.isinf(), wanted.isinf())
    assert (weight[wanted == 0] == 0).all()
    assert ((weight.float() - wanted).abs() <= ulp)[finite].all()


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_either_format_is_loaded_into_the_model(dtype: torch.dtype, masters: str) -> None:
    model = nn.Linear(9, 7).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3, masters=masters)
    run(optimizer, list(model.parameters()), range(2))
    checkpoint = nn.Linear(9, 7).to(dtype).state_dict()
    model.load_state_dict(checkpoint)
    for name, param in model.named_parameters():
        ulp = checkpoint[name].float().abs() * 2.0**-7
        assert ((optimizer.master(param) - checkpoint[name].float()).abs() <= ulp).all()


@pytest.mark.parametrize(
    ("masters", "dtype"), [(m, torch.bfloat16) for m in MASTERS] + [("fp32", torch.float16)]
)
def test_a_master_that_is_set_is_what_is_read(masters: str, dtype: torch.dtype) -> None:
    (param,) = parameters(dtype, [(7, 13)])
    optimizer = AdamW([param], masters=masters)
    value = torch.randn(7, 13)
    optimizer.set_master(param, value)
    kept = {"fp32": 0.0, "split": 0.0, "split8": 2.0**-15, "none": 2.0**-8}[masters]
    assert ((optimizer.master(param) - value).abs() <= value.abs() * kept).all()
    assert ((param.float() - value).abs() <= value.abs() * 2.0**-8).all()
    with pytest.raises(UsageError, match=r"shape \[3\]"):
        optimizer.set_master(param, torch.zeros(3))
    with pytest.raises(UsageError, match="none of its groups"):
        optimizer.master(one(2))


def test_reading_a_master_moves_no_weight() -> None:
    for masters in MASTERS:
        weights = [torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)]
        param = nn.Parameter(weights[0].clone())
        optimizer = AdamW([param], masters=masters)
        assert torch.equal(bits(param), bits(weights[0]))
        assert torch.equal(optimizer.master(param).nan_to_num(7), weights[0].float().nan_to_num(7))
        assert torch.equal(bits(param), bits(weights[0]))


@pytest.mark.parametrize("masters", ["fp32", "split", "split8", "none"])
def test_what_lowering_kept_aside_becomes_the_master(masters: str) -> None:
    model = nn.Linear(33, 7)
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    mezzo.lower_weights(model)
    lowered = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = AdamW(model.parameters(), masters=masters)
    state = optimizer.state_dict()["state"]
    assert len(state) == 2
    for name, param in model.named_parameters():
        assert torch.equal(bits(param), bits(lowered[name]))
        tolerance = {"fp32": 0.0, "split": 0.0, "split8": 2.0**-15, "none": 2.0**-8}[masters]
        assert ((optimizer.master(param) - wanted[name]).abs() <= wanted[name].abs() * tolerance).all()


def test_an_average_of_the_weights_follows_them() -> None:
    model = nn.Linear(5, 3).bfloat16()
    optimizer = AdamW(model.parameters(), lr=0.1, masters="split")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for step in range(4):
        run(optimizer, list(model.parameters()), [step])
        average.update_parameters(model)
    assert not torch.equal(average.module.weight, model.weight)
    assert (average.module.weight - model.weight).abs().max() < 0.2


def test_saved_tensors_notice_that_a_step_moved_the_weight() -> None:
    weight = one(3, dtype=torch.float32)
    optimizer = SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    version = weight._version
    optimizer.step()
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closure_is_run_once_with_gradients_on() -> None:
    param = one(3)
    optimizer = AdamW([param], lr=0.1, masters="split")
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param.float() ** 2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert (param < 1).all()


def test_steps_inside_no_grad_and_with_hooks() -> None:
    param = one(3)
    optimizer = AdamW([param], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with torch.no_grad():
        optimizer.step()
    assert seen == ["before", "after"]
    assert param.requires_grad


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    ],
    ids=["cosine", "one-cycle", "plateau", "lambda"],
)
@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum"])
def test_schedulers_of_torch_set_what_the_next_step_uses(scheduler: Any, name: str) -> None:
    rule = BY_NAME[name]
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    for params, optimizer in ((ours, rule.make(ours)), (theirs, rule.torch(theirs))):
        schedule = scheduler(optimizer)
        for step in range(5):
            run(optimizer, params, [step])
            schedule.step(1.0) if "Plateau" in type(schedule).__name__ else schedule.step()
    for one_, other in zip(ours, theirs):
        torch.testing.assert_close(one_, other, rtol=1e-5, atol=1e-5)


def test_a_rate_may_be_a_tensor() -> None:
    param, other = one(3, dtype=torch.float32), one(3, dtype=torch.float32)
    rate = torch.tensor(0.25)
    optimizer = SGD([param], lr=rate)
    optimizer.step()
    rate.fill_(0.5)
    optimizer.step()
    plain = SGD([other], lr=0.25)
    plain.step()
    plain.param_groups[0]["lr"] = 0.5
    plain.step()
    assert torch.equal(param, other)


def test_momentum_that_is_turned_on_later_starts_with_that_gradient() -> None:
    ours, theirs = one(5, dtype=torch.float32), one(5, dtype=torch.float32)
    for optimizer in (SGD([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)):
        for momentum in (0.0, 0.9, 0.9):
            optimizer.param_groups[0].update(momentum=momentum, dampening=0.5)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_tied_weights_move_once() -> None:
    param, other = one(70), one(70)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdamW([param, param], lr=0.1, masters="split")
    optimizer.step()
    AdamW([other], lr=0.1, masters="split").step()
    assert torch.equal(param, other)
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": [param]}, {"params": [param]}])


def test_weights_without_elements_are_passed_over() -> None:
    empty, full = one(0, 4), one(2)
    AdamW([empty, full], lr=0.1, masters="split", state="int8").step()
    assert (full < 1).all()


def test_an_overflow_of_a_weight_is_noted() -> None:
    param = nn.Parameter(torch.tensor([3.38e38, 1.0], dtype=torch.bfloat16))
    optimizer = SGD([param], lr=1.0, masters="split")
    param.grad = torch.tensor([-2e36, 0.0], dtype=torch.bfloat16)
    assert float(optimizer.weight_overflow) == 0
    optimizer.step()
    assert float(optimizer.weight_overflow) == 1
    assert param[0].isinf()
    assert optimizer.master(param)[0].isfinite()


@pytest.mark.parametrize("masters", MASTERS)
def test_a_step_is_compiled_around(masters: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    plain, compiled = one(5), one(5)
    left, right = (AdamW([param], lr=0.1, masters=masters) for param in (plain, compiled))

    @torch.compile(backend="eager")
    def train(value: Tensor) -> Tensor:
        result = value * 2
        right.step()
        return result + 1

    for _ in range(3):
        left.step()
        assert float(train(torch.ones(()))) == 3
    assert torch.equal(plain, compiled)
    torch._dynamo.reset()


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


def test_only_the_named_parameters_move() -> None:
    for masters, state in MODES:
        left, right = parameters(), parameters()
        whole, parts = (AdamW(p, lr=0.1, masters=masters, state=state) for p in (left, right))
        for step in range(3):
            for one_, other, grad in zip(left, right, gradients(step)):
                one_.grad, other.grad = grad, grad.clone()
            whole.step(multiplier=torch.tensor(0.5))
            for param in reversed(right):
                parts.step_parameters([param], multiplier=torch.tensor(0.5))
            assert_same(everything(whole), everything(parts))
    with pytest.raises(UsageError, match="none of its groups"):
        parts.step_parameters([one(3)])


def test_two_optimizers_cannot_both_hold_a_master() -> None:
    param = one(5)
    first, second = AdamW([param], masters="split"), AdamW([param], masters="fp32")
    first.step()
    before = everything(first)
    with pytest.raises(
        UsageError, match=r"two optimizers hold a master for one torch.bfloat16 weight of shape \[5\]"
    ):
        second.step()
    assert_same(before, everything(first))
    assert not second.state
    AdamW([param], masters="none").step()
    first.state.clear()
    second.step()
    del second
    gc.collect()
    third = AdamW([param], masters="split")
    third.step()
    own = one(5, dtype=torch.float32)
    AdamW([own]).step()
    AdamW([own]).step()


REFUSED = [
    (
        lambda p: AdamW(p, masters="spilt"),
        r"AdamW\(masters='spilt'\): unknown masters 'spilt'.*Did you mean 'split'",
    ),
    (lambda p: AdamW(p, state="int4"), r"AdamW\(state='int4'\): unknown state 'int4'"),
    (lambda p: AdamW(p, lr=-1.0), r"AdamW: lr=-1.0 is out of range: it must be finite and not negative"),
    (lambda p: AdamW(p, lr=math.nan), "lr=nan is out of range"),
    (lambda p: AdamW(p, lr=torch.ones(2)), r"lr is a tensor of shape \[2\]"),
    (
        lambda p: AdamW(p, betas=(0.9, 1.0)),
        r"betas\[1\]=1.0 is out of range: it must be from 0 to 1, 1 excluded",
    ),
    (lambda p: AdamW(p, betas=0.9), "betas=0.9 must be two numbers"),
    (lambda p: Adam(p, eps=-1e-8), "Adam: eps=-1e-08"),
    (lambda p: Adam(p, weight_decay=math.inf), "weight_decay=inf"),
    (lambda p: SGD(p, momentum=-0.9), "SGD: momentum=-0.9"),
    (lambda p: SGD(p, nesterov=True), "nesterov=True with momentum=0.0"),
    (lambda p: SGD(p, momentum=0.9, dampening=0.1, nesterov=True), "dampening=0.1"),
    (lambda p: Lion(p, betas=(-0.1, 0.9)), r"Lion: betas\[0\]=-0.1"),
    (
        lambda p: AdamW([torch.zeros(3, dtype=torch.int32)]),
        "is torch.int32.*those that are integers.*requires_grad",
    ),
    (lambda p: AdamW([torch.zeros(3, dtype=torch.complex64)]), "torch.complex64.*that are complex"),
    (lambda p: AdamW([torch.zeros(3, dtype=torch.float64)]), "torch.float64.*of another width"),
    (lambda p: AdamW([torch.zeros(3).half()], masters="split"), 'float16.*Use masters="fp32"'),
    (lambda p: AdamW([torch.zeros(3).half()], masters="none"), 'float16.*Use masters="fp32"'),
    (
        lambda p: AdamW([torch.zeros(3, 4)[:, ::2]]),
        r"has strides \[4, 2\]: its elements overlap or have gaps",
    ),
    (lambda p: AdamW([torch.zeros(3, 1).expand(3, 4)]), r"has strides \[1, 0\]"),
    (lambda p: AdamW([torch.zeros(3, 3).to_sparse()]), "stored as torch.sparse_coo"),
    (lambda p: AdamW([TwoTensor(torch.zeros(3), torch.zeros(3))]), "is a TwoTensor.*with_masters"),
]


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=lambda row: REFUSED[row][1][:40])
def test_what_makes_no_sense_is_refused(row: int) -> None:
    make, message = REFUSED[row]
    with pytest.raises(UsageError, match=message):
        make([one(3)])


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    optimizer = AdamW([one(3)])
    for group in ({"params": [one(2)], "masters": "fp8"}, {"params": [one(2)], "lr": -1.0}):
        with pytest.raises(UsageError):
            optimizer.add_param_group(group)
    with pytest.raises(UnknownNameError):
        optimizer.add_param_group({"params": [one(2)], "state": "fp8"})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    dense = one(3, dtype=torch.float32)
    optimizer = AdamW([dense, table.weight], lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"is sparse.*sparse=False.*SparseAdam"):
            optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    table.weight.grad = table.weight.grad.to_dense()
    optimizer.step()
    assert (dense < 1).all()


def test_fp64_gradients_are_refused() -> None:
    param = one(3, dtype=torch.float32)
    param.grad = None
    param.grad_dtype = None
    param.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"the gradient .* is torch.float64"):
        AdamW([param]).step()


@pytest.mark.parametrize("keyword", ["foreach", "fused", "capturable", "differentiable", "amsgrad"])
def test_torch_s_choices_of_an_implementation_are_not_taken(keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        AdamW([one(3)], **{keyword: True})  # type: ignore[arg-type]


BYTES = [
    ("split", "fp32", 12.0),
    ("split", "bf16", 8.0),
    ("split", "int8", 6.0 + 4 / 64),
    ("split8", "int8", 5.0 + 4 / 64),
    ("fp32", "fp32", 14.0),
    ("none", "fp32", 10.0),
    ("none", "int8", 4.0 + 4 / 64),
]


@pytest.mark.parametrize(("masters", "state", "expected"), BYTES)
def test_bytes_a_parameter_are_what_the_table_says(masters: str, state: str, expected: float) -> None:
    params = parameters(shapes=[(256, 128), (1024,)])
    optimizer = AdamW(params, masters=masters, state=state)
    run(optimizer, params, range(1))
    found = bytes_per_parameter(optimizer)
    assert found["gradients"] == 0
    assert found["total"] == sum(value for name, value in found.items() if name != "total") == expected
    for param in params:
        param.grad = torch.zeros_like(param)
    assert bytes_per_parameter(optimizer)["total"] == expected + 2


def test_a_lean_adamw_takes_at_most_7_1_bytes() -> None:
    params = parameters(shapes=[(256, 130), (1000,), (64,)])
    optimizer = AdamW(params, masters="split8", state="int8")
    run(optimizer, params, range(1), each=lambda _: None)
    for param in params:
        param.grad = torch.zeros_like(param)
    assert bytes_per_parameter(optimizer)["total"] <= 7.1


def test_a_step_makes_few_calls_for_a_parameter() -> None:
    """The cost of many small parameters is that of calls: these are counted, since timings decide no test."""
    calls = []
    for count in (20, 120):
        params = [one(3) for _ in range(count)]
        optimizer = AdamW(params, masters="split", state="int8")
        optimizer.step()
        optimizer._steppers = {key: lambda *_, **__: None for key in optimizer._steppers}
        found = {"call": 0, "c_call": 0}
        sys.setprofile(lambda frame, event, _, found=found: found.update({event: found.get(event, 0) + 1}))
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        calls.append(found)
    # torch's Tensor.__hash__, once for what is remembered of the parameter and once for its state.
    assert (calls[1]["call"] - calls[0]["call"]) / 100 == 2
    assert (calls[1]["c_call"] - calls[0]["c_call"]) / 100 <= 12


def test_only_the_step_s_own_arithmetic_is_in_its_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = parameters()
        optimizer = copy.deepcopy(AdamW(params, masters="split8", state="int8"))
        run(optimizer, optimizer.param_groups[0]["params"], range(2))
