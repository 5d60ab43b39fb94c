"""Values that Mezzo restores (statistics, weights) leave graphs that still run backward intact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo
from bad_steps import INF
from mezzo.pytorch.monitor.replay import nothing_left
from mezzo.pytorch.snapshot import Snapshot


def explained(model: nn.Module, x: Tensor) -> None:
    mezzo.explain(model, x, precision="bf16")


def run_again(model: nn.Module, x: Tensor) -> None:
    with nothing_left(model):
        model(x)


def searched_for_a_batch_size(model: nn.Module, x: Tensor) -> None:
    snapshot = Snapshot([model])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    snapshot.restore()


def abandoned_closure(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    scaler = mezzo.GradScaler(init_scale=2.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = next(model.parameters()).sum() * INF
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert scaler.was_skipped(optimizer)


@pytest.mark.parametrize("write", [explained, run_again, searched_for_a_batch_size, abandoned_closure])
def test_a_living_graph_runs_backward(write: Callable[[nn.Module, Tensor], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    model.load_state_dict(before)
    out = model(x).square().sum()
    write(model, x.detach())
    (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, expected)
