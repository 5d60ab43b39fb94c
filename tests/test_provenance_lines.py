"""The user's line of a fault in the loss: learnt when watched, said again where it is the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.core.finding import OUTSIDE, Finding

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def mp() -> Iterator[mezzo.MixedPrecision]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    made = mezzo.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), "fp16", loss_scale=1.0, trace=True
    )
    yield made
    made.close()


def found(mp: mezzo.MixedPrecision, loss: Loss, size: int = 5) -> Finding:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))
    with mp.autocast():
        value = loss(mp.model(x), torch.arange(size) % 3)
    finding = mp.step(value).finding
    assert finding is not None
    return finding


def logarithm(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + torch.log(out[0, 0] * 0)


def logarithm_elsewhere(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y).exp() + torch.log(out[0, 0] * 0)


def root(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + (out.float() * 0).norm(dim=1).sqrt().sum()


def second_of_two(out: Tensor, y: Tensor) -> Tensor:
    first = torch.log(out[0, 0].float().abs() + 1)
    return first + torch.log(out[1, 1].float().abs() * 0)


def first_of_two(out: Tensor, y: Tensor) -> Tensor:
    first = torch.log(out[0, 0].float().abs() * 0)
    return first + torch.log(out[1, 1].float().abs() + 1)


@pytest.mark.parametrize(("loss", "code"), [(logarithm, "torch.log(out[0, 0] * 0)"), (root, ".sqrt().sum()")])
def test_a_line_that_was_learnt_is_said_at_every_later_overflow(
    mp: mezzo.MixedPrecision, loss: Loss, code: str
) -> None:
    assert found(mp, loss).line == ""
    learnt = found(mp, loss)
    assert learnt.line.endswith(code)
    assert "earlier" not in learnt.note
    for size in (5, 4, 7):  # whatever the batch
        told = found(mp, loss, size)
        assert (told.line, told.op, told.module) == (learnt.line, learnt.op, OUTSIDE)
        assert "the line is that of an earlier overflow" in told.note
        assert not mp._observing.watches_live  # and no step is slow for it


def test_another_fault_does_not_get_it(mp: mezzo.MixedPrecision) -> None:
    found(mp, logarithm)
    assert found(mp, logarithm).line.endswith("torch.log(out[0, 0] * 0)")
    assert found(mp, logarithm_elsewhere).line == ""
    own = found(mp, logarithm_elsewhere).line
    assert "exp()" in own
    assert found(mp, root).line == ""
    assert found(mp, root).line.endswith(".sqrt().sum()")
    again = {found(mp, loss).line for loss in (logarithm, logarithm_elsewhere, root)}
    assert len(again) == 3
    assert "" not in again


def test_the_same_operation_at_another_place_of_a_loss_does_not_get_it(mp: mezzo.MixedPrecision) -> None:
    found(mp, second_of_two)
    assert "out[1, 1]" in found(mp, second_of_two).line
    told = found(mp, first_of_two)
    assert told.op == "log"
    assert told.line == ""
    assert "out[0, 0]" in found(mp, first_of_two).line
    assert "out[1, 1]" in found(mp, second_of_two).line


def test_the_same_graph_from_another_line_of_the_loop_does_not_get_it(mp: mezzo.MixedPrecision) -> None:
    found(mp, logarithm)
    assert found(mp, logarithm).line
    x = torch.randn(5, 6)
    with mp.autocast():
        value = logarithm(mp.model(x), torch.arange(5) % 3)
    told = mp.step(value).finding
    assert told is not None
    assert (told.op, told.line) == ("log", "")
