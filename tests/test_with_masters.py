"""FP32 masters under any torch optimizer: to the bit, with closures, edits, saved states, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mezzo
from bad_steps import same
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.optimizer_step.reference import encode_master
from mezzo.pytorch.optim.with_masters import WithMasters, with_masters
from mezzo.pytorch.weights import stored_parameters
from mezzo.pytorch.weights.stored_parameters import lower_weights
from releases import before_torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SignOfMomentum(torch.optim.Optimizer):
    """A user's optimizer, which asks `in` whether a parameter has a state, and replaces `.data`."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "moved": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["moved"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["m"] = torch.zeros_like(p)
                self.state[p]["m"].lerp_(p.grad, 0.1)
                p.data = p.data - group["lr"] * self.state[p]["m"].sign()


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "custom": SignOfMomentum,
}


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def give_gradients(low: nn.Module, wide: nn.Module | None = None, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    others = list(wide.parameters()) if wide is not None else [None] * len(list(low.parameters()))
    for p, q in zip(low.parameters(), others):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = grad * scale
        if q is not None:
            q.grad = grad.float()


def masters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [optimizer.master(p) for p in model.parameters()]


def trained(name: str, steps: int = 3) -> tuple[nn.Sequential, WithMasters]:
    model = model_of()
    lower_weights(model)
    optimizer = with_masters(OPTIMIZERS[name](model.parameters()))
    for index in range(steps):
        give_gradients(model, seed=index)
        optimizer.step()
    return model, optimizer


NAN = float("nan")


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_equal_the_same_optimizer_in_fp32_to_the_bit(name: str, fmt: str) -> None:
    if name == "adagrad":
        before_torch(2, 12, "Adagrad has no state for groups that are added later")
    model, exact = model_of(), model_of()
    lower_weights(model, fmt)
    # Two groups of three are added later.
    optimizer = with_masters(OPTIMIZERS[name](model[0].parameters()))
    reference = OPTIMIZERS[name](exact[0].parameters())
    for index in (1, 2):
        for of, its in ((model, optimizer), (exact, reference)):
            its.add_param_group({"params": list(of[index].parameters()), "lr": 1e-3 * index})
    for index in range(50):
        give_gradients(model, exact, seed=index)
        kept = [p.grad for p in model.parameters()]
        optimizer.step()
        reference.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), kept))
    assert same(masters(model, optimizer), list(exact.parameters()))
    for p, q in zip(model.parameters(), exact.parameters()):
        weight = q.detach() if p.dtype is torch.float32 else encode_master("fp32", q.detach(), p.dtype)[0]
        assert torch.equal(p, weight)
        entry = {k: v for k, v in optimizer.state[p].items() if k != "master"}
        assert entry.keys() == reference.state[q].keys()
        for key, value in reference.state[q].items():
            assert torch.equal(entry[key], value) if isinstance(value, Tensor) else entry[key] == value
    if name == "custom":
        assert optimizer.param_groups[0]["moved"] == 50


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=1.0, max_iter=20, line_search_fn="strong_wolfe")


def test_a_closure_sees_the_weights_that_its_evaluation_is_of() -> None:
    model, exact = model_of(), model_of()
    lower_weights(model)

    def trajectory(of: nn.Sequential, optimizer: Any) -> list[Tensor]:
        seen: list[Tensor] = []

        def closure() -> Tensor:
            for p in of.parameters():
                if p.dtype is torch.bfloat16 and "master" in optimizer.state[p]:
                    assert torch.equal(p, encode_master("fp32", optimizer.state[p]["master"], p.dtype)[0])
            seen.append(of[0].weight.detach().clone())
            give_gradients(model, exact, seed=len(seen))
            return torch.tensor(float(len(seen)))

        for _ in range(3):
            optimizer.step(closure)
        return seen

    optimizer = with_masters(lbfgs(model.parameters()))
    seen, truth = trajectory(model, optimizer), trajectory(exact, lbfgs(exact.parameters()))
    assert len({tuple(weight.flatten().tolist()) for weight in seen}) > 3
    assert all(torch.equal(encode_master("fp32", b, a.dtype)[0], a) for a, b in zip(seen, truth, strict=True))
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


