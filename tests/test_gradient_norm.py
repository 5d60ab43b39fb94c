"""The sum of squares of gradients: the norm that clipping needs, and any overflow, in one number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.gradient_norm import reference, sum_of_squares


@pytest.fixture(autouse=True, params=["reference", "numba"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numba" and not backend.is_installed("numba"):
        pytest.skip("numba is not installed")
    monkeypatch.setenv(backend.KERNELS, request.param)


def values(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.logspace(-20, 15, count)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@DTYPES
@pytest.mark.parametrize("count", [1, 63, 1000, (1 << 14) + 7, 100_001])
def test_it_is_the_exact_sum_to_fp64s_last_places(dtype: torch.dtype, count: int) -> None:
    grads = [values(count).clamp(-6e4, 6e4).to(dtype), values(17, 1).clamp(-6e4, 6e4).to(dtype)]
    exact = math.fsum(x * x for grad in grads for x in grad.double().tolist())
    got = sum_of_squares(grads)
    assert got.dtype is torch.float64
    assert got.shape == ()
    assert float(got) == pytest.approx(exact, rel=1e-13)


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5000, 29_999])
def test_it_is_finite_if_and_only_if_every_element_is(dtype: torch.dtype, bad: float, at: int) -> None:
    grad = torch.full((30_000,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(float(sum_of_squares([grad, grad])))
    grad[at] = bad
    assert not math.isfinite(float(sum_of_squares([torch.ones(3, dtype=dtype), grad])))


@DTYPES
def test_subnormals_count(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal / 4
    got = float(sum_of_squares([torch.full((8,), smallest, dtype=dtype)]))
    assert got == 8 * smallest**2


def test_strides_make_no_difference_to_the_sum() -> None:
    grad = values(2 * 3 * 40 * 50).view(2, 3, 40, 50)
    want = float(sum_of_squares([grad]))
    same = [
        grad.to(memory_format=torch.channels_last),
        grad.permute(3, 1, 0, 2),
        grad.repeat_interleave(2, dim=3)[..., ::2],
    ]
    for other in same:
        assert float(sum_of_squares([other])) == pytest.approx(want, rel=1e-13)
    assert float(sum_of_squares([torch.full((1,), 3.0).expand(4, 5)])) == 180
    assert float(sum_of_squares([values(12)[3:7]])) == pytest.approx(
        float(values(12)[3:7].double().square().sum())
    )


def test_mixed_formats_and_empty_gradients() -> None:
    grads = [
        torch.full((3,), 2.0),
        torch.empty(0),
        torch.full((2, 2), 3.0).bfloat16(),
        torch.tensor(5.0).half(),
    ]
    assert float(sum_of_squares(grads)) == 12 + 36 + 25
    assert float(sum_of_squares([])) == 0
    assert float(sum_of_squares([torch.empty(0)])) == 0


def test_the_number_of_threads_does_not_move_a_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(count, generator=generator) for count in (1 << 18, 3, 70_000)]
    threads = torch.get_num_threads()
    try:
        sums = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums.add(float(sum_of_squares(grads)))
    finally:
        torch.set_num_threads(threads)
    assert len(sums) == 1


def test_gradients_of_several_devices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"gradients on cpu, meta\. Give those of one device at a time"):
        sum_of_squares([torch.ones(1), torch.ones(1, device="meta")])


def test_no_gradient_is_made_of_it() -> None:
    grad = torch.ones(3, requires_grad=True)
    assert not reference.sum_of_squares([grad]).requires_grad
    assert not sum_of_squares([grad]).requires_grad
