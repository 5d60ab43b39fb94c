"""Whole tensors read once: exponent histograms, and the sum of squares of gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from alive import bytes_alive
from mezzo.core.errors import UsageError
from mezzo.core.ranges import INFINITE, NAN, ZERO
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.gradient_norm import sum_of_squares
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.monitor import counted as exponents
from mezzo.pytorch.monitor.counted import LARGEST, WORDS, count
from mezzo.pytorch.monitor.ranges import RangeWatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH = pytest.mark.usefixtures("implementation")


@pytest.fixture(params=["reference", "numba"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numba" and not backend.is_installed("numba"):
        pytest.skip("numba is not installed")
    monkeypatch.setenv(backend.KERNELS, request.param)


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


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All of 8 and 16 bits; FP32's at both ends of every exponent; of FP64 what is rounded to FP32 first."""
    if dtype is torch.float64:
        return torch.tensor([1e300, 1e-300, 2.0 - 1e-12, 3.0, 2.0**60, 2.0**-60], dtype=dtype)
    bits = torch.finfo(dtype).bits
    if bits < 32:
        words = torch.arange(1 << bits, dtype=torch.int32)
        return words.to(torch.uint8 if bits == 8 else torch.int16).view(dtype)
    fields = torch.arange(256, dtype=torch.int32) << 23
    patterns = torch.cat([fields, fields | 1, fields | 0x7FFFFF])
    return torch.cat([patterns, patterns | torch.iinfo(torch.int32).min]).view(torch.float32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_exponents_of_every_pattern(dtype: torch.dtype) -> None:
    every = every_pattern(dtype)
    assert counted(every).tolist() == brute_force(every)


def test_counts_add_up_over_blocks_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exponents, "BLOCK", 100)
    x = awkward(torch.float32, 257)
    row = counted(x)
    assert row.tolist() == brute_force(x)
    count(x, row)
    assert torch.equal(row[:LARGEST], 2 * counted(x)[:LARGEST])
    assert row[LARGEST] == counted(x)[LARGEST]


BASE = awkward(torch.float32, 4 * 6 * 10)
# Name -> a tensor of other strides.
VIEWS = {
    "transposed": BASE.view(24, 10).t(),
    "sliced": BASE.view(24, 10)[:, 1:7],
    "expanded": BASE[:5, None].expand(5, 4),
    "channels last": BASE.view(2, 3, 8, 5).contiguous(memory_format=torch.channels_last),
    "0-dim": BASE[7],
    "empty": BASE[:0],
}


@EACH
@pytest.mark.parametrize("name", list(VIEWS))
def test_any_strides(name: str) -> None:
    x = VIEWS[name]
    assert counted(x).tolist() == brute_force(x)
    grad = x.nan_to_num().clamp(-1e9, 1e9)
    exact = math.fsum(value * value for value in grad.double().flatten().tolist())
    assert float(sum_of_squares([grad])) == pytest.approx(exact, rel=1e-13)


def test_dense_strides_are_counted_without_a_copy() -> None:
    """A channels-last activation of a gigabyte must not be copied to be counted."""
    peak = PeakTensorBytes()
    x = torch.rand(1, 8, 512, 512).to(memory_format=torch.channels_last)
    row, before = torch.zeros(WORDS, dtype=torch.int64), bytes_alive()
    peak.start()
    count(x, row)
    assert peak.stop().peak_bytes - before < x.nbytes


def values(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.logspace(-20, 15, count)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 63, (1 << 14) + 7, 100_001])
def test_it_is_the_exact_sum_to_fp64s_last_places(dtype: torch.dtype, count: int) -> None:
    grads = [values(count).clamp(-6e4, 6e4).to(dtype), values(17, 1).clamp(-6e4, 6e4).to(dtype)]
    exact = math.fsum(x * x for grad in grads for x in grad.double().tolist())
    got = sum_of_squares(grads)
    assert got.dtype is torch.float64
    assert got.shape == ()
    assert float(got) == pytest.approx(exact, rel=1e-13)
    smallest = torch.finfo(dtype).smallest_normal / 4
    assert float(sum_of_squares([torch.full((8,), smallest, dtype=dtype)])) == 8 * smallest**2


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 29_999])
def test_it_is_finite_if_and_only_if_every_element_is(dtype: torch.dtype, bad: float, at: int) -> None:
    grad = torch.full((30_000,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(float(sum_of_squares([grad, grad])))
    grad[at] = bad
    assert not math.isfinite(float(sum_of_squares([torch.ones(3, dtype=dtype), grad])))


@EACH
def test_mixed_formats_empty_gradients_and_none() -> None:
    grads = [
        torch.full((3,), 2.0, requires_grad=True),
        torch.empty(0),
        torch.full((2, 2), 3.0).bfloat16(),
        torch.tensor(5.0).half(),
    ]
    got = sum_of_squares(grads)
    assert float(got) == 12 + 36 + 25
    assert not got.requires_grad
    assert float(sum_of_squares([])) == 0
    assert float(sum_of_squares([torch.empty(0)])) == 0


def test_gradients_of_several_devices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"on cpu, meta\."):
        sum_of_squares([torch.ones(1), torch.ones(1, device="meta")])


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU, id=str(dtype)) for dtype in DTYPES])
def test_counts_on_a_gpu_equal_those_on_a_cpu(dtype: torch.dtype) -> None:
    x, row = awkward(dtype, 3 * (1 << 18) + 5), torch.zeros(WORDS, dtype=torch.int64, device="cuda")
    count(x.cuda()[1:], row)
    assert torch.equal(row.cpu(), counted(x[1:]))


@GPU[0]
@GPU[1]
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own and Triton's, at their imports
def test_a_watched_update_on_a_gpu_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = RangeWatch(model, optimizer, every=1)
    x = torch.randn(32, 64, device="cuda")
    scale, skipped = torch.tensor(8.0, device="cuda"), torch.tensor(False, device="cuda")
    for index in range(2):
        if index:  # the first one compiles
            torch.cuda.set_sync_debug_mode("error")
        try:
            watch.call_begins(model, (x,), {})
            out = model(x)
            watch.call_ended(model, out)
            loss = out.square().mean()
            watch.backward_begins(loss, scale)
            (loss * scale).backward()
            watch.update_begins(optimizer, scale)
            optimizer.step()
            watch.update_ended(optimizer, index=index, number=0, skipped=skipped, loss_scale=scale)
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    first, second = watch.drain()
    assert len(watch.rows) == 3 * 2 + 3 * 4
    assert first.rows != second.rows
