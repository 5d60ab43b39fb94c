"""GradScaler: gradients that are written between `unscale_` and `step`, as an average over processes is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo

INF = float("inf")
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "mezzo.optim": lambda p: mezzo.optim.AdamW(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


def averaged(params: list[Tensor], other: float) -> None:
    for p in params:
        assert p.grad is not None
        p.grad.add_(torch.full_like(p.grad, other)) if not p.grad.is_sparse else p.grad._values().add_(other)


def replaced(params: list[Tensor], other: float) -> None:
    for p in params:
        assert p.grad is not None
        p.grad = p.grad * (1.0 if other == 0.0 else other)


def one_of_many(params: list[Tensor], other: float) -> None:
    grad = params[-1].grad
    assert grad is not None
    values = grad._values() if grad.is_sparse else grad
    values[-1] += other


WRITES = {"added": averaged, "replaced": replaced, "one row": one_of_many}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("other", "skips"), [(0.0, False), (1e30, False), (INF, True), (-INF, True), (float("nan"), True)]
)
def test_a_step_looks_at_what_was_written_since_unscale(
    name: str, write: str, other: float, skips: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(4, 2, sparse=True) if name == "SparseAdam" else nn.Linear(4, 2)
    x = torch.arange(4) if name == "SparseAdam" else torch.ones(3, 4)
    params: list[Tensor] = list(model.parameters())
    optimizer, scaler = OPTIMIZERS[name](params), mezzo.GradScaler("cpu")
    before = [p.detach().clone() for p in params]
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    WRITES[write](params, other)
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.was_skipped(optimizer) == skips
    if other != 1e30:  # whose square is infinite in Adam: it does not move
        assert all(torch.equal(a, b) for a, b in zip(before, params)) == skips
    assert all(bool(p.isfinite().all()) for p in params)
    assert scaler.get_scale() == (2.0**15 if skips else 2.0**16)
    if not skips:  # only read
        for p, grad in zip(params, grads):
            assert p.grad is not None
            assert grad is not None
            assert torch.equal(p.grad.to_dense(), grad.to_dense())
