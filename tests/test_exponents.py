"""Exponent histograms: every pattern of the 16-bit formats, the compiled counts against the plain ones, any tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.core.ranges import BINS, INFINITE, NAN, ZERO, Histogram
from mezzo.pytorch.kernels import exponents as kernel
from mezzo.pytorch.kernels.exponents import LARGEST, WORDS, count, cpu, exponents, reference

CHILDREN = Path(__file__).parent / "children"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def awkward(dtype: torch.dtype, size: int) -> Tensor:
    """Numbers over the whole range of a format, and all that is not a number."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.exp2(torch.empty(size).uniform_(-150, 130, generator=generator))
    x = torch.where(torch.rand(size, generator=generator) < 0.5, -wide, wide)
    special = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1e-39, 65504.0, 3.4e38)
    for place, value in enumerate(special):
        x[(place * 7) % size] = value
    return x.to(dtype)


def counted(x: Tensor) -> Tensor:
    row = torch.zeros(WORDS, dtype=torch.int64)
    count(x, row)
    return row


def brute_force(x: Tensor) -> list[int]:
    """One element at a time, by Python's own numbers."""
    row = [0] * WORDS
    largest = 0.0
    for value in x.double().to(torch.float32).flatten().tolist():
        size = abs(value)
        if math.isnan(value):
            row[NAN] += 1
        elif math.isinf(value):
            row[INFINITE] += 1
        elif size == 0:
            row[ZERO] += 1
        else:
            row[max(0, math.frexp(size)[1] - 1 + 127)] += 1
            largest = max(largest, size)
    row[LARGEST] = int(torch.tensor(largest).view(torch.int32))
    return row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = brute_force(every)
    assert sum(expected[:BINS]) == 1 << 16
    for implementation in (reference, cpu):
        row = torch.zeros(WORDS, dtype=torch.int64)
        implementation.count(every, row)
        assert row.tolist() == expected, implementation.__name__


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_pattern_of_8_bits(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    assert counted(every).tolist() == brute_force(every.float())


def test_fp32_at_both_ends_of_every_exponent() -> None:
    fields = torch.arange(256, dtype=torch.int32)
    patterns = torch.cat([fields << 23, (fields << 23) | 1, (fields << 23) | 0x7FFFFF])
    both = torch.cat([patterns, patterns | torch.iinfo(torch.int32).min]).view(torch.float32)
    row = counted(both)
    assert row.tolist() == brute_force(both)
    assert row[0] == 4
    assert row[1:255].eq(6).all()
    assert (row[INFINITE], row[ZERO], row[NAN]) == (2, 2, 4)
    largest = row[LARGEST : LARGEST + 1].to(torch.int32).view(torch.float32).item()
    assert largest == torch.finfo(torch.float32).max


def test_fp64_is_rounded_to_fp32_first() -> None:
    x = torch.tensor([1e300, 1e-300, 2.0 - 1e-12, 3.0, 2.0**60, 2.0**-60], dtype=torch.float64)
    row = counted(x)
    assert (row[INFINITE], row[ZERO], row[127 + 1]) == (1, 1, 2)  # 2 - 1e-12 is 2 in FP32
    assert (row[127 + 60], row[127 - 60]) == (1, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 1023, 1025, cpu.ALONE + 9, 3 * (1 << 16) + 5])
def test_compiled_equals_plain(dtype: torch.dtype, size: int, threads: int) -> None:
    before = torch.get_num_threads()
    x = awkward(dtype, size)
    ours, expected = torch.full((WORDS,), 3), torch.full((WORDS,), 3)
    torch.set_num_threads(threads)
    try:
        for _ in range(2):  # counts add up, the largest does not
            cpu.count(x, ours)
            reference.count(x, expected)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ours, expected)
    assert ours[:BINS].sum() == 2 * size + 3 * BINS


BASE = awkward(torch.float32, 4 * 6 * 10)
# Name -> a tensor of other strides.
VIEWS = {
    "transposed": BASE.view(24, 10).t(),
    "sliced": BASE.view(24, 10)[:, 1:7],
    "every other": BASE[::2],
    "expanded": BASE[:5, None].expand(5, 4),
    "channels last": BASE.view(2, 3, 8, 5).contiguous(memory_format=torch.channels_last),
    "0-dim": BASE[7],
    "empty": BASE[:0],
    "empty with strides": BASE.view(24, 10)[:, 3:3],
    "needs gradient": BASE.clone().requires_grad_(),
    "conjugate of nothing": BASE.neg().abs().neg(),
}


@pytest.mark.parametrize("name", list(VIEWS))
def test_any_strides(name: str) -> None:
    x = VIEWS[name]
    assert counted(x).tolist() == brute_force(x.detach())
    assert exponents(x).tolist() == brute_force(x.detach())[:BINS]


def test_dense_strides_are_read_in_place() -> None:
    """A channels-last activation of a gigabyte must not be copied to be counted."""
    x = VIEWS["channels last"]
    assert kernel._dense(x).data_ptr() == x.data_ptr()
    assert kernel._dense(VIEWS["transposed"]).data_ptr() == BASE.data_ptr()


def test_out_is_counted_into_and_given_back() -> None:
    out = torch.zeros(BINS, dtype=torch.int64)
    assert exponents(torch.ones(3), out) is out
    assert exponents(torch.full((2,), 1.5), out) is out
    assert out[127] == 5
    assert out.sum() == 5


def test_a_histogram_is_made_of_it() -> None:
    row = counted(torch.tensor([0.0, 3.0, -2.0, 0.25]))
    largest = float(row[LARGEST:].to(torch.int32).view(torch.float32))
    assert Histogram.from_bins(row[:BINS].tolist(), largest) == Histogram(
        -2, [1, 0, 0, 2], zeros=1, largest=3.0
    )


REFUSED = {
    "integers": (torch.ones(3, dtype=torch.int64), None, "torch.int64"),
    "complex": (torch.ones(3, dtype=torch.complex64), None, "view_as_real"),
    "sparse": (torch.eye(3).to_sparse(), None, "values of a sparse"),
    "short out": (torch.ones(3), torch.zeros(BINS - 1, dtype=torch.int64), "out is torch.int64"),
    "fp32 out": (torch.ones(3), torch.zeros(BINS), "out is torch.float32"),
    "out elsewhere": (torch.ones(3), torch.zeros(BINS, dtype=torch.int64, device="meta"), "on meta"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused(name: str) -> None:
    x, out, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        exponents(x, out)


def test_the_reference_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_KERNELS", "reference")
    monkeypatch.setattr(cpu, "count", None)
    assert exponents(torch.ones(2))[127] == 2
