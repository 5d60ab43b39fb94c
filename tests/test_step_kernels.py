"""The compiled optimizer steps equal the reference to the bit: by Numba on a CPU, by Triton interpreted and on a GPU.

`test_kernel_backend.py` runs this file once more in the interpreter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import stepper_cases as cases
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.kernels.optimizer_step import Row, Stepper, reference, stepper
from mezzo.pytorch.monitor.counted import WORDS, count

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # PyTorch's own and Triton's, at their imports and first compilations.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
)
CUDA = pytest.param("cuda", marks=GPU)
ON_GPU = pytest.mark.parametrize("device", [CUDA])
EACH = pytest.mark.parametrize("device", ["cpu"] if IS_INTERPRETED else ["cpu", CUDA])

if IS_INTERPRETED:
    np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of what the tests are about
else:
    pytest.importorskip("numba", reason="the CPU kernels are compiled by Numba")

ADAMW = cases.HYPERS["adamw"]
BF16, FP16 = torch.bfloat16, torch.float16
SPLIT = ("split", "fp32", BF16)


@pytest.fixture(autouse=True)
def implementation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:
        monkeypatch.setenv("MEZZO_KERNELS", "triton")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def compare(hyper: cases.Hyper, got: list[Row], steps: int = 3, step: Stepper | None = None) -> None:
    """The rows after some steps, with and without a multiplier, beside copies that the reference has moved."""
    expected = cases.copied(got)
    device = got[0].weight.device
    step = step or stepper(device.type)
    overflow, overflowed = torch.zeros((), device=device), torch.zeros(())
    for index in range(steps):
        given = {"found_inf": torch.zeros(())} | ({"multiplier": torch.tensor(0.37)} if index else {})
        there = {name: value.to(device) for name, value in given.items()}
        cases.move(step, hyper, got, overflow=overflow, **there)
        cases.reference_move(hyper, expected, overflow=overflowed, **given)
        cases.assert_same(got, expected)
        assert overflow.item() == overflowed.item()
        cases.new_gradients(index, got, expected)


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu" if IS_INTERPRETED else CUDA])
@pytest.mark.parametrize("number", range(len(cases.HYPERS)))
def test_a_step_equals_the_reference_in_every_mode(number: int, device: str) -> None:
    """Many modes in one call: for AdamW a fourth of all, for the others a ninth."""
    name = sorted(cases.HYPERS)[number]
    modes = cases.MODES[::4] if name == "adamw" else cases.MODES[number % 9 :: 9]
    compare(cases.HYPERS[name], cases.rows(cases.HYPERS[name], modes, device=device), 2)


SAMPLE = [("adamw", SPLIT), ("adamw", ("split8", "int8", BF16)), ("sgd-momentum", ("fp16", "bf16", FP16))]
RULES = ("adamw", "adam-l2-up", "sgd", "sgd-momentum", "sgd-nesterov-up", "adam")
# Weights and states share loops, so every two of them are together; each rule and each gradient's format is there too.
# Each is compiled, which takes seconds, so what SAMPLE has is not here again.
CHOICES = [
    (RULES[(i + 2 * j) % 6], (weights, state, cases.GRADS[(i + j) % 3]))
    for i, weights in enumerate(cases.WEIGHTS)
    for j, state in enumerate(cases.STATES)
    if (weights, state) not in [mode[:2] for _, mode in SAMPLE]
]


@pytest.mark.parametrize(
    ("rule", "mode", "threads"),
    [
        *((rule, mode, threads) for (rule, mode), threads in product(SAMPLE, (1, 2))),
        *(pytest.param(rule, mode, 3, marks=pytest.mark.heavy) for rule, mode in CHOICES),
    ],
)
def test_long_rows_of_one_mode_on_any_number_of_threads(rule: str, mode: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    sizes = (1, 63, 64, 65, 1000, *((65_537, 70_001) if threads < 3 else (33_000,)))
    hyper = cases.HYPERS[rule]
    compare(hyper, [cases.row(hyper, mode, size, ordinal) for ordinal, size in enumerate(sizes)])


@pytest.mark.heavy
@ON_GPU
@pytest.mark.parametrize("mode", cases.MODES[::4], ids=str)
def test_long_rows_on_a_gpu(mode: tuple[str, str, torch.dtype], device: str) -> None:
    """One kind has code of its own; three million elements are many programs of several blocks, with one step."""
    compare(ADAMW, [cases.row(ADAMW, mode, 3_000_017, 0, device=device)], 2)


@EACH
def test_edge_several_groups_and_rows_with_fewer_moves(device: str) -> None:
    own = ("own", "fp32", torch.float32)
    sizes = ((SPLIT, 300), (own, 3000), (SPLIT, 129), (own, 0), (own, 77))
    got = [cases.row(ADAMW, mode, count, i, device=device) for i, (mode, count) in enumerate(sizes)]
    expected = cases.copied(got)
    late = got[4].grad
    other = cases.HYPERS["adam-l2-up"]
    step, truth = stepper(device), reference.DeviceStepper()
    for index in range(4):
        got[4].grad = late if index > 1 else None
        expected[4].grad = late.cpu() if index > 1 else None
        for moved, rows in ((step, got), (truth, expected)):
            moved([(ADAMW, rows[:2]), (other, rows[2:])], multiplier=None, found_inf=None, overflow=None)
        cases.assert_same(got, expected)
        cases.new_gradients(index, got[:4], expected[:4])
    assert [int(each.step) for each in got] == [4, 4, 4, 4, 2]
    step([(ADAMW, [])], multiplier=None, found_inf=None, overflow=None)  # nothing to move


@EACH
@pytest.mark.parametrize("found", [1.0, -1.0, math.nan, math.inf])
def test_edge_a_skipped_step_changes_nothing(found: float, device: str) -> None:
    rows = cases.rows(ADAMW, cases.MODES[:: 13 if IS_INTERPRETED else 27], device=device)
    before = cases.copied(rows)
    for step, of in ((stepper(device), rows), (reference.DeviceStepper(), cases.copied(before))):
        where = of[0].weight.device
        overflow = torch.zeros((), device=where)
        cases.move(step, ADAMW, of, found_inf=torch.tensor(found, device=where), overflow=overflow)
        cases.assert_same(of, before)
        assert overflow == 0
        cases.move(step, ADAMW, of, found_inf=torch.zeros((), device=where))
        assert [int(each.step) for each in of] == [1] * len(of)


@EACH
@pytest.mark.parametrize("masters", list(cases.WEIGHTS))
def test_edge_overflow_of_16_bit_weights_is_reported_and_stays_so(masters: str, device: str) -> None:
    sgd, overflow = cases.HYPERS["sgd"], torch.zeros((), device=device)
    # Nowhere, in a whole block, in the last one, and nowhere again.
    for at in (None, 0, 1500, None):
        ours = cases.row(sgd, (masters, "fp32", torch.float32), 1501, 0, special=False, device=device)
        ours.weight[:], ours.grad = 1, torch.zeros(1501, device=device)
        if ours.master is not None:
            ours.master[:] = int(masters in ("fp32", "fp16"))
        if at is not None:
            ours.grad[at] = -math.inf
        before = float(overflow)
        cases.move(stepper(device), sgd, [ours], overflow=overflow)
        assert at is None or bool(ours.weight[at].isinf())
        assert float(overflow) == max(before, float(at is not None and masters != "own"))


@EACH
def test_edge_tensors_that_move_and_change_format_between_steps_however_many(device: str) -> None:
    """And elements are taken in memory order."""

    def channels_last(tensor: Tensor) -> Tensor:
        return tensor.view(4, 5, 6, 3).to(memory_format=torch.channels_last)

    of = cases.row(ADAMW, SPLIT, 360, 70_000, device=device)
    for name in ("weight", "master", "grad"):
        setattr(of, name, channels_last(getattr(of, name)))
    of.states = tuple(map(channels_last, of.states))
    (expected,) = cases.copied([of])
    step = stepper(device)
    bf16, fp32 = torch.bfloat16, torch.float32
    for at, dtype, lr in ((0, bf16, 1e-3), (9, bf16, 2e-3), (123_456, fp32, 2e-3), (2**24 - 2, bf16, 2e-3)):
        of.step.fill_(at)
        expected.step.fill_(at)
        hyper = cases.adam_hyper(lr, 0.9, 0.999, 1e-8, 1e-2, decoupled=True)
        of.weight.data = of.weight.data.clone()
        of.grad = of.grad.to(dtype)  # type: ignore[union-attr]
        expected.grad = of.grad.cpu()
        cases.move(step, hyper, [of])
        cases.reference_move(hyper, [expected])
        cases.assert_same([of], [expected])
    assert of.weight.is_contiguous(memory_format=torch.channels_last)


@EACH
@pytest.mark.parametrize("mode", [("split8", "int8", BF16), ("none", "bf16", BF16)])
def test_edge_a_shard_moves_as_in_the_whole_parameter(mode: Any, device: str) -> None:
    whole = cases.row(ADAMW, mode, 1100, 3, special=False, device=device)
    shards = []
    for start, stop in ((0, 448), (448, 448), (448, 1100)):
        part, of = slice(start, stop), cases.copied([whole])[0]
        of.weight, of.grad, of.offset = of.weight[part], of.grad[part], start
        of.master = None if of.master is None else of.master[part]
        of.states = tuple(state[part] for state in of.states)
        of.scales = tuple(None if s is None else s[start // 64 : -(-stop // 64)] for s in of.scales)
        shards.append(of)
    step, other = stepper(device), stepper(device)
    for _ in range(3):
        cases.move(step, ADAMW, [whole])
        cases.move(other, ADAMW, shards)
    for shard in shards:
        part = slice(shard.offset, shard.offset + shard.weight.numel())
        assert torch.equal(shard.weight, whole.weight[part])
        assert all(torch.equal(one, all_of[part]) for one, all_of in zip(shard.states, whole.states))
        assert shard.step == 3


OF_TRITON = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")


@OF_TRITON
def test_edge_programs_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.kernels.optimizer_step.triton._blocks_a_program", lambda *_: 2)
    step: Any = stepper("cpu")
    modes = (SPLIT, ("split8", "int8", torch.float32))
    compare(ADAMW, [cases.row(ADAMW, mode, 5_000, i) for i, mode in enumerate(modes)], 2, step)
    assert [table.programs for table in step._tables.values()] == [6]


@OF_TRITON
def test_edge_tables_of_replaced_rows_are_let_go_and_so_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.kernels.optimizer_step.triton._TABLES", 4)
    step: Any = stepper("cpu")
    ours = [cases.row(ADAMW, SPLIT, 10, i) for i in range(2)]
    for of in (ours, ours[:1], ours[1:]):
        cases.move(step, ADAMW, of)
    assert len(step._tables) == 3
    replaced = cases.copied(ours[:1])
    for of in (replaced, ours[1:]):
        cases.move(step, ADAMW, of)
    assert [key[1] for key in step._tables] == [(id(replaced[0]),), (id(ours[1]),)]
    for of in ([cases.row(ADAMW, SPLIT, 10, 2 + i)] for i in range(3)):
        cases.move(step, ADAMW, of)
    assert len(step._tables) == 1


@ON_GPU
def test_the_host_never_waits_for_a_norm_and_a_step(device: str) -> None:
    hyper = cases.HYPERS["sgd-momentum"]
    ours = [cases.row(hyper, SPLIT, 5000, i, special=False, device=device) for i in range(3)]
    scalars = {name: torch.ones((), device=device) for name in ("multiplier", "overflow")}
    scalars["found_inf"] = torch.zeros((), device=device)
    grads = [torch.ones(5000, dtype=torch.bfloat16, device=device) for _ in ours]
    row = torch.zeros(WORDS, dtype=torch.int64, device=device)
    step = stepper(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for each, grad in zip(ours, grads):
                each.grad = grad.clone()
                count(grad, row)
            total = sum_of_squares([each.grad for each in ours if each.grad is not None])
            cases.move(step, hyper, ours, **scalars)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (total.item(), int(row[127])) == (15_000, 9 * 5000)
    assert [int(each.step) for each in ours] == [3, 3, 3]


@ON_GPU
def test_a_step_in_a_cuda_graph_repeats_and_does_not_disturb_others(device: str) -> None:
    ours = cases.rows(ADAMW, device=device)
    expected = cases.copied(ours)
    step = stepper(device)
    cases.move(step, ADAMW, ours)  # compiles
    cases.reference_move(ADAMW, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.move(step, ADAMW, ours)
    cases.assert_same(ours, expected)  # capturing runs nothing
    for replays in (True, True, False, True):
        if replays:
            graph.replay()
        else:
            cases.move(step, ADAMW, ours)
        cases.reference_move(ADAMW, expected)
    torch.cuda.synchronize()
    cases.assert_same(ours, expected)
