"""MixedPrecision over a FusedOptimizer: one pass over the gradients, none of which is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.core.errors import UsageError
from mezzo.pytorch.optim.optimizers import SGD, AdamW
from mezzo.pytorch.training import turns
from mezzo.pytorch.weights.lowering import lower_weights
from training_steps import (  # noqa: F401
    INF,
    NAN,
    Waits,
    as_on_an_accelerator,
    batch,
    everything,
    network,
    nobody_owns_anything,
    run,
    same,
    who_decides,
)

PRECISIONS = ("fp32", "bf16", "fp16")


def fused(model: nn.Module, precision: str, low: bool, **arguments: Any) -> Any:
    """A MixedPrecision over Mezzo's own AdamW; `low`: weights in the compute format."""
    if low and precision != "fp32":
        lower_weights(model, precision)
    return mezzo.MixedPrecision(model, AdamW(model.parameters(), lr=0.05), precision, **arguments)


def no_gradient_written(model: nn.Module) -> Callable[[], int]:
    """Watch gradients from when they arrive; the call says how many there were and that all are as they came."""
    seen: list[tuple[Tensor, Tensor, int]] = []

    def note(param: Tensor) -> None:
        assert param.grad is not None
        seen.append((param.grad, param.grad.clone(), param.grad._version))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)

    def check() -> int:
        for grad, before, version in seen:
            assert grad._version == version
            assert torch.equal(grad.nan_to_num(7.0), before.nan_to_num(7.0))
        count = len(seen)
        seen.clear()
        return count

    return check


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_no_gradient_is_written(precision: str, low: bool, factor: float, decides: str) -> None:
    model = network()
    mp = fused(model, precision, low, clip_norm=0.1)
    check = no_gradient_written(model)
    for _ in range(2):
        run(mp, factor=factor)
    assert check() == 2 * len(list(model.parameters()))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clip_norm", [None, 0.1, 100.0])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_equals_the_passes_one_by_one(precision: str, clip_norm: float | None, accumulate: int) -> None:
    """FP32 weights and gradients: unscaled and clipped in place by torch, or multiplied in Mezzo's kernel.

    A short window at the end: its gradients are multiplied once more.
    """
    results, moved = [], []
    for passes in ("one", "many"):
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        mp = mezzo.MixedPrecision(
            model, optimizer, precision, clip_norm=clip_norm, accumulate=accumulate, loss_scale=None
        )
        if passes == "many":
            mp._turn = turns.InPlace(optimizer, None, clip_norm)
        told = [run(mp, index) for index in range(4 * accumulate)]
        if accumulate > 1:
            told += [run(mp, 7), mp.flush()]
        results.append([r.grad_norm for r in told if r.updated])
        moved.append([p.detach().clone() for p in model.parameters()])
    for one, many in zip(*moved):
        assert torch.allclose(one, many, rtol=1e-5, atol=1e-7)
    one_norms, norms = results
    if clip_norm is None:
        # One pass looks for NaN by a sum of squares, so that fp16 has the norm for nothing.
        assert norms == [None] * len(norms)
        assert [norm is None for norm in one_norms] == [precision != "fp16"] * len(norms)
    else:
        assert one_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("low", [False, True])
def test_a_clip_is_of_unscaled_gradients_in_16_bits_too(low: bool, decides: str) -> None:
    for precision in PRECISIONS:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        if low and precision != "fp32":
            lower_weights(model, precision)
        mp = mezzo.MixedPrecision(
            model, SGD(model.parameters(), lr=0.125), precision, clip_norm=1.0, loss_scale=2.0**8
        )
        with mp.autocast():
            loss = model(torch.ones(1, 4)).sum()
        result = mp.step(loss)
        assert result.grad_norm == pytest.approx(2.0, rel=1e-6)
        assert model.weight.detach().flatten().tolist() == pytest.approx([-0.0625] * 4, rel=1e-5)