def test_small_tensors_are_written_together_with_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time here, of one format; others by themselves: another layout, larger ones in parts."""
    monkeypatch.setattr(stored_parameters, "_PIECE", 64)
    monkeypatch.setattr(stored_parameters, "_SMALL", 32)
    generator = torch.Generator().manual_seed(0)
    sizes: list[Callable[[Tensor], Tensor]] = [
        *(
            lambda x: x[0, :7],
            lambda x: x[:4],
            lambda x: x[0, 0],
            lambda x: x[:0],
            lambda x: x[:6].t(),
            lambda x: x[::2, :3],
        ),
        *(lambda x: x[:, :2].flatten(), lambda x: x, lambda x: x[:3], lambda x: x[1:5]),
    ]
    wide = [size(torch.randn(12, 10, generator=generator)) for size in sizes]
    low = [torch.empty_like(x, dtype=torch.float16 if n > 7 else torch.bfloat16) for n, x in enumerate(wide)]
    calls = []

    def rounded(part: Tensor, weight: Tensor) -> Tensor:
        calls.append(part.numel())
        return encode_master("fp32", part, weight.dtype)[0]

    stored_parameters.write(((weight, x, weight) for weight, x in zip(low, wide)), rounded)
    for weight, x in zip(low, wide):
        assert same(weight, encode_master("fp32", x, weight.dtype)[0])
    assert calls == [40, 60, 18, 64, 56, 40, 8, 24, 30]


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, mezzo.GradScaler])
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_a_scaler_divides_in_fp32_and_skips(scaler_class: Any, fmt: str, name: str) -> None:
    model, exact = model_of(), model_of()
    lower_weights(model, fmt)
    optimizer, reference = (OPTIMIZERS[name](m.parameters()) for m in (model, exact))
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


def test_a_weight_of_another_shape_is_refused() -> None:
    broken, optimizer = trained("adamw")
    broken[0].weight.data = broken[0].weight.data[:2].clone()
    with pytest.raises(UsageError, match="another shape"):
        optimizer.step()


def test_what_is_refused() -> None:
    model, optimizer = trained("adamw")
    adopted = torch.optim.AdamW(model_of().parameters())
    mezzo.optim.adopt(adopted, masters="fp32", state="fp32")
    differentiable = torch.optim.AdamW(model_of().parameters(), differentiable=True)
    refused: list[tuple[Any, str]] = [
        (optimizer, "AdamW has masters already"),
        (mezzo.optim.AdamW(model_of().parameters()), "AdamW has masters already"),
        (adopted, "AdamW has masters already"),
        ([1], "received list"),
        (torch.optim.SGD(model.parameters()), "two optimizers.*AdamW and SGD"),
        (differentiable, "differentiable=True"),
    ]
    for wrong, message in refused:
        with pytest.raises(UsageError, match=message):
            with_masters(wrong)
    stranger = nn.Parameter(torch.zeros(3))
    for call in (optimizer.master, lambda param: optimizer.set_master(param, torch.zeros(3))):
        with pytest.raises(UsageError, match=r"shape \[3\] is in no group"):
            call(stranger)
    with pytest.raises(UsageError, match=r"\[3\].*\[16, 8\]"):
        optimizer.set_master(model[0].weight, torch.zeros(3))


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

    cases: list[tuple[Callable[[Any], object], str]] = [
        (lambda s: s["state"][0].pop("master"), "none for parameter 0, .*bfloat16"),
        (lambda s: s["state"][2].update(master=torch.zeros(16)), "parameter 2, .*float32"),
        (lambda s: s["state"][0].update(master=torch.zeros(2, 2)), r"'master' of parameter 0 .*\[2, 2\]"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(2)), r"'exp_avg' of parameter 1 has shape \[2\]"),
        (lambda s: s["param_groups"][0]["params"].pop(), r"\[5\] .*\[6\]"),
        (lambda s: s["param_groups"].append({"params": []}), r"\[6, 0\]"),
        (lambda s: s.pop("state"), "param_groups"),
    ]
    before = copy.deepcopy(good)
    for change, message in cases:
        state = copy.deepcopy(good)
        change(state)
        with pytest.raises(UsageError, match=message):
            optimizer.load_state_dict(state)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.SGD, torch.optim.LBFGS])
def test_a_checkpoint_creates_the_states_of_a_new_optimizer_and_leaves_no_trace(kind: Any) -> None:
    settings = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD else {}
    nets = [nn.Linear(3, 2).bfloat16() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    one, other = (with_masters(kind(net.parameters(), lr=0.1, **settings)) for net in nets)
    state = get_state_dict(nets[0], one)[1]["state"]
    names = {"NAdam": {"exp_avg", "exp_avg_sq", "mu_product", "step"}, "SGD": {"momentum_buffer"}}
    assert state["weight"].keys() == {"master", *names.get(kind.__name__, ())}
    assert float(state["weight"].get("step", 0)) == 0
    assert all(param.grad is None for param in nets[0].parameters())
    for net, optimizer in zip(nets, (one, other)):

        def closure(net: nn.Module = net) -> Tensor:
            net.zero_grad()
            loss = net(torch.ones(1, 3).bfloat16()).float().square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    for p, q in zip(*(net.parameters() for net in nets)):
        assert torch.equal(one.master(p), other.master(q))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def separate(net: nn.Module) -> WithMasters:
    return with_masters(adamw(net))


# What the checkpoint lacks -> the optimizer that is saved, and the one that is loaded.
LACKS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "states of a parameter that had no gradient": (separate, separate),
    "separate masters": (adamw, separate),
    "masters in extra bits": (adamw, lambda net: mezzo.optim.AdamW(net.parameters(), masters="split")),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # in one process
@pytest.mark.parametrize("row", LACKS)
def test_a_checkpoint_that_lacks_entries_is_loaded_in_part(row: str, tmp_path: Path) -> None:
    """As docs/distributed.md says: states are those of the checkpoint, masters without one are the loaded weights."""
    saved, loaded = model_of(0).bfloat16(), model_of(1).bfloat16()
    saves, loads = LACKS[row]
    optimizer, other = saves(saved), loads(loaded)
    for seed in range(2):
        give_gradients(saved, seed=seed)
        saved[2].bias.grad = None
        optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(saved, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(loaded, other)
    held = {"model": weights, "optimizer": state}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(held, checkpoint_id=tmp_path, planner=planner)
    set_state_dict(loaded, other, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    for p, q in zip(saved.parameters(), loaded.parameters()):
        assert torch.equal(p, q)
        master = optimizer.master(p) if isinstance(optimizer, WithMasters) else p.float()
        assert torch.equal(other.master(q), master)
        for name, value in optimizer.state[p].items():
            assert torch.equal(other.state[q][name].float(), value.float()), name
    assert float(other.state[loaded[2].bias]["step"]) == 0
