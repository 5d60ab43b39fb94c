"""Parts of the Triton kernels in Triton's interpreter; `test_triton_kernels.py` runs them in a process of their own.

Triton decides at its import whether it interprets, for the whole process: `TRITON_INTERPRET=1` comes from outside.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step.triton import DeviceStepper, f, power
from test_fma import CASES as FMA_CASES
from test_fma import assert_exact

assert os.environ.get("TRITON_INTERPRET") == "1"
np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of what the tests are about

ADAMW = cases.HYPERS["adamw"]
SPLIT = ("split", "fp32", torch.bfloat16)
ONE = torch.ones(())


# Programs and tables. `test_step_kernels.py` has whole steps.


def test_step_whose_programs_take_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.kernels.optimizer_step.pointer_table._blocks_a_program", lambda *_: 2)
    ours = [
        cases.row(ADAMW, mode, 5_000, i) for i, mode in enumerate((SPLIT, ("split8", "int8", torch.float32)))
    ]
    expected = cases.copied(ours)
    stepper = DeviceStepper()
    for step in (1, 2):
        cases.move(stepper, ADAMW, ours)
        cases.reference_move(ADAMW, expected)
        cases.assert_same(ours, expected)
        cases.new_gradients(step, ours, expected)
    assert [table.programs for table in stepper._tables.values()] == [6]


def test_tables_of_replaced_rows_are_let_go_and_so_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.kernels.optimizer_step.triton._TABLES", 3)
    stepper = DeviceStepper()
    ours = [cases.row(ADAMW, SPLIT, 10, i) for i in range(2)]
    for of in (ours, ours[:1], ours[1:]):
        cases.move(stepper, ADAMW, of)
    assert len(stepper._tables) == 3
    replaced = cases.copied(ours[:1])
    for of in (replaced, ours[1:]):
        cases.move(stepper, ADAMW, of)
    assert [key[1] for key in stepper._tables] == [(id(replaced[0]),), (id(ours[1]),)]
    for of in ([cases.row(ADAMW, SPLIT, 10, 2 + i)] for i in range(3)):
        cases.move(stepper, ADAMW, of)
    assert len(stepper._tables) == 2


# Two formulas that depend on the interpreter's or the device's own arithmetic.


@triton.jit
def _fmas(a: tl.tensor, b: tl.tensor, c: tl.tensor, results: tl.tensor, count: tl.tensor) -> None:
    at = tl.arange(0, 65_536)
    here = at < count
    made = f.fma(tl.load(a + at, here), tl.load(b + at, here), tl.load(c + at, here))
    tl.store(results + at, made, here)


@pytest.mark.parametrize("case", FMA_CASES)
def test_fma_rounds_once(case: str) -> None:
    rows = FMA_CASES[case]()
    result = torch.empty(len(rows))
    _fmas[(1,)](*(column.contiguous() for column in rows.unbind(1)), result, len(rows))
    assert_exact(rows, result)


@triton.jit
def _powers(bases: tl.tensor, exponents: tl.tensor, results: tl.tensor) -> None:
    at = tl.program_id(0)
    tl.store(results + at, power(tl.load(bases + at), tl.load(exponents + at)))


def test_power_gives_the_bias_corrections_of_the_reference() -> None:
    steps = [1, 2, 3, 7, 10, 99, 1000, 4097, 65_535, 1_000_000, 1 << 24]
    bases = [0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999]
    pairs = [(base, step) for base in bases for step in steps]
    result = torch.empty(len(pairs), dtype=torch.float64)
    base = torch.tensor([base for base, _ in pairs], dtype=torch.float64)
    _powers[(len(pairs),)](base, torch.tensor([step for _, step in pairs], dtype=torch.int32), result)
    expected = torch.tensor([base**step for base, step in pairs], dtype=torch.float64)
    assert torch.equal((1 - result).float(), (1 - expected).float())
    assert ((result - expected).abs() <= 2.0**-53 * expected * base.new_tensor([t for _, t in pairs])).all()
