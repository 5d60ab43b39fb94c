"""The Triton kernels without a GPU: equal to the reference in Triton's interpreter, compiled for a Hopper to be read.

Both in child processes: Triton decides at its import whether it interprets, and this process's `torch.compile` needs
a Triton that does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import Groups
from mezzo.pytorch.kernels.optimizer_step.pointer_table import CURRENT_WORDS, PointerTable, kind
from mezzo.pytorch.optim.optimizers import adam_hyper

CHILDREN = Path(__file__).parent / "children"
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ADAMW = cases.HYPERS["adamw"]


def child(*words: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(CHILDREN.parent), **variables}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.heavy
@NEEDS_TRITON
@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("children/interpreted_kernels.py", ""),
        ("test_step_kernels.py", "every_mode or edge"),
        ("test_cross_entropy.py", "every_option or special or scale or ignored"),
    ],
)
def test_the_interpreted_kernels_pass_their_tests(file: str, which: str) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHILDREN.parent / file), "-k", which)
    output = child(*command, TRITON_INTERPRET="1")
    assert " passed" in output
    assert "skipped" not in output


# What each kind of row compiles to on a Hopper: rule, masters, state, gradient.
COMPILED = [
    ("adamw", [("own", "fp32", "float32"), ("split", "fp32", "bfloat16")]),
    ("adamw", [("fp16", "fp32", "float16")]),
    ("adamw", [("split8", "int8", "bfloat16")]),
    ("adamw", [("none", "bf16", "bfloat16")]),
    ("adam-l2-up", [("own", "fp32", "float32")]),
    ("sgd-nesterov-up", [("split", "fp32", "bfloat16")]),
    ("lion", [("split8", "int8", "bfloat16")]),
]


# Fused multiply-adds of an element, where a rule names them.
FUSED = {"adamw": 0, "adam-l2-up": 1, "sgd-nesterov-up": 4, "lion": 0}


@pytest.mark.heavy
@NEEDS_TRITON
def test_the_compiled_step_contracts_nothing_loads_vectors_and_fits_four_programs(tmp_path: Path) -> None:
    script = str(CHILDREN / "compiled_kernels.py")
    output = child(script, json.dumps(COMPILED), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found = [json.loads(line) for line in output.splitlines()]
    assert len(found) == len(COMPILED)
    for (rule, rows), made in zip(COMPILED, found):
        where = f"{rule} {rows}: {made}"
        # IEEE arithmetic: nothing approximate, no flush of subnormals.
        assert made["inexact"] == [], where
        # No multiply-add is fused but the rule's own: of 4 elements of a thread in a whole block, 1 in a short one.
        assert made["fma"] == 5 * FUSED[rule], where
        # The machine's own division and root consist of them.
        if rule.startswith("adam"):
            assert made["machine_fma"] > made["fma"], where
        else:
            assert made["machine_fma"] == made["fma"], where
        # 64 registers let four programs of 256 threads into an SM. Ten words spill if states have 8 bits.
        assert made["registers"] <= 64, where
        assert made["spilled_bytes"] <= (40 if any(row[1] == "int8" for row in rows) else 0), where
        # A whole block is loaded and stored by vectors of 4 elements, whatever their format.
        for loads, stores, element in made["vectors"]:
            assert loads >= 1, (element, where)
            assert stores >= 1, (element, where)


# The tables, on the host's side.


def table_of(rows: list[cases.Row]) -> tuple[PointerTable, Groups]:
    groups = [(ADAMW, rows[:2]), (cases.HYPERS["adam-l2-up"], rows[2:])]
    return PointerTable(groups), groups


def some_rows() -> list[cases.Row]:
    modes = [
        ("own", "fp32", torch.float32),
        ("split", "int8", torch.bfloat16),
        ("fp16", "bf16", torch.float16),
    ]
    return [cases.row(ADAMW, mode, count, i) for i, (mode, count) in enumerate(zip(modes, (5, 3000, 0)))]


def test_a_table_has_a_line_a_parameter_and_a_word_a_program() -> None:
    rows = some_rows()
    table, groups = table_of(rows)
    lines = table.rows.view(3, -1)
    assert lines[:, 6].tolist() == [5, 3000, 0]
    assert lines[:, 7].tolist() == [0, 1, 2]
    assert lines[:, 9].tolist() == [0, 0, 1]
    assert [table.kinds[i] for i in lines[:, 8].tolist()] == [0, 3 + 8 * 2 + 32, 2 + 8 + 64 + 128 * (8 + 16)]
    assert table.blocks == 1
    assert table.chunks.tolist() == [0, 1 << 32, (1 << 32) + 1, (1 << 32) + 2, 2 << 32]
    assert table.hypers.view(2, -1).tolist() == [[hyper.l2, *hyper.numbers] for hyper, _ in groups]


def test_a_table_follows_gradients_weights_and_settings() -> None:
    rows = some_rows()
    table, groups = table_of(rows)
    before = table.current.clone()
    table.refresh(groups)
    assert torch.equal(table.current, before)
    rows[1].grad = torch.zeros(3008, dtype=torch.bfloat16)[1:3001]
    hyper = adam_hyper(3.0, 0.9, 0.999, 1e-8, 0.5, decoupled=True)
    table.refresh([(hyper, rows[:2]), groups[1]])
    current = table.current[: 3 * CURRENT_WORDS].view(3, CURRENT_WORDS)
    assert current[1].tolist() == [rows[1].weight.data_ptr(), rows[1].grad.data_ptr(), 0]
    assert current[0, 2] == 1
    assert float(table.hypers[5]) == 3.0


def test_every_mode_has_a_kind_of_its_own() -> None:
    rows = cases.rows(ADAMW, special=False)
    kinds = {kind(row, hyper) for row in rows for hyper in cases.HYPERS.values()}
    assert len(kinds) == (len(cases.HYPERS) - 1) * len(cases.MODES)  # Adam without decay is AdamW
