"""The optimizers in a training loop: exact masters, groups, closures, loss scales, adoption, and what is refused."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.two_tensor import TwoTensor

import mezzo
from mezzo.core.errors import UnknownArgumentError, UnknownNameError, UsageError
from mezzo.optim import SGD, Adam, AdamW, Muon, adopt, muon_groups
from optimizer_steps import (
    BY_NAME,
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
    weights,
)

# Each rule in one mode, and each mode with one rule. The reference serves here, since a kernel takes seconds to
# compile; `test_step_kernels.py` compares the kernels with it.
FOLLOWED = [*((rule, "split8", "int8") for rule in RULES), *((BY_NAME["AdamW"], *mode) for mode in MODES)]


@pytest.mark.parametrize(("rule", "masters", "state"), FOLLOWED, ids=lambda part: getattr(part, "name", part))
def test_every_mode_follows_fp32(
    rule: Rule, masters: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", "reference")
    lean, params = rule.make(low := parameters(), masters=masters, state=state), parameters(torch.float32)
    run(lean, low, range(5))
    run(rule.make(params), params, range(5))
    for start, weight, exact in zip(parameters(torch.float32), low, params):
        moved, off = ((one_ - other).detach().norm() for one_, other in ((exact, start), (weight, exact)))
        assert off <= 0.25 * moved + 0.02 * start.detach().norm()
        assert moved > 0


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


def test_gradients_and_removed_parameters_are_not_kept_alive() -> None:
    optimizer = AdamW([old := one(5)], masters="split")
    gradient = weakref.ref(old.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert gradient() is None
    old.grad = torch.ones_like(old)
    watch = weakref.ref(old)
    state = weakref.ref(optimizer.state[old]["exp_avg"])
    optimizer.state.pop(old)
    optimizer.step()  # with a new state
    gc.collect()
    assert state() is None
    optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = one(6)
    optimizer.step()
    del old
    gc.collect()
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


def test_a_rate_may_be_a_tensor() -> None:
    rate, param = torch.tensor(0.25), one(3, dtype=torch.float32)
    optimizer = SGD([param], lr=rate)
    optimizer.step()
    rate.fill_(0.5)
    optimizer.step()
    assert torch.equal(param, torch.full((3,), 1 - 0.5 * 0.25 - 0.5 * 0.5))


def test_tied_weights_move_once_and_empty_ones_are_passed_over() -> None:
    param, other, empty = one(70), one(70), one(0, 4)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdamW([param, param, empty], lr=0.1, masters="split", state="int8")
    optimizer.step()
    AdamW([other], lr=0.1, masters="split", state="int8").step()
    assert torch.equal(param, other)
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": [param]}, {"params": [param]}])


# Exact masters: the remainder's are those of a separate FP32 copy to the bit, and torch's to rounding.


def after_200_steps(make: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    params = parameters(dtype)
    optimizer = make(params, **how)
    run(optimizer, params, range(200))
    return optimizer


@pytest.mark.heavy
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_split_masters_are_separate_ones_to_the_bit_and_as_near_to_torch_as_its_fused(rule: Rule) -> None:
    split, separate = (after_200_steps(rule.make, masters=masters) for masters in ("split", "fp32"))
    for own, other in zip(weights(split), weights(separate)):
        assert torch.equal(bits(own), bits(other))
        assert torch.equal(bits(split.master(own)), bits(separate.master(other)))
        for name in [name for name in split.state[own] if name.startswith(("exp", "mom"))]:
            assert torch.equal(bits(split.state[own][name]), bits(separate.state[other][name]))
    loop = weights(after_200_steps(rule.torch, torch.float32, foreach=False, fused=False))
    fused = weights(after_200_steps(rule.torch, torch.float32, fused=True))

    def furthest(found: Sequence[Tensor]) -> float:
        return max(float((a.double() - b.double()).detach().abs().max()) for a, b in zip(found, loop))

    ulp = torch.finfo(torch.float32).eps * max(float(weight.detach().abs().max()) for weight in loop)
    assert furthest([split.master(param) for param in weights(split)]) <= 3 * furthest(fused) + ulp


@pytest.mark.parametrize("how", ["fused", "fused, unscaled", "adopted", "adopted, fused before", "Muon"])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, mezzo.GradScaler])
def test_both_grad_scalers_drive_it(scaler: Callable[..., Any], how: str) -> None:
    shapes = [(65, 3), (3, 4)] if how == "Muon" else [(65,), (3, 4)]
    plain, scaled = parameters(shapes=shapes), parameters(shapes=shapes)
    modes: dict[str, Any] = {"masters": "split", "state": "int8"}
    left, right = ((Muon if how == "Muon" else AdamW)(params, lr=0.1, **modes) for params in (plain, scaled))
    if how.startswith("adopted"):
        right = torch.optim.AdamW(scaled, lr=0.1, fused="before" in how)
        adopt(right, **modes)
    scale = scaler("cpu", init_scale=256.0)
    for step in range(4):
        before = everything(right)
        scale.scale(torch.ones(()))
        for param, other, grad in zip(plain, scaled, gradients(step, shapes)):
            param.grad = grad.clone()
            other.grad = grad * scale.get_scale()
        if step == 2:
            scaled[0].grad[3] = math.inf
        if "unscaled" in how:
            scale.unscale_(right)
        scale.step(right)
        scale.update()
        if step == 2:
            assert_same(before, everything(right))
        else:
            left.step()
            assert_same(everything(left), everything(right))
    assert scale.get_scale() == 128
    assert not vars(right).keys() & {"grad_scale", "found_inf"}


def test_two_optimizers_cannot_both_hold_a_master() -> None:
    param = one(5)
    first, second = AdamW([param], masters="split"), AdamW([param], masters="fp32")
    first.step()
    before = everything(first)
    with pytest.raises(UsageError, match=r"torch.bfloat16 weight of shape \[5\].*AdamW.*state.clear"):
        second.step()
    assert_same(before, everything(first))
    assert not second.state
    AdamW([param], masters="none").step()
    first.state.clear()
    second.step()
    del second
    AdamW([param], masters="split").step()


# How an optimizer is made -> words of the error: what, the value received, what is allowed.
REFUSED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "masters": (lambda p: AdamW(p, masters="spilt"), ["AdamW", "'spilt'", "'split'"]),
    "state": (lambda p: AdamW(p, state="int4"), ["'int4'", "int8"]),
    "number": (lambda p: AdamW(p, lr=-1.0), ["lr=-1.0"]),
    "NaN": (lambda p: SGD(p, momentum=math.nan), ["SGD", "momentum=nan"]),
    "numbers": (lambda p: AdamW(p, lr=torch.ones(2)), ["lr", "[2]"]),
    "beta": (lambda p: Adam(p, betas=(0.9, 1.0)), ["Adam", "betas[1]=1.0"]),
    "nesterov": (lambda p: SGD(p, nesterov=True), ["nesterov", "momentum=0.0"]),
    "None": (lambda p: AdamW(None), ["AdamW", "None", "model.parameters()"]),  # type: ignore[arg-type]
    "module": (lambda p: Muon(nn.Linear(2, 2)), ["Muon", "Linear", "model.parameters()"]),  # type: ignore[arg-type]
    "integers": (lambda p: AdamW([torch.zeros(3).int()]), ["torch.int32", "requires_grad"]),
    "fp16": (lambda p: AdamW([torch.zeros(3).half()], masters="split"), ["torch.float16", 'masters="fp32"']),
    "gaps": (lambda p: AdamW([torch.zeros(3, 4)[:, ::2]]), ["[4, 2]", "contiguous()"]),
    "sparse": (lambda p: AdamW([torch.zeros(3, 3).to_sparse()]), ["torch.sparse_coo", "to_dense()"]),
    "subclass": (lambda p: AdamW([TwoTensor(torch.zeros(3), torch.zeros(3))]), ["TwoTensor", "with_masters"]),
    "vector": (lambda p: Muon([*p, one(3)]), ["parameter 1", "[3]", "use_muon=False", "muon_groups"]),
    "Muon's momentum": (lambda p: Muon(p, momentum=1.0), ["momentum=1.0", "below 1"]),
    "steps": (lambda p: Muon(p, ns_steps=100), ["ns_steps=100", "99"]),
    "no coefficients": (lambda p: Muon(p, ns_coefficients=3.0), ["3.0", "three"]),  # type: ignore[arg-type]
    "coefficients": (lambda p: Muon(p, ns_coefficients=(1.0, 2.0)), ["(1.0, 2.0)", "three"]),
    "adjust": (lambda p: Muon(p, adjust_lr_fn="match_rms"), ["'match_rms'", "original", "'match_rms_adamw'"]),
    "rate": (lambda p: Muon(p, lr=-1.0), ["lr=-1.0"]),
    "Muon beta": (lambda p: Muon([{"params": p, "use_muon": False, "betas": (0.9, 1.0)}]), ["betas[1]=1.0"]),
    "pattern": (
        lambda p: muon_groups(nn.ParameterDict({"positions": p[0]}), exclude=["position"]),
        ["'position'", "'positions'"],
    ),
    "parameters": (lambda p: muon_groups(iter(p)), ["iterator", "muon_groups(model)"]),  # type: ignore[arg-type]
    "no matrix": (lambda p: muon_groups(nn.Sequential(nn.Linear(3, 3))), ["nothing is left", "AdamW"]),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_makes_no_sense_is_refused(row: str) -> None:
    make, words = REFUSED[row]
    with pytest.raises(UsageError) as caught:
        make([one(3, 4)])
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    optimizer = AdamW([one(3)])
    for wrong, error in (({"masters": "fp8"}, UnknownNameError), ({"lr": -1.0}, UsageError)):
        with pytest.raises(error):
            optimizer.add_param_group({"params": [one(2)], **wrong})
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


# Adoption: the script keeps its optimizer, schedulers and hooks, and Mezzo's kernels move the weights.


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
    made = parameters()
    user = torch.optim.AdamW([{"params": made[:2], "lr": 0.5}, {"params": made[2:], "eps": 1e-3}])
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
def test_what_was_learnt_before_is_converted(rule: Rule, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", "reference")  # a kernel takes seconds to compile
    made, other = parameters(torch.float32), parameters(torch.float32)
    user, torch_s = rule.torch(made), rule.torch(other)
    run(user, made, range(3))
    run(torch_s, other, range(3))
    fused = adopt(user, masters="fp32", state=state)
    run(user, made, range(3, 5))
    run(torch_s, other, range(3, 5))
    if rule.ours is not SGD:  # torch's counts no steps
        assert {entries["step"].item() for entries in fused.state.values()} == {5.0}
    for ours, theirs in zip(made, other):
        if state == "fp32":
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        else:
            assert (ours - theirs).norm() <= 0.05 * theirs.detach().norm() + 0.02


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
NOT_ADOPTED: dict[str, tuple[Any, dict[str, str], list[str]]] = {
    "class": (lambda: torch.optim.RMSprop(parameters()), {}, ["RMSprop", "torch.optim.AdamW", "with_masters"]),
    "Mezzo's": (lambda: SGD(parameters()), {}, ["mezzo", "SGD"]),
    "amsgrad": (lambda: torch.optim.AdamW(parameters(), amsgrad=True), {}, ["amsgrad=True", "with_masters"]),
    "differentiable": (lambda: torch.optim.SGD(parameters(), lr=0.1, differentiable=True), {},
     ["differentiable=True", "with_masters"]),
    "state": (lambda: torch.optim.AdamW(parameters()), {"state": "fp8"}, ["'fp8'", "int8"]),
}  # fmt: skip


@pytest.mark.parametrize("row", NOT_ADOPTED)
def test_what_can_t_be_adopted_is_left_as_it_was(row: str) -> None:
    make, modes, words = NOT_ADOPTED[row]
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


def test_arguments_that_only_torchs_optimizers_have() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UnknownArgumentError, match=r"'fused'\. Leave it out"):
        mezzo.optim.AdamW([weight], fused=True)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError, match=r"'amsgrad'\. mezzo\.optim lacks it"):
        mezzo.optim.Adam([weight], amsgrad=True)  # type: ignore[call-arg]
