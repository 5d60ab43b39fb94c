"""FP32 masters under any torch optimizer: to the bit, with closures, edits, saved states, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo
from mastered import DTYPES, OPTIMIZERS, give_gradients, masters, model_of, same, trained
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.optimizer_step.storage import encode_nearest
from mezzo.pytorch.optim.with_masters import with_masters
from mezzo.pytorch.weights.lowering import lower_weights

NAN = float("nan")


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_equal_the_same_optimizer_in_fp32_to_the_bit(name: str, fmt: str) -> None:
    model, exact = model_of(), model_of()
    lower_weights(model, fmt)
    optimizer, reference = (
        with_masters(OPTIMIZERS[name](model.parameters())),
        OPTIMIZERS[name](exact.parameters()),
    )
    for index in range(50):
        give_gradients(model, exact, seed=index)
        kept = [p.grad for p in model.parameters()]
        optimizer.step()
        reference.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), kept))
    assert same(masters(model, optimizer), list(exact.parameters()))
    for p, q in zip(model.parameters(), exact.parameters()):
        weight = q.detach() if p.dtype is torch.float32 else encode_nearest(q.detach(), p.dtype)
        assert torch.equal(p, weight)
        entry = {k: v for k, v in optimizer.state[p].items() if k != "master"}
        assert entry.keys() == reference.state[q].keys()
        for key, value in reference.state[q].items():
            assert torch.equal(entry[key], value) if isinstance(value, Tensor) else entry[key] == value
    if name == "custom":
        assert optimizer.param_groups[0]["moved"] == 50


def test_nothing_of_fp32_is_left_of_the_gradients() -> None:
    model = model_of()
    lower_weights(model)
    optimizer = with_masters(torch.optim.SGD(model.parameters(), lr=0.1))
    give_gradients(model)
    optimizer.step()
    assert all(master.grad is None for master in optimizer._masters.values())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_fp32_parameters_pass_through() -> None:
    model, exact = model_of(), model_of()
    optimizer, reference = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, exact))
    wrapped = with_masters(optimizer)
    for index in range(3):
        give_gradients(model, exact, seed=index)
        wrapped.step()
        reference.step()
    assert same(list(model.parameters()), list(exact.parameters()))
    assert not any("master" in entry for entry in wrapped.state.values())


@pytest.mark.parametrize("over", ["wrapper", "inside, before", "inside, after"])
def test_schedulers_over_either_object_set_the_rate(over: str) -> None:
    model, exact = model_of(), model_of()
    lower_weights(model)
    inside = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-2, foreach=False)
    make = lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)  # noqa: E731
    early = make(inside) if over == "inside, before" else None
    optimizer = with_masters(inside)
    scheduler = early or make(optimizer if over == "wrapper" else inside)
    expected = make(reference)
    for index in range(7):
        give_gradients(model, exact, seed=index)
        optimizer.step()
        scheduler.step()
        reference.step()
        expected.step()
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] == 1e-2 / 8
    assert same(masters(model, optimizer), list(exact.parameters()))


def test_the_object_that_was_handed_over_steps_through_the_masters() -> None:
    model, exact = model_of(), model_of()
    lower_weights(model)
    script_s = OPTIMIZERS["adamw"](model.parameters())
    optimizer, reference = with_masters(script_s), OPTIMIZERS["adamw"](exact.parameters())
    for index in range(4):
        give_gradients(model, exact, seed=index)
        script_s.step()
        reference.step()
    assert same(masters(model, optimizer), list(exact.parameters()))
    saved = copy.deepcopy(script_s.state_dict())
    give_gradients(model)
    script_s.step()
    script_s.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["master"].dtype is torch.float32
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float32
    script_s.zero_grad()
    assert model[0].weight.grad is None


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=1.0, max_iter=20, line_search_fn="strong_wolfe")


def fitted(precision: str) -> float:
    """The least squares left by a regression whose weights are near 10, 100 small steps from 9.5 on."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 8, generator=generator)
    y = x @ (10.0 + torch.randn(8, 1, generator=torch.Generator().manual_seed(1)))
    layer = nn.Linear(8, 1, bias=False)
    nn.init.constant_(layer.weight, 9.5)
    if precision != "fp32":
        lower_weights(layer)
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=20)
    if precision == "masters":
        optimizer = with_masters(optimizer)

    def closure() -> Tensor:
        assert optimizer.param_groups[0]["params"] == [layer.weight]
        optimizer.zero_grad()
        loss = (x @ layer.weight.float().T - y).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    return closure().item()


def test_lbfgs_on_bf16_weights_converges_where_the_plain_one_stops() -> None:
    losses = {precision: fitted(precision) for precision in ("fp32", "plain bf16", "masters")}
    # bf16 weights near 10 are up to 1/32 from the best ones: 8 of them leave 8 * (1/32)^2 / 3 on average.
    assert losses["fp32"] < 1e-7
    assert losses["masters"] < 8 / 1024, losses
    assert losses["plain bf16"] > 10 * losses["masters"], losses


