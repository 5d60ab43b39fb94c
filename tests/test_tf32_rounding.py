"""TF32's rounding against `mezzo.formats`: to the bit, on every pattern where rounding turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.core import formats
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.tf32 import round_tf32


def patterns() -> Tensor:
    """FP32s of both signs: each exponent, with mantissas around a TF32, a tie, and both ends; and some at random."""
    exponents = np.arange(256)[:, None, None] << 23
    kept = np.array([0, 1, 2, 511, 512, 1022, 1023])[None, :, None] << 13
    ends = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])[None, None, :]
    edges = (exponents | kept | ends).ravel()
    chance = np.random.default_rng(3).integers(0, 1 << 31, 100_000)
    magnitudes = np.concatenate([edges, chance])
    both = np.concatenate([magnitudes, magnitudes | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(both.view(np.float32))


def same_patterns(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, and any NaN for NaN."""
    alike = (a.view(torch.int32) == b.view(torch.int32)) | a.isnan() & b.isnan()
    return a.dtype is b.dtype and a.shape == b.shape and bool(alike.all())


def test_it_is_the_format_to_the_bit() -> None:
    x = patterns()
    before = x.clone()
    assert same_patterns(round_tf32(x), formats.round(x, "tf32"))
    assert same_patterns(x, before)


SPECIAL = [
    (0.0, 0.0),
    (-0.0, -0.0),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    (2.0**-149, 0.0),
    (-(2.0**-149), -0.0),
    (2.0**-137, 0.0),  # a tie, to even
    (3 * 2.0**-137, 2.0**-135),
    (2.0**-136, 2.0**-136),
    (2.0**-126 - 2.0**-149, 2.0**-126),
    (1 + 2.0**-11, 1.0),
    (1 + 3 * 2.0**-11, 1 + 2.0**-9),
    (2.0**128 - 2.0**116 - 2.0**104, 2.0**128 - 2.0**117),
    (2.0**128 - 2.0**116, math.inf),
    (-(2.0**128) + 2.0**104, -math.inf),
]


@pytest.mark.parametrize(("x", "expected"), SPECIAL)
def test_special_values(x: float, expected: float) -> None:
    assert same_patterns(round_tf32(torch.tensor([x])), torch.tensor([expected]))


def test_every_nan_stays_nan() -> None:
    words = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F801000, 0x7FBFFFFF], dtype=torch.int32)
    both = torch.cat([words, words | -(1 << 31)])
    assert round_tf32(both.view(torch.float32)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_tf32s_already(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = round_tf32(x)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.nan_to_num(1.0, 2.0, 3.0), x.float().nan_to_num(1.0, 2.0, 3.0))
    finite = x.float()[x.isfinite()]
    assert same_patterns(round_tf32(finite), finite)


def test_any_strides_and_shapes() -> None:
    x = torch.randn(7, 11, 256)
    for view in (
        x.permute(2, 0, 1),
        x[:, ::3],
        x[..., 1:],
        x[:1].expand(3, -1, -1),
        x[0, 0, 0],
        x[:0],
        x.view(-1)[1:],
        x[:, :, :12].reshape(7, 11, 3, 4).to(memory_format=torch.channels_last),
    ):
        got = round_tf32(view)
        assert got.shape == view.shape
        assert torch.equal(got, formats.round(view, "tf32"))
        assert got.numel() == 0 or got.data_ptr() != view.data_ptr()


def test_the_gradient_passes_unrounded() -> None:
    x = torch.randn(5, requires_grad=True)
    out = round_tf32(x)
    assert out.requires_grad
    slopes = torch.full((5,), 1 + 2.0**-23)
    (got,) = torch.autograd.grad(out, x, slopes)
    assert torch.equal(got, slopes)
    with torch.no_grad():
        assert not round_tf32(x).requires_grad


def test_transforms_and_fake_tensors() -> None:
    x = torch.randn(3, 50)
    expected = formats.round(x, "tf32")
    assert torch.equal(torch.func.vmap(round_tf32)(x), expected)
    slope = torch.func.vmap(torch.func.grad(lambda t: (round_tf32(t) * 3).sum()))(x)
    assert torch.equal(slope, torch.full((3, 50), 3.0))
    with FakeTensorMode():
        assert round_tf32(torch.empty(3, 5)).shape == (3, 5)
    assert round_tf32(torch.empty(3, 5, device="meta")).shape == (3, 5)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo does, to trace it
def test_a_compiled_graph_has_the_same_numbers() -> None:
    x = torch.randn(50, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(round_tf32, backend="aot_eager", fullgraph=True)
    out = compiled(x)
    assert torch.equal(out, formats.round(x, "tf32"))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(50))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError) as caught:
        round_tf32(torch.ones(3).to(dtype))
    assert f"a {dtype} tensor. Use FP32, bf16 or fp16" in str(caught.value)
