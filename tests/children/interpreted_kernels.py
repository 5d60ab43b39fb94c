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
from torch import Tensor

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import formulas
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


def test_step_edge_tables_of_the_rows_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.pytorch.kernels.optimizer_step.triton._CACHE_BYTES", 600)
    stepper = DeviceStepper()
    ours = [cases.row(ADAMW, SPLIT, 10, i) for i in range(8)]
    for each in ours:
        cases.move(stepper, ADAMW, [each])
    assert 1 < len(stepper._tables) < 5
    assert [key[1] for key in stepper._tables][-1] == (id(ours[-1]),)


def test_step_edge_tables_of_replaced_rows_are_let_go() -> None:
    stepper = DeviceStepper()
    ours = [cases.row(ADAMW, SPLIT, 10, i) for i in range(2)]
    for of in (ours, ours[:1], ours[1:]):
        cases.move(stepper, ADAMW, of)
    replaced = cases.copied(ours[:1])
    cases.move(stepper, ADAMW, replaced)
    assert [key[1] for key in stepper._tables] == [(id(ours[1]),), (id(replaced[0]),)]


# The formulas on blocks: those of the reference, which have other words.


@triton.jit
def _apply(
    inputs: tl.tensor, noise_in: tl.tensor, first: tl.tensor, second: tl.tensor, NAME: tl.constexpr
) -> None:
    index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    pattern = tl.load(inputs + index)
    x = pattern.to(tl.float32, bitcast=True)
    r = tl.load(noise_in + index)
    high, low = pattern >> 16, (pattern << 16) >> 16
    if NAME == "bf16":
        weight, _ = f.encode_bf16(x, r)
        value = f.decode_bf16(high, x)
    elif NAME == "fp16":
        weight, _ = f.encode_fp16(x, r)
        value = f.decode_fp16(high, x)
    elif NAME == "split":
        weight, _ = f.encode_split(x, r)
        value = f.decode_split(high, low)
    elif NAME == "split8":
        weight, _ = f.encode_split8(x, r & 0xFF)
        value = f.decode_split8(high, low >> 8)
    elif NAME == "none":
        weight, _ = f.encode_none(x, r & 0xFFFF)
        value = f.decode_none(high, 0)
    elif NAME == "signed":
        weight = f.encode_signed(f.cut(x, f.magnitude(x)), f.group_inverse(f.magnitude(x)), r)
        value = f.decode_signed(low >> 8, x)
    elif NAME == "unsigned":
        x = tl.abs(x)
        weight = f.encode_unsigned(f.cut(x, f.magnitude(x)), f.group_inverse(f.magnitude(x)), r)
        value = f.decode_unsigned((low >> 8) & 0xFF, x)
    else:
        word = f.noise(f.noise_key(r, r, 1), f.place(index))
        weight = f.first_noise(word) ^ (f.second_noise(word) * 3)
        value = (f.remainder_noise(word) * 5 + f.weight_noise(word)).to(tl.float32)
    tl.store(first + index, weight)
    tl.store(second + index, value.to(tl.int32, bitcast=True))


def expected(name: str, pattern: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """What `_apply` makes, in the words of tensors."""
    x = pattern.view(torch.float32)
    high, low = pattern >> 16, (pattern << 16) >> 16
    if name == "noise":
        index = torch.arange(len(pattern))
        word = formulas.noise(formulas.noise_key(r, r, 1), formulas.place(index))
        value = formulas.remainder_noise(word) * 5 + formulas.weight_noise(word)
        return formulas.first_noise(word) ^ (formulas.second_noise(word) * 3), value.float()
    if name in ("signed", "unsigned"):
        x = x if name == "signed" else x.abs()
        largest = formulas.magnitude(x)
        encode, decode = (getattr(formulas, f"{verb}_{name}") for verb in ("encode", "decode"))
        made = encode(formulas.cut(x, largest), formulas.group_inverse(largest), r)
        return made, decode(low >> 8 if name == "signed" else (low >> 8) & 0xFF, x)
    noise = r & {"split8": 0xFF, "none": 0xFFFF}.get(name, 0)
    kept = {"bf16": x, "fp16": x, "split": low, "split8": low >> 8}.get(name)
    made, _ = getattr(formulas, f"encode_{name}")(x, noise)
    return made, getattr(formulas, f"decode_{name}")(high, kept)


@pytest.mark.parametrize("name", ["bf16", "fp16", "split", "split8", "none", "signed", "unsigned", "noise"])
def test_codec_equals_the_reference(name: str) -> None:
    x = patterns()
    r = torch.randint(0, 1 << 20, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    first, second = torch.empty_like(x), torch.empty_like(x)
    _apply[(len(x) // 1024,)](x, r, first, second, name)
    made, value = expected(name, x, r)
    same = (second == value.view(torch.int32)) | (value.isnan() & second.view(torch.float32).isnan())
    of_nan = x.view(torch.float32).isnan() if name == "fp16" else torch.zeros_like(x, dtype=torch.bool)
    assert torch.equal(first[~of_nan], made[~of_nan])  # of a NaN in fp16 no one promises the payload
    assert same.all()


def patterns(count: int = 1 << 17) -> Tensor:
    """FP32 patterns, the edges of every exponent among them."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, dtype=torch.int64)
    edges = [(sign << 31) + (e << 23) + m for sign in (0, 1) for e in range(256) for m in EDGES]
    made[: len(edges)] = torch.tensor(edges)
    return made.to(torch.int32)


EDGES = (0, 1, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x3FFFFF, 0x400000, 0x7F7FFF, 0x7F8000, 0x7FFFFF)


@triton.jit
def _fmas(a: tl.tensor, b: tl.tensor, c: tl.tensor, results: tl.tensor, count: tl.tensor) -> None:
    at = tl.arange(0, 65_536)
    here = at < count
    made = f.fma(tl.load(a + at, here), tl.load(b + at, here), tl.load(c + at, here))
    tl.store(results + at, made, here)


@pytest.mark.parametrize("case", FMA_CASES)
def test_codec_fma_rounds_once(case: str) -> None:
    rows = FMA_CASES[case]()
    result = torch.empty(len(rows))
    _fmas[(1,)](*(column.contiguous() for column in rows.unbind(1)), result, len(rows))
    assert_exact(rows, result)


@triton.jit
def _powers(bases: tl.tensor, exponents: tl.tensor, results: tl.tensor) -> None:
    at = tl.program_id(0)
    tl.store(results + at, power(tl.load(bases + at), tl.load(exponents + at)))


def test_codec_power_gives_the_bias_corrections_of_the_reference() -> None:
    steps = [1, 2, 3, 7, 10, 99, 1000, 4097, 65_535, 1_000_000, 1 << 24]
    bases = [0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999]
    pairs = [(base, step) for base in bases for step in steps]
    result = torch.empty(len(pairs), dtype=torch.float64)
    base = torch.tensor([base for base, _ in pairs], dtype=torch.float64)
    _powers[(len(pairs),)](base, torch.tensor([step for _, step in pairs], dtype=torch.int32), result)
    expected = torch.tensor([base**step for base, step in pairs], dtype=torch.float64)
    assert torch.equal((1 - result).float(), (1 - expected).float())
    assert ((result - expected).abs() <= 2.0**-53 * expected * base.new_tensor([t for _, t in pairs])).all()
