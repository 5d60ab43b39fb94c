"""Parts of the Triton kernels in Triton's interpreter; `test_triton_kernels.py` runs them in a process of their own.

Triton decides at its import whether it interprets, for the whole process: `TRITON_INTERPRET=1` comes from outside.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step.triton import DeviceStepper

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
