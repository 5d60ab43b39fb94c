"""fp8 quantization: each 16-bit input, each exponent of FP32 with the mantissas where rounding turns.

What is expected comes from `mezzo.formats` (the values) and ml_dtypes (their codes): neither shares a line with the
implementation. The compiled loops of a CPU are compared with the PyTorch operations, in every recipe's formats.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from eight_bits import amax, quantize
from mezzo.core import formats
from mezzo.core.formats import FORMATS
from mezzo.core.recipes import RECIPES, Factor
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.quantized import Quantized, encode
from mezzo.pytorch.kernels.quantized import quantize as quantize_by

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3FN, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3FN: "e4m3fn", E5M2: "e5m2"}
OUTSIDE = {E4M3FN: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
EIGHT_BITS = pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
INPUTS = pytest.mark.parametrize("source", [FP32, BF16, FP16], ids=str)
LINES = [("tensorwise", 1, None), ("rowwise", 1, 1), ("rowwise", 0, 0)]  # scaling, dim, NumPy's axis
Array = npt.NDArray[Any]


@functools.cache
def inputs(dtype: torch.dtype) -> Tensor:
    """Every bf16 or fp16; FP32s of each exponent with each mantissa that 8 bits keep, its tie, and their neighbours."""
    if dtype is not FP32:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    exponents = np.arange(256)[:, None, None] << 23
    kept = np.arange(8)[None, :, None] << 20
    ends = np.array([0, 1, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF])[None, None, :]
    magnitudes = (exponents | kept | ends).ravel()
    both = np.concatenate([magnitudes, magnitudes | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(both.view(np.float32))


def matrix(shape: tuple[int, ...], dtype: torch.dtype = FP32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 2 ** torch.randint(-12, 9, shape, generator=generator)
    return x.to(dtype)


def expected_codes(exact: Array, dtype: torch.dtype) -> Array:
    """Codes of FP64 values, by `mezzo.formats.round` and ml_dtypes; infinities by `formats.bits`."""
    name = NAMES[dtype]
    codes = np.asarray(formats.round(exact, name, overflow="saturate")).astype(OUTSIDE[dtype]).view(np.uint8)
    for value in (math.inf, -math.inf):
        codes[exact == value] = formats.bits(value, name).code
    return codes


def assert_codes(got: Tensor, exact: Array, dtype: torch.dtype) -> None:
    """Each code as it must be; NaN is any NaN."""
    assert got.dtype is dtype
    assert got.is_contiguous()
    wanted = expected_codes(exact, dtype)
    is_nan = np.isnan(wanted.view(OUTSIDE[dtype]).astype(np.float32))
    wrong = np.where(is_nan, ~got.float().isnan().numpy(), got.view(torch.uint8).numpy() != wanted)
    assert not wrong.any(), exact[wrong][:5].tolist()


def largest_finite(x: Tensor, axis: int | None = None) -> Array:
    magnitude = np.abs(x.double().numpy())
    kept = np.where(np.isfinite(magnitude), magnitude, 0.0)
    return np.asarray(np.max(kept, axis=axis, keepdims=axis is not None))


@EIGHT_BITS
@INPUTS
def test_every_value_becomes_its_nearest_code(source: torch.dtype, dtype: torch.dtype) -> None:
    x = inputs(source).float()
    assert_codes(encode(x, dtype), x.double().numpy(), dtype)
    inside = (x.abs() <= float(FORMATS[NAMES[dtype]].max)).numpy()  # by ml_dtypes alone
    theirs = x.numpy()[inside].astype(OUTSIDE[dtype]).view(np.uint8)
    assert np.array_equal(encode(x, dtype).view(torch.uint8).numpy()[inside], theirs)


@EIGHT_BITS
def test_every_code_has_its_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    values = torch.tensor([float(formats.decode(code, NAMES[dtype])) for code in range(256)])
    found = Quantized(codes[None], torch.ones(1, 1)).values(FP32)[0]
    assert torch.equal(found.nan_to_num(), values.nan_to_num())
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.signbit() | found.isnan(), values.signbit() | values.isnan())
    finite = values.isfinite()
    assert torch.equal(encode(values, dtype).view(torch.uint8)[finite], codes.view(torch.uint8)[finite])
    for inv_scale, wide in itertools.product((2.0**-126, 2.0**-7, 2.0**100), (BF16, FP32)):
        got = Quantized(codes.view(1, -1), torch.tensor([[inv_scale]])).values(wide)[0]
        assert torch.equal(got[finite], (values * inv_scale).to(wide)[finite])


@EIGHT_BITS
@INPUTS
@pytest.mark.parametrize(("scaling", "dim", "axis"), LINES)
def test_codes_and_scales(scaling: str, dim: int, axis: Any, source: torch.dtype, dtype: torch.dtype) -> None:
    """Any shape and strides; each element within half an ulp of what its code and scale stand for."""
    base = matrix((70, 77), source)
    for x in (base, base.t(), base[:, ::3], base[1:, 1:], base[:1].expand(4, -1), base[:1], base[:, :1]):
        found = quantize(x, dtype, scaling, dim)
        assert found.codes.shape == x.shape
        assert found.inv_scale.shape == ((1, 1) if axis is None else largest_finite(x, axis).shape)
        scale = found.inv_scale.double().numpy()
        top = largest_finite(x, axis) / scale
        limit = float(FORMATS[NAMES[dtype]].max)
        assert (top <= limit).all()
        assert ((2 * top > limit) | (top == 0)).all()
        assert_codes(found.codes, x.double().numpy() / scale, dtype)
        form = FORMATS[NAMES[dtype]]
        error = np.abs(found.values(FP32).double().numpy() - x.double().numpy())
        floor = float(form.smallest_subnormal) * scale / 2
        assert (error <= np.maximum(np.abs(x.double().numpy()) * float(form.eps) / 2, floor)).all()


@INPUTS
def test_the_largest_is_of_what_is_finite(source: torch.dtype) -> None:
    x = matrix((6, 300), source)
    x[1, 5], x[2, 7], x[3], x[4, ::2] = math.nan, -math.inf, math.nan, math.inf
    for scaling, dim, axis in LINES:
        found = amax(x.float(), scaling, dim).double().numpy()
        assert np.array_equal(found if axis is not None else found[0, 0], largest_finite(x, axis))


OTHERS = [
    Factor("e4m3fn", (1, 32), "e8m0-floor"),
    Factor("e3m2", (1, 32), "e8m0"),
    Factor("e2m1", (0, 16), "e8m0", stochastic=True),
    *(Factor(element, (1, 32), "e8m0", stochastic=True) for element in ("e4m3fn", "e5m2", "e3m2", "e2m3")),
]
FACTORS = [*sorted({factor for recipe in RECIPES.values() for factor in recipe.factors}, key=str), *OTHERS]


def exact(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * 64).round() / 64  # 16 of them are summed exactly, in any order


def wide(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return exact(rows, columns, seed) * 2.0 ** torch.randint(-12, 9, (rows, columns), generator=generator)


def awkward(factor: Factor) -> dict[str, Tensor]:
    make = exact if factor.hadamard else wide
    zeros = make(160, 256, 1)
    zeros[:128, :128] = 0
    zeros[128:] *= 1e-30
    edges = [1.0, 1 + 2.0**-23, 1 + 2.0**-7, 2.0**-127, 2.0**-127 * (1 + 2.0**-7), 2.0**-126]  # of scales
    bad = make(64, 128, 2)
    bad[3, 5], bad[40, 7] = math.nan, -math.inf
    return {
        "blocks": make(160, 256, 3),
        "several tiles": make(64, 640, 4),
        "padding": make(33, 77, 5),
        "one row": make(1, 16, 6),
        "subnormal": make(32, 128, 7) * 2.0**-126,
        "large": make(32, 128, 8) * 2.0**110,
        "zero blocks": zeros,
        "edges": (torch.tensor(edges, dtype=torch.float64) * factor.largest)
        .float()
        .repeat_interleave(32)[:, None]
        * torch.ones(32),
        "zero": torch.zeros(16, 16),
        "minus zero": -torch.zeros(32, 32),
        "nan and infinity": bad,
        "transposed": make(96, 64, 9).t(),
        "strided": make(32, 256, 10)[:, ::2],
    }


def pattern(x: Tensor) -> Tensor:
    """Bits; one pattern for NaN, except in codes."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    x = torch.where(x.isnan(), math.nan, x).contiguous()
    return x.view(torch.int16 if x.dtype is BF16 else torch.int32)