def test_finite_gradients_whose_squares_overflow_fp32_are_no_overflow() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    mp = mezzo.MixedPrecision(model, SGD(model.parameters(), lr=1.0), "fp32", loss_scale=1.0, clip_norm=1.0)
    result = mp.step((model.weight * 2.0**100).sum())
    assert result.moved
    assert result.grad_norm == pytest.approx(math.sqrt(2) * 2.0**100)
    assert model.weight.detach().flatten().tolist() == pytest.approx([-(0.5**0.5)] * 2)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_without_a_loss_scale_nan_does_what_it_does_in_the_plain_loop(clip_norm: float | None) -> None:
    model = network()
    mp = fused(model, "bf16", True, clip_norm=clip_norm)
    result = run(mp, factor=NAN)
    assert (result.moved, result.skipped) == (True, False)
    assert all(p.isnan().all() for p in model.parameters())
    assert (result.grad_norm is None) == (clip_norm is None)


@pytest.mark.parametrize(
    ("clip_value", "clip_norm", "expected"),
    [(3.5, math.inf, [3.0, -3.5]), (1.0, 1.0, [0.5**0.5, -(0.5**0.5)])],
)
@pytest.mark.parametrize("weights", ["fp32", "masters"])
def test_a_clip_of_values_takes_the_old_way_in_fp32(
    clip_value: float, clip_norm: float | None, expected: list[float], weights: str
) -> None:
    """2**-8 of each: unscaled in fp16, some of it would be subnormal."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    mp = mezzo.MixedPrecision(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        "fp16",
        weights=weights,
        clip_value=clip_value,
        clip_norm=clip_norm,
        loss_scale=2.0**10,
    )
    result = mp.step((model.weight.float() * torch.tensor([[3.0, -4.0]])).sum())
    assert result.grad_norm == 5.0
    assert (-model.weight.detach()).flatten().tolist() == pytest.approx(expected, rel=1e-3)


def test_small_fp16_gradients_are_unscaled_in_fp32() -> None:
    """2**-30 is zero in fp16: unscaled where it lies it would be lost, and the master would not move."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    lower_weights(model, "fp16")
    optimizer = SGD(model.parameters(), lr=1.0)
    mp = mezzo.MixedPrecision(model, optimizer, "fp16", loss_scale=2.0**16)
    result = mp.step((model.weight.float() * 2.0**-30).sum())
    assert result.grad_norm == 2.0**-30
    assert float(optimizer.master(model.weight)) == -(2.0**-30)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 1, sparse=True)
    mp = mezzo.MixedPrecision(model, SGD(model.parameters(), lr=1.0), "fp32", clip_norm=1.0)
    with pytest.raises(UsageError, match="sparse"):
        mp.step(model(torch.tensor([1, 3])).sum())
    assert mp._window.seen == 0
    assert model.weight.grad is None


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("factor", [1.0, INF])
def test_nothing_waits_for_the_device(
    low: bool, precision: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the CPU's own kernel, which has no queue to wait for, is asked whether it reads a number."""
    as_on_an_accelerator(monkeypatch)
    model = network()
    mp = fused(model, precision, low, clip_norm=1.0, accumulate=2)
    for index in range(4):
        run(mp, index)
    real, arguments = mp.optimizer.step, []

    def step(**given: Tensor | None) -> None:
        arguments.append(given)
        with torch.utils._python_dispatch._disable_current_modes():
            real(**given)

    monkeypatch.setattr(mp.optimizer, "step", step)
    with Waits() as waits:
        run(mp, 4, factor)
        result = run(mp, 5, factor)
    assert waits.seen == []
    assert len(arguments) == 1
    assert all(value is None or value.dim() == 0 for value in arguments[0].values())
    assert result.skipped == (factor == INF and precision == "fp16")


def test_a_gradient_that_arrives_late_or_never_is_as_in_torch() -> None:
    """Only parameters with a gradient move; one that is frozen and thawed starts then."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    lower_weights(model, "bf16")
    model[0].requires_grad_(False)
    mp = mezzo.MixedPrecision(model, AdamW(model.parameters(), masters="split"), "bf16", clip_norm=1.0)
    before = [p.detach().clone() for p in model[0].parameters()]
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])

    def step() -> Any:
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        return mp.step(loss)

    assert step().moved
    assert same([p.detach() for p in model[0].parameters()], before)
    model[0].requires_grad_(True)
    assert step().moved
    # A first move of AdamW's is lr = 1e-3: in the masters always, in a bf16 weight only where it crosses an ulp.
    assert not torch.equal(mp.optimizer.master(model[0].weight), before[0].float())
