"""The compiled CPU kernels equal the reference to the bit, whatever the numbers, sizes, layouts and threads."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import Row, reference

pytest.importorskip("numba", reason="the CPU kernels are compiled by Numba")

from mezzo.pytorch.kernels.optimizer_step import cpu

ADAMW = cases.HYPERS["adamw"]
SPLIT = ("split", "fp32", torch.bfloat16)
SAMPLE = [
    ("adamw", SPLIT),
    ("adamw", ("split8", "int8", torch.bfloat16)),
    ("lion", ("fp16", "bf16", torch.float16)),
]
RULES = ("adamw", "adam-l2-up", "sgd", "sgd-momentum", "sgd-nesterov-up", "lion")
# Weights and states share loops, so every two of them are together; each rule and each gradient's format is there too.
CHOICES = [
    (RULES[(i + 2 * j) % 6], (weights, state, cases.GRADS[(i + j) % 3]))
    for i, weights in enumerate(cases.WEIGHTS)
    for j, state in enumerate(cases.STATES)
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def compare(rule: str, mode: tuple[str, str, torch.dtype], sizes: tuple[int, ...], steps: int = 3) -> None:
    hyper = cases.HYPERS[rule]
    got = [cases.row(hyper, mode, size, ordinal) for ordinal, size in enumerate(sizes)]
    expected = cases.copied(got)
    step, truth = cpu.DeviceStepper(), reference.DeviceStepper()
    overflow, overflowed = torch.zeros(()), torch.zeros(())
    for index in range(steps):
        given = {"found_inf": torch.zeros(())} | ({"multiplier": torch.tensor(0.37)} if index else {})
        cases.move(step, hyper, got, overflow=overflow, **given)
        cases.move(truth, hyper, expected, overflow=overflowed, **given)
        cases.assert_same(got, expected)
        assert overflow == overflowed
        cases.new_gradients(index, got, expected)


@pytest.mark.parametrize(("rule", "mode"), SAMPLE)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_equals_the_reference(rule: str, mode: tuple[str, str, torch.dtype], count: int) -> None:
    torch.set_num_threads(count)
    compare(rule, mode, (1, 63, 64, 65, 1000, 65_537, 70_001))


@pytest.mark.heavy
@pytest.mark.parametrize(("rule", "mode"), CHOICES)
def test_every_choice_equals_the_reference(rule: str, mode: tuple[str, str, torch.dtype]) -> None:
    torch.set_num_threads(3)
    compare(rule, mode, (1, 63, 64, 65, 1000, 33_000))


def test_several_groups_kinds_and_numbers_of_moves_in_one_step() -> None:
    own = ("own", "fp32", torch.float32)
    sizes = ((SPLIT, 300), (own, 40_000), (SPLIT, 129), (own, 0), (own, 77))
    got = [cases.row(ADAMW, mode, count, i) for i, (mode, count) in enumerate(sizes)]
    expected = cases.copied(got)
    late = got[4].grad
    other = cases.HYPERS["adam-l2-up"]
    step, truth = cpu.DeviceStepper(), reference.DeviceStepper()
    for index in range(4):
        got[4].grad = expected[4].grad = late if index > 1 else None
        for stepper, rows in ((step, got), (truth, expected)):
            stepper([(ADAMW, rows[:2]), (other, rows[2:])], multiplier=None, found_inf=None, overflow=None)
        cases.assert_same(got, expected)
        cases.new_gradients(index, got[:4], expected[:4])
    assert got[4].step.item() == 2


def test_a_skipped_step_changes_nothing() -> None:
    rows = [cases.row(ADAMW, ("split8", "int8", torch.bfloat16), 1000, 1)]
    before = cases.copied(rows)
    for found in (1.0, -1.0, math.nan, math.inf):
        cases.move(cpu.DeviceStepper(), ADAMW, rows, found_inf=torch.tensor(found))
        cases.assert_same(rows, before)


def test_overflow_is_told_and_never_taken_back() -> None:
    of = cases.row(ADAMW, SPLIT, 100, 0, special=False)
    step, overflow = cpu.DeviceStepper(), torch.zeros(())
    for value, told in ((0.0, 0), (math.inf, 1), (0.0, 1)):
        of.weight[70] = value
        cases.move(step, ADAMW, [of], overflow=overflow)
        assert overflow == told


def test_elements_are_taken_in_memory_order_wherever_tensors_move() -> None:
    def channels_last(tensor: Tensor) -> Tensor:
        return tensor.view(4, 5, 6, 3).to(memory_format=torch.channels_last)

    of = cases.row(ADAMW, SPLIT, 360, 0)
    for name in ("weight", "master", "grad"):
        setattr(of, name, channels_last(getattr(of, name)))
    of.states = tuple(map(channels_last, of.states))
    (expected,) = cases.copied([of])
    step, truth = cpu.DeviceStepper(), reference.DeviceStepper()
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        of.weight.data = of.weight.data.clone()
        of.grad = expected.grad = of.grad.to(dtype)  # type: ignore[union-attr]
        cases.move(step, ADAMW, [of])
        cases.move(truth, ADAMW, [expected])
        cases.assert_same([of], [expected])
    assert of.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_stepper_lets_go_of_replaced_rows() -> None:
    weights = [torch.zeros(10), torch.zeros(20)]
    step, momentum = cpu.DeviceStepper(), cases.HYPERS["sgd-momentum"]
    seen = []
    for index in range(3):
        rows = []
        for weight in weights:
            state = torch.zeros_like(weight)
            seen.append(weakref.ref(state))
            grad, moves = torch.ones_like(weight), torch.zeros(())
            rows.append(Row(weight, grad, "own", None, "fp32", (state,), (None,), moves, 0))
        if index == 0:
            cases.move(step, momentum, rows)
        cases.move(step, momentum, rows[:1])
        del rows, state
    assert [ref() is None for ref in seen] == [True, True, True, True, False, True]


def test_flushed_subnormals_do_not_reach_what_is_stored_in_integers() -> None:
    of = cases.row(cases.HYPERS["sgd"], SPLIT, 1000, 0)
    tiny = torch.full((1000,), 0x0001, dtype=torch.int16).view(torch.bfloat16)
    of.weight.copy_(tiny)
    assert of.master is not None
    of.master.zero_()
    of.grad = torch.zeros(1000, dtype=torch.bfloat16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush subnormals")
    try:
        torch.set_num_threads(1)
        cases.move(cpu.DeviceStepper(), cases.HYPERS["sgd"], [of])
    finally:
        torch.set_flush_denormal(False)
    assert not of.weight.isnan().any()
    assert torch.equal(of.master, torch.zeros_like(of.master))