def assert_same(found: Quantized, expected: Quantized, what: object) -> None:
    assert torch.equal(pattern(found.codes), pattern(expected.codes)), what
    assert torch.equal(pattern(found.inv_scale), pattern(expected.inv_scale)), what
    if expected.tensor_scale is None:
        assert found.tensor_scale is None
    else:
        assert torch.equal(pattern(found.tensor_scale), pattern(expected.tensor_scale)), what


@pytest.mark.heavy
@pytest.mark.skipif(not backend.is_installed("numba"), reason="the compiled loops need Numba")
@pytest.mark.parametrize(
    ("factor", "source", "dtype"),
    [
        *((factor, BF16, BF16) for factor in FACTORS),
        *((RECIPES[name].output[1], source, FP32) for name in ("mxfp8", "nvfp4") for source in (FP32, FP16)),
    ],
    ids=str,
)
def test_codes_scales_and_values_are_those_of_the_specification(
    factor: Factor, source: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, x in awkward(factor).items():
        for dim in (1, 0):
            what, x = (name, dim), x.to(source)
            monkeypatch.setenv(backend.KERNELS, "reference")
            expected = quantize_by(x, factor, dim)
            values = pattern(expected.values(dtype))
            monkeypatch.setenv(backend.KERNELS, "numba")
            for found in (quantize_by(x, factor, dim, dtype), quantize_by(x, factor, dim)):
                assert_same(found, expected, what)
                assert torch.equal(pattern(found.values(dtype)), values), what
