"""The optimizers in a training loop: groups, schedulers, late and frozen parameters, closures, hooks, calls."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import mezzo
from mezzo.core.errors import UsageError
from mezzo.optim import SGD, AdamW
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
)


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
    torch.testing.assert_close(optimizer.state[new]["exp_avg"], torch.full((8,), 0.9 * 7 + 0.1 * 0.5))


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


@pytest.mark.parametrize("masters", MASTERS)
def test_a_step_is_compiled_around(masters: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    plain, compiled = one(5), one(5)
    left, right = (AdamW([param], lr=0.1, masters=masters) for param in (plain, compiled))

    @torch.compile(backend=counter)
    def train(value: Tensor) -> Tensor:
        result = value * 2
        right.step()
        return result + 1

    for _ in range(3):
        left.step()
        assert float(train(torch.ones(()))) == 3
    assert torch.equal(plain, compiled)
    assert counter.op_count == 2  # the product and the sum, and nothing of the step
    torch._dynamo.reset()


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


@pytest.mark.parametrize("name", mezzo.optim.__all__)
def test_every_name_of_mezzo_optim_resolves(name: str) -> None:
    value = getattr(mezzo.optim, name)
    assert value.__name__ == name
    assert value.__doc__
    assert name in dir(mezzo.optim)


def test_an_unknown_name_of_mezzo_optim_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'mezzo.optim' has no attribute 'RMSprop'"):
        mezzo.optim.RMSprop