def test_a_closure_sees_the_weights_that_its_evaluation_is_of() -> None:
    model, exact = model_of(), model_of()
    lower_weights(model)
    optimizer, reference = with_masters(lbfgs(model.parameters())), lbfgs(exact.parameters())
    counts, seen = [0, 0], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        counts[0] += 1
        for p in model.parameters():
            master = optimizer.state[p].get("master", p.detach())
            assert torch.equal(p, encode_nearest(master, p.dtype) if p.dtype is torch.bfloat16 else master)
        seen.append(model[0].weight.detach().clone())
        give_gradients(model, seed=counts[0])
        return torch.tensor(float(counts[0]))

    def in_fp32() -> Tensor:
        reference.zero_grad()
        counts[1] += 1
        give_gradients(model, exact, seed=counts[1])
        return torch.tensor(float(counts[1]))

    for _ in range(3):
        optimizer.step(closure)
        reference.step(in_fp32)
    assert counts[0] == counts[1] > 3
    assert len({tuple(weight.flatten().tolist()) for weight in seen}) > 3
    assert same(masters(model, optimizer), list(exact.parameters()))


def test_a_closure_that_raises_leaves_the_model_in_place() -> None:
    model = model_of()
    lower_weights(model)
    optimizer = with_masters(lbfgs(model.parameters()))

    def closure() -> Tensor:
        raise KeyError("the loader ended")

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError, match="the loader ended"):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert same(before, list(model.parameters()))
    assert optimizer.state[model[0].weight]["master"].dtype is torch.float32


@pytest.mark.parametrize("fmt", DTYPES)
def test_an_edited_weight_starts_its_master_anew_element_by_element(fmt: str) -> None:
    model = model_of()
    lower_weights(model, fmt)
    optimizer = with_masters(torch.optim.SGD(model.parameters(), lr=1e-5))
    give_gradients(model)
    optimizer.step()
    weight = model[0].weight
    before = optimizer.master(weight)
    weight.data[0] = 0.0
    weight.data[1] = 3.0
    weight.data[2, 2] = NAN
    expected = before.clone()
    expected[0], expected[1], expected[2, 2] = 0.0, 3.0, NAN
    torch.testing.assert_close(optimizer.master(weight), expected, rtol=0, atol=0, equal_nan=True)
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close(optimizer.master(weight), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(weight.isnan(), expected.isnan())


def test_clipping_hooks_of_the_inner_optimizer_see_fp32_gradients() -> None:
    model = model_of()
    lower_weights(model)
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    inside.register_step_pre_hook(
        lambda o, *_: seen.append({p.grad.dtype for g in o.param_groups for p in g["params"]})
    )
    give_gradients(model)
    with_masters(inside).step()
    assert seen == [{torch.float32}]


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, mezzo.GradScaler])
@pytest.mark.parametrize("fmt", DTYPES)
def test_a_scaler_divides_in_fp32_and_skips(scaler_class: Any, fmt: str) -> None:
    model, exact = model_of(), model_of()
    lower_weights(model, fmt)
    optimizer, reference = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, exact))
    optimizer = with_masters(optimizer)
    scaler = scaler_class("cpu", init_scale=2.0**10)
    for index in range(4):
        scaler.scale(torch.zeros(()))
        give_gradients(model, exact, seed=index)
        for p, q in zip(model.parameters(), exact.parameters()):
            # A gradient that fp16 holds only while it is scaled.
            p.grad = (q.grad * 2.0**-4).to(p.dtype)
            q.grad = p.grad.float() / 2.0**10
        before = masters(model, optimizer)
        if index == 2:
            model[2].weight.grad[0, 0] = NAN
        scaler.step(optimizer)
        scaler.update()
        if index == 2:
            assert same(masters(model, optimizer), before)
            scaler.update(2.0**10)
        else:
            reference.step()
    assert same(masters(model, optimizer), list(exact.parameters()))


def test_mezzo_s_scaler_undoes_a_closure_with_masters_and_state() -> None:
    model = model_of()
    lower_weights(model)
    optimizer = with_masters(lbfgs(model.parameters()))
    scaler = mezzo.GradScaler(init_scale=4.0)
    calls = [0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls[0] += 1
        give_gradients(model, seed=calls[0], scale=4.0)
        if calls[0] == 3:
            model[0].weight.grad[0, 0] = NAN
        loss = torch.tensor(NAN if calls[0] == 3 else float(calls[0]))
        scaler.scale(loss)
        return loss

    before = masters(model, optimizer)
    scaler.step(optimizer, closure)
    assert scaler.was_skipped(optimizer)
    assert calls[0] == 3
    assert same(masters(model, optimizer), before)


def test_sparse_gradients_reach_the_inner_optimizer() -> None:
    table, exact = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, sparse=True)
    exact.load_state_dict(table.state_dict())
    lower_weights(table)
    optimizer = with_masters(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    reference = torch.optim.SparseAdam(exact.parameters(), lr=0.1)
    for _ in range(3):
        for layer in (table, exact):
            layer.zero_grad()
            layer(torch.tensor([1, 3, 3])).sum().backward()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.master(table.weight), exact.weight)


