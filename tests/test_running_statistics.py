"""MovingBuffers by itself: what is copied, what that costs, what is learned, saved and mended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from bad_steps import same
from mezzo.pytorch.training.networks import SMALL, MovingBuffers
from moving_buffers import Averages, in_place, replaced, through_data, zeros


class Ops(TorchDispatchMode):
    """The ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def steps_of(statistics: MovingBuffers, forward: Callable[[], Any], number: int) -> None:
    for _ in range(number):
        statistics.remember()
        forward()
        statistics.restore(False)


def test_a_large_buffer_that_does_not_move_is_not_copied_after_the_learning_steps() -> None:
    still = Averages(through_data, large=zeros(SMALL), codes=zeros(SMALL, 4))

    def forward() -> None:
        still(torch.randn(8, 4))
        still.codes.data.add_(1.0)

    statistics = MovingBuffers(still)
    steps_of(statistics, forward, 2)
    with Ops() as ops:
        statistics.remember()
    assert ops.names.count("cat") == 1
    assert not {"clone", "_to_copy"} & set(ops.names)
    before = still.codes.clone()
    forward()
    assert {name.rpartition(".")[2] for name in statistics.state()} == {"mean", "codes"}
    statistics.restore(True)
    assert torch.equal(still.codes, before)


@pytest.mark.parametrize("write", [in_place, replaced])
def test_a_large_buffer_that_begins_to_move_late_is_copied_from_the_next_step_on(write: Any) -> None:
    model = Averages(write, mean=zeros(SMALL))
    statistics = MovingBuffers(model)
    steps_of(statistics, lambda: None, 3)
    steps_of(statistics, lambda: model(torch.randn(8, SMALL)), 1)
    before = model.mean.clone()
    statistics.remember()
    model(torch.randn(8, SMALL))
    assert not same(model.mean, before)
    statistics.restore(True)
    assert same(model.mean, before)


def test_batch_normalisation_alone_costs_two_copies_a_step_and_no_learning() -> None:
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(20)])
    statistics = MovingBuffers(model)
    with Ops() as ops:
        statistics.remember()
        statistics.restore(False)
    assert [name for name in ops.names if name not in ("view", "_unsafe_view", "reshape")] == ["cat", "cat"]


@pytest.mark.parametrize("size", [4, SMALL])
def test_what_moves_between_two_steps_is_not_undone(size: int) -> None:
    """A checkpoint that is loaded, a mask that the loop replaces: no forward pass did that."""
    module = Averages(lambda module, x: None, mask=zeros(size), other=zeros(size))
    statistics = MovingBuffers(module)
    forward = lambda: module(torch.randn(8, 4))  # noqa: E731
    steps_of(statistics, forward, 3)
    module.mask.fill_(5.0)
    module.other = torch.full((size,), 7.0)
    statistics.remember()
    forward()
    statistics.restore(True)
    assert module.mask.eq(5.0).all()
    assert module.other.eq(7.0).all()


def test_an_infinite_mask_of_the_script_stays_beside_another_network() -> None:
    """Copies outlive the step then. Only what a forward pass made infinite goes back to them."""
    trained = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), Averages(in_place, mask=zeros(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained.append((model, mezzo.MixedPrecision(model, optimizer, "fp16", trace=False)))
    for step in range(4):
        for model, mp in trained:
            if step == 2:
                model[1].mask[1] = -math.inf
            with mp.autocast():
                loss = model(torch.randn(8, 4)).square().mean()
            mp.step(loss)
    assert all(model[1].mask[1] == -math.inf for model, _ in trained)


def test_an_open_window_s_copies_are_saved_and_loaded() -> None:
    """`MixedPrecision.state_dict` in the middle of a window: the copies are of its start."""

    def made() -> tuple[nn.Module, MovingBuffers]:
        torch.manual_seed(0)
        model = nn.Sequential(Averages(in_place), nn.BatchNorm1d(4))
        return model, MovingBuffers(model)

    (model, statistics), (again, other) = made(), made()
    steps_of(statistics, lambda: model(torch.randn(8, 4)), 3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics.remember()
    model(torch.randn(8, 4))
    again.load_state_dict(model.state_dict())
    other.load(statistics.state())
    again(torch.full((8, 4), math.inf))
    other.restore(True)
    assert same(dict(again.named_buffers()), before)