def test_groups_that_are_added_later_have_masters() -> None:
    model, exact = model_of(), model_of()
    lower_weights(model)
    optimizer = with_masters(torch.optim.SGD(model[0].parameters(), lr=0.1))
    reference = torch.optim.SGD(exact[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
    optimizer.inner.add_param_group({"params": list(model[2].parameters()), "lr": 0.3})
    for index, rate in ((1, 0.2), (2, 0.3)):
        reference.add_param_group({"params": list(exact[index].parameters()), "lr": rate})
    for index in range(3):
        give_gradients(model, exact, seed=index)
        optimizer.step()
        reference.step()
    assert same(masters(model, optimizer), list(exact.parameters()))


def test_the_model_may_be_brought_back_to_fp32() -> None:
    model, optimizer = trained("adamw")
    model.float()
    give_gradients(model)
    optimizer.step()
    assert not any("master" in entry for entry in optimizer.state.values())
    broken, optimizer = trained("adamw")
    broken[0].weight.data = broken[0].weight.data[:2].clone()
    with pytest.raises(UsageError, match="replaced by another shape"):
        optimizer.step()


def test_frozen_parameters_and_those_without_gradient_stay() -> None:
    model = model_of()
    lower_weights(model)
    model[0].weight.requires_grad_(False)
    optimizer = with_masters(OPTIMIZERS["adamw"](model.parameters()))
    before = masters(model, optimizer)
    give_gradients(model)
    model[0].weight.grad = model[2].bias.grad = None
    optimizer.step()
    after = masters(model, optimizer)
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, False, False, False, False, True]


def test_what_is_refused() -> None:
    model, optimizer = trained("adamw")
    with pytest.raises(UsageError, match="WithMasters has masters already"):
        with_masters(optimizer)
    with pytest.raises(UsageError, match="AdamW has masters already"):
        with_masters(optimizer.inner)
    with pytest.raises(UsageError, match=r"takes a torch\.optim\.Optimizer, received list"):
        with_masters([1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without differentiable=True"):
        with_masters(torch.optim.AdamW(model_of().parameters(), differentiable=True))
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match="no such parameter"):
        optimizer.master(stranger)
    with pytest.raises(UsageError, match="no such parameter"):
        optimizer.set_master(stranger, torch.zeros(3))
    with pytest.raises(UsageError, match=r"value is \(3,\) and the parameter \(16, 8\)"):
        optimizer.set_master(model[0].weight, torch.zeros(3))


def test_a_weight_has_its_master_with_one_optimizer() -> None:
    model, optimizer = trained("adamw")
    plain = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(
        UsageError, match=r"two optimizers hold a master .* the WithMasters before, and now this WithM"
    ):
        with_masters(plain)
    assert "step" not in vars(plain)
    assert not plain.state
    with pytest.raises(UsageError, match="the WithMasters before, and now this AdamW"):
        mezzo.optim.AdamW(model.parameters()).master(model[0].weight)
    del optimizer
    with_masters(plain)
    fresh = model_of()
    lower_weights(fresh)
    fused = mezzo.optim.AdamW(fresh.parameters())
    give_gradients(fresh)
    fused.step()
    with pytest.raises(UsageError, match="the AdamW before, and now this WithMasters"):
        with_masters(OPTIMIZERS["sgd"](fresh.parameters()))
    with pytest.raises(UsageError, match="AdamW has masters already"):
        with_masters(fused)
    adopted = torch.optim.AdamW(model_of().parameters())
    mezzo.optim.adopt(adopted, masters="fp32", state="fp32")
    with pytest.raises(UsageError, match="AdamW has masters already"):
        with_masters(adopted)


def test_it_goes_when_nothing_holds_it() -> None:
    _, optimizer = trained("adamw")
    gone = weakref.ref(optimizer)
    del optimizer, _
    gc.collect()
    assert gone() is None


def test_averages_of_masters_equal_those_of_fp32_training() -> None:
    """`AveragedModel` averages what it finds, so over bf16 weights in bf16: average an FP32 shadow instead."""
    model, exact = model_of(), model_of()
    lower_weights(model)
    optimizer, reference = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, exact))
    optimizer = with_masters(optimizer)
    shadow = copy.deepcopy(model).float()
    average = AveragedModel(shadow, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = AveragedModel(exact, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    low = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for index in range(10):
        give_gradients(model, exact, seed=index)
        optimizer.step()
        reference.step()
        shadow.load_state_dict(mezzo.master_state_dict(model, optimizer))
        average.update_parameters(shadow)
        expected.update_parameters(exact)
        low.update_parameters(model)
    assert same(list(average.parameters()), list(expected.parameters()))
    for p, q in zip(low.parameters(), expected.parameters()):
        torch.testing.assert_close(p.float(), q, rtol=0.02, atol=0.02)
