"""fp8 casts in every implementation: each 16-bit input, each exponent of FP32 with the mantissas where rounding turns.

What is expected comes from `mezzo.formats` (the values) and ml_dtypes (their codes): neither shares a line with the
kernels. Triton decides at its import whether it interprets, so its kernels' tests are this file's, run again in a
process where it does.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.core import formats
from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS
from mezzo.pytorch.kernels import backend, fp8
from mezzo.pytorch.kernels.fp8 import cpu_elements, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IMPLEMENTATIONS = ["triton"] if INTERPRETED else ["reference", "numba"]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if INTERPRETED:
    np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of what the tests are about

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3FN, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3FN: "e4m3fn", E5M2: "e5m2"}
OUTSIDE = {E4M3FN: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
EIGHT_BITS = pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
Array = npt.NDArray[Any]
ONE = torch.ones(())


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba" and not backend.is_installed("numba"):
        pytest.skip("numba is not installed")
    monkeypatch.setenv(backend.KERNELS, request.param)
    return str(request.param)


# Inputs.


@functools.cache
def every(dtype: torch.dtype) -> Tensor:
    """Every bf16 or fp16."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@functools.cache
def dense() -> Tensor:
    """FP32s of both signs: each exponent with each start of a mantissa that 8 bits keep, its tie, and the neighbours of
    both; and patterns at random."""
    exponents = np.arange(256)[:, None, None] << 23
    kept = np.arange(8)[None, :, None] << 20
    ends = np.array([0, 1, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF])[None, None, :]
    edges = (exponents | kept | ends).ravel()
    chance = np.random.default_rng(5).integers(0, 1 << 31, 20_000)
    magnitudes = np.concatenate([edges, chance])
    both = np.concatenate([magnitudes, magnitudes | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(both.view(np.float32))


def inputs(dtype: torch.dtype) -> Tensor:
    return dense() if dtype is FP32 else every(dtype)


INPUTS = pytest.mark.parametrize("source", [FP32, BF16, FP16], ids=str)


# What is expected.


def expected_codes(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Array:
    """By the exact product, `mezzo.formats.round` of it and ml_dtypes' code of that; `formats.bits` of no numbers."""
    name = NAMES[dtype]
    exact = x.double().numpy() * scale.double().numpy()
    values = np.asarray(formats.round(exact, name, overflow="saturate"))
    codes = values.astype(OUTSIDE[dtype]).view(np.uint8)
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        chosen = np.isnan(exact) if math.isnan(value) else np.isinf(exact)
        chosen &= np.signbit(exact) == (math.copysign(1, value) < 0)
        codes[chosen] = formats.bits(value, name).code
    return codes


def codes_of(codes: Tensor) -> Array:
    assert codes.is_contiguous()
    return codes.view(torch.uint8).numpy()


def assert_codes(got: Tensor, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype
    assert got.shape == x.shape
    wrong = codes_of(got) != expected_codes(x, scale, dtype)
    assert not wrong.any(), x[torch.from_numpy(wrong)][:5].tolist()


def largest_finite(x: Tensor, axis: int | None = None) -> Array:
    magnitude = np.abs(x.double().numpy())
    found: Array = np.max(
        np.where(np.isfinite(magnitude), magnitude, 0.0), axis=axis, keepdims=axis is not None
    )
    return found


def power(exponent: int) -> Tensor:
    return torch.tensor(2.0**exponent)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal, zeros of the same sign; NaN is NaN."""
    alike = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return a.dtype is b.dtype and a.shape == b.shape and bool(alike.all())


# Casts.


@EIGHT_BITS
@INPUTS
def test_every_value_becomes_its_nearest_code(source: torch.dtype, dtype: torch.dtype) -> None:
    x = inputs(source)
    one = torch.ones(())
    got = fp8.cast(x, one, dtype)
    assert_codes(got, x, one, dtype)
    # and by an oracle alone, in its range
    inside = (x.abs() <= float(FORMATS[NAMES[dtype]].max)).numpy()
    theirs = x.float().numpy()[inside].astype(OUTSIDE[dtype]).view(np.uint8)
    assert np.array_equal(codes_of(got)[inside], theirs)


@EIGHT_BITS
@INPUTS
@pytest.mark.parametrize("exponent", [-126, -113, -9, 1, 9, 24, 126])
def test_scales_at_both_ends_round_once(source: torch.dtype, dtype: torch.dtype, exponent: int) -> None:
    x = inputs(source)[:: 7 if INTERPRETED else 1]
    assert_codes(fp8.cast(x, power(exponent), dtype), x, power(exponent), dtype)


@EIGHT_BITS
def test_what_is_no_number_is_not_hidden_and_what_is_finite_saturates(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, -0.0])
    for scale in (power(0), power(126), power(-126)):
        codes = fp8.cast(x, scale, dtype)
        values = codes.float().tolist()
        assert math.isnan(values[0])
        assert math.isnan(values[1])
        if dtype is E5M2:
            assert values[2:4] == [math.inf, -math.inf]
        else:
            assert math.isnan(values[2])
            assert math.isnan(values[3])
        if scale >= 1:
            largest = float(FORMATS[NAMES[dtype]].max)
            assert values[4:6] == [largest, -largest]
        assert [math.copysign(1, v) for v in values[6:]] == [1, -1]
    quiet = {E4M3FN: [0x7F, 0xFF, 0x7F, 0xFF], E5M2: [0x7E, 0xFE, 0x7C, 0xFC]}[dtype]
    assert codes_of(fp8.cast(x, power(0), dtype))[:4].tolist() == quiet


def test_the_kernels_constants_are_the_references() -> None:
    for dtype, prefix in ((E4M3FN, "_E4M3FN"), (E5M2, "_E5M2")):
        plan = reference.PLANS[dtype]
        form = FORMATS[NAMES[dtype]]
        words = vars(cpu_elements)
        assert words[f"{prefix}_LARGEST"] == plan.largest == pattern(float(form.max))
        assert words[f"{prefix}_NORMAL"] == plan.smallest_normal == pattern(float(form.smallest_normal))
        assert words[f"{prefix}_ANCHOR"] == plan.anchor == pattern(float(form.smallest_subnormal) * 2**23)
        assert plan.infinity == formats.bits(math.inf, form).code
        assert plan.nan == formats.bits(math.nan, form).code


def pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))


SHAPES = [(5, 301), (1, 1), (1, 300), (70, 1), (16, 64)]


def rows_and_columns(x: Tensor) -> list[Tensor]:
    """Scales of each shape for [M, K]: powers of two that differ from one to the next."""
    rows, columns = x.shape
    return [
        torch.tensor(0.5),
        torch.exp2(torch.arange(rows) % 9 - 4.0)[:, None],
        torch.exp2(torch.arange(columns) % 9 - 4.0)[None],
    ]


def matrix(shape: tuple[int, ...], dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2 ** torch.randint(-12, 9, shape, generator=generator)
    return x.to(dtype)


@EIGHT_BITS
@INPUTS
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_columns_have_scales(
    shape: tuple[int, int], dtype: torch.dtype, source: torch.dtype
) -> None:
    x = matrix(shape, source)
    for scale in rows_and_columns(x):
        codes = fp8.cast(x, scale, dtype)
        assert_codes(codes, x, scale, dtype)
        for wide in (BF16, FP32):
            values = codes.double() / scale.double()
            assert same_values(fp8.widen(codes, 1 / scale, wide), values.to(wide))


@EIGHT_BITS
def test_another_scale_is_rounded_in_fp32_first(dtype: torch.dtype) -> None:
    x, scale = dense(), torch.tensor(0.3)
    product = x * scale
    finite = product.isfinite() | ~x.isfinite()
    assert_codes(fp8.cast(x[finite], scale, dtype), product[finite], torch.ones(()), dtype)


def awkward(x: Tensor) -> list[Tensor]:
    """Values of [M, K] in other strides, and other dimensions."""
    return [
        x.t(),
        x[:, ::3],
        x[1:, 1:],
        x[:1].expand(4, -1),
        x[0, 0],
        x[:, 0],
        x.view(5, 7, 11),
        x.view(5, 7, 11).permute(2, 0, 1),
        x[:0],
        x[:, :0],
        x.view(-1)[1:],
    ]


@EIGHT_BITS
@INPUTS
def test_any_strides_and_shapes(source: torch.dtype, dtype: torch.dtype) -> None:
    for x in awkward(matrix((5, 77), source)):
        scale = torch.tensor(4.0)
        codes = fp8.cast(x, scale, dtype)
        assert_codes(codes, x, scale, dtype)
        assert fp8.widen(codes, 1 / scale, BF16).shape == x.shape
        assert float(fp8.amax(x)) == (largest_finite(x) if x.numel() else 0)
        again, largest = fp8.cast_with_amax(x, scale, dtype)
        assert np.array_equal(codes_of(again), codes_of(codes))
        assert torch.equal(largest, fp8.amax(x))
        quantized, found = fp8.quantize(x, dtype)
        assert torch.equal(found, fp8.scale_of(fp8.amax(x), dtype))
        assert_codes(quantized, x, found, dtype)
        if x.dim() == 2:
            for dim in (0, 1):
                quantized, found = fp8.quantize(x, dtype, 0, dim)
                assert found.shape == ((x.shape[0], 1) if dim else (1, x.shape[1]))
                assert_codes(quantized, x, found, dtype)
    codes = fp8.cast(matrix((6, 10)), torch.tensor(1.0), dtype)
    assert same_values(fp8.widen(codes.t(), torch.tensor(1.0), FP32), codes.float().t())


@pytest.mark.skipif(INTERPRETED, reason="large: for threads")
@EIGHT_BITS
@INPUTS
def test_many_threads_take_it_whole(source: torch.dtype, dtype: torch.dtype) -> None:
    """Several stretches, the last one short, and the largest element in any of them."""
    x = matrix((611, 331), source)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for dim in (None, 0, 1):
            assert np.array_equal(fp8.amax(x, dim).double().numpy(), largest_finite(x, dim))
            codes, scale = fp8.quantize(x, dtype, 1, dim)
            assert torch.equal(scale, fp8.scale_of(fp8.amax(x, dim), dtype, 1))
            assert_codes(codes, x, scale, dtype)
            assert same_values(fp8.widen(codes, 1 / scale, BF16), (codes.double() / scale.double()).to(BF16))
        for place in (0, 65_536, 131_071, x.numel() - 1):
            moved = x.clone()
            moved.view(-1)[place] = 30_000.0
            codes, largest = fp8.cast_with_amax(moved, power(-7), dtype)
            assert float(largest) == float(moved.view(-1)[place])
            assert_codes(codes, moved, power(-7), dtype)
    finally:
        torch.set_num_threads(threads)


# Largest magnitudes and scales.


@INPUTS
def test_the_largest_is_of_what_is_finite(source: torch.dtype) -> None:
    x = inputs(source)
    assert float(fp8.amax(x)) == largest_finite(x)
    x = matrix((6, 300), source)
    x[1, 5], x[2, 7], x[3], x[4, ::2] = math.nan, -math.inf, math.nan, math.inf
    x[5] = -torch.finfo(source).smallest_normal / 2
    for dim in (None, 0, 1, -1, -2):
        got = fp8.amax(x, dim)
        assert got.dtype is FP32
        assert np.array_equal(got.double().numpy(), largest_finite(x, dim))
    assert fp8.amax(x, 1)[3] == 0
    assert fp8.amax(x, 1)[5] == torch.finfo(source).smallest_normal / 2
    deep = matrix((3, 4, 5), source)
    for dim in (0, 1, 2):
        assert np.array_equal(fp8.amax(deep, dim).double().numpy(), largest_finite(deep, dim))


def test_the_largest_of_nothing_is_zero() -> None:
    for shape, dim, expected in [
        ((0,), None, ()),
        ((0, 3), 0, (1, 3)),
        ((0, 3), 1, (0, 1)),
        ((3, 0), 0, (1, 0)),
        ((3, 0), 1, (3, 1)),
    ]:
        got = fp8.amax(torch.empty(shape), dim)
        assert got.shape == expected
        assert not got.any()


@EIGHT_BITS
@pytest.mark.parametrize("margin", [0, 1, 15])
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype, margin: int) -> None:
    amax = dense()[dense() > 0]
    amax = amax[amax.isfinite()][:: 11 if INTERPRETED else 1]
    scale = fp8.scale_of(amax, dtype, margin)
    assert scale.dtype is FP32
    # exactly: amax is m 2^k with m in [1/2, 1), the largest number 7/8 2^(maxexp)
    mantissa, exponent = np.frexp(amax.double().numpy())
    largest = float(FORMATS[NAMES[dtype]].max)
    top_mantissa, top_exponent = np.frexp(largest)
    expected = np.clip(top_exponent - exponent - (mantissa > top_mantissa) - margin, -126, 126)
    assert np.array_equal(scale.double().numpy(), np.exp2(expected.astype(np.float64)))
    smallest = torch.finfo(FP32).smallest_normal
    assert bool((scale >= smallest).all())
    assert bool((1 / scale >= smallest).all())
    product = amax.double() * scale.double() * 2**margin
    assert bool(((product <= largest) | (scale == smallest)).all())
    assert bool(((2 * product > largest) | (scale == 2.0**126)).all())


@EIGHT_BITS
def test_scales_of_what_is_no_magnitude(dtype: torch.dtype) -> None:
    amax = torch.tensor([0.0, -0.0, math.inf, math.nan, 2.0**-149])
    scale = fp8.scale_of(amax, dtype)
    largest = fp8.scale_of(torch.tensor(torch.finfo(FP32).max), dtype)
    assert scale.tolist() == [1, 1, float(largest), float(largest), 2.0**126]
    assert fp8.scale_of(torch.empty(0, 3), dtype).shape == (0, 3)
    assert fp8.scale_of(torch.ones(3, 4)[:, ::2], dtype).shape == (3, 2)


@EIGHT_BITS
@INPUTS
def test_counting_what_rounding_alone_would_not_have_brought_to_the_end(
    source: torch.dtype, dtype: torch.dtype
) -> None:
    x = inputs(source)
    form = FORMATS[NAMES[dtype]]
    for scale in (power(0), power(9), power(126), power(-126)):
        exact = x.double().numpy() * scale.double().numpy()
        beyond = ~np.isfinite(formats.round(exact, form, overflow="infinity")) & np.isfinite(exact)
        got = fp8.count_saturated(x, scale, dtype)
        assert got.dtype is torch.int64
        assert int(got) == beyond.sum()
    ends = {E4M3FN: [464.0, 464.00003], E5M2: [61439.996, 61440.0]}[dtype]
    assert [int(fp8.count_saturated(torch.tensor([-end]), power(0), dtype)) for end in ends] == [0, 1]


@EIGHT_BITS
def test_a_tensors_own_scale_saturates_nothing(dtype: torch.dtype) -> None:
    for seed in range(2 if INTERPRETED else 20):
        x = matrix((4, 50), seed=seed)
        for dim in (None, 0, 1):
            codes, scale = fp8.quantize(x, dtype, 0, dim)
            assert int(fp8.count_saturated(x, scale, dtype)) == 0
            ulp = float(FORMATS[NAMES[dtype]].eps)
            error = (fp8.widen(codes, 1 / scale, FP32) - x).abs()
            floor = float(FORMATS[NAMES[dtype]].smallest_subnormal) / scale / 2
            assert bool((error <= torch.maximum(x.abs() * ulp / 2, floor)).all())


# Widening.


@EIGHT_BITS
@pytest.mark.parametrize("wide", [BF16, FP32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 2.0**-126, 2.0**126, 2.0**-7, 0.3])
def test_every_code_widens(dtype: torch.dtype, wide: torch.dtype, factor: float) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    inverse = torch.tensor(factor)
    got = fp8.widen(codes, inverse, wide)
    values = [formats.decode(code, NAMES[dtype]) for code in range(256)]
    with np.errstate(over="ignore"):
        product = np.array([float(v) for v in values]).astype(np.float32) * inverse.numpy()
    expected = formats.round(product, "bf16" if wide is BF16 else "fp32")
    assert got.dtype is wide
    assert same_values(got.float(), torch.from_numpy(expected))
    if factor == 1.0:
        assert np.array_equal(codes_of(fp8.cast(got, inverse, dtype)) & 0x7F, canonical(dtype) & 0x7F)


def canonical(dtype: torch.dtype) -> Array:
    """All codes; each NaN as the one that casts write."""
    codes = np.arange(256, dtype=np.uint8)
    is_nan = np.array([math.isnan(formats.decode(code, NAMES[dtype])) for code in range(256)])
    return np.where(is_nan, formats.bits(math.nan, NAMES[dtype]).code, codes).astype(np.uint8)


def test_ordinary_tensors_are_not_left_to_the_reference(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "reference":
        pytest.skip("it is the reference")

    def refused(*args: object) -> None:
        raise AssertionError("the reference was called")

    for name in ("amax", "scale_of", "cast", "cast_with_amax", "quantize", "widen"):
        monkeypatch.setattr(reference, name, refused)
    for x in (matrix((5, 77)), matrix((5, 77), BF16).t(), matrix((2, 3, 4), FP16)):
        fp8.cast_with_amax(x, ONE, E5M2)
        for dim in (None, 0, 1) if x.dim() == 2 else (None, 2, -1):
            _, scale = fp8.quantize(x, E4M3FN, 0, dim)
            assert torch.equal(fp8.scale_of(fp8.amax(x, dim), E4M3FN), scale)
            fp8.widen(fp8.cast(x, scale, E4M3FN), 1 / scale, BF16)


# Tracers, transforms, and what is refused.


def test_nothing_has_a_gradient() -> None:
    x = matrix((4, 6)).requires_grad_()
    codes, scale = fp8.quantize(x, E4M3FN)
    for made in (codes, scale, fp8.amax(x), fp8.cast(x, scale, E5M2), *fp8.cast_with_amax(x, scale, E5M2)):
        assert not made.requires_grad


def round_trip(x: Tensor) -> Tensor:
    codes, scale = fp8.quantize(x, E4M3FN, 0, 1)
    again, largest = fp8.cast_with_amax(x, power(0), E5M2)
    return fp8.widen(codes, 1 / scale, FP32) + again.float() * largest


def test_fake_and_meta_tensors_have_shapes_alone() -> None:
    with FakeTensorMode():
        assert round_trip(torch.empty(3, 5)).shape == (3, 5)
    codes, scale = fp8.quantize(torch.empty(3, 5, device="meta", dtype=BF16), E5M2, 0, 0)
    assert codes.shape == (3, 5)
    assert scale.shape == (1, 5)
    assert codes.device.type == "meta"


def test_transforms_see_each_sample() -> None:
    x = matrix((3, 4, 50))
    expected = torch.stack([round_trip(each) for each in x])
    assert torch.equal(torch.func.vmap(round_trip)(x), expected)
    slope = torch.func.grad(lambda t: (round_trip(t) * t).sum())(x[0])
    assert torch.equal(slope, expected[0])


@pytest.mark.skipif(INTERPRETED, reason="compilers need a Triton that does not interpret")
def test_a_compiled_graph_has_the_same_numbers() -> None:
    x = matrix((4, 50))
    torch._dynamo.reset()
    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), round_trip(x))
    torch._dynamo.reset()


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: fp8.cast(ONE.double(), ONE, E5M2), "cast(): a torch.float64 tensor. Use one of torch.float32"),
    (lambda: fp8.amax(torch.ones(3).long()), "amax(): a torch.int64 tensor"),
    (lambda: fp8.quantize(ONE.to(E5M2), E5M2), "quantize(): a torch.float8_e5m2 tensor"),
    (
        lambda: fp8.cast(ONE, ONE, BF16),
        "cast(): torch.bfloat16 is no 8-bit format. Use one of torch.float8_e4m3fn",
    ),
    (lambda: fp8.scale_of(ONE, FP16), "scale_of(): torch.float16 is no 8-bit format"),
    (lambda: fp8.scale_of(ONE.half(), E5M2), "Give them in FP32, as amax() does"),
    (lambda: fp8.widen(ONE, ONE, BF16), "widen(): torch.float32 is no 8-bit format"),
    (lambda: fp8.widen(ONE.to(E5M2), ONE, FP16), "Use torch.bfloat16 or torch.float32"),
    (lambda: fp8.count_saturated(ONE, ONE, FP32), "count_saturated(): torch.float32 is no"),
    (
        lambda: fp8.cast(torch.ones(4, 5), torch.ones(5), E5M2),
        "shape [5] for a tensor of shape [4, 5]. Use FP32",
    ),
    (
        lambda: fp8.cast(torch.ones(4, 5), torch.ones(4, 2), E5M2),
        "the shape [], one a row, [M, 1], or one a column",
    ),
    (lambda: fp8.cast(torch.ones(4), torch.ones(1, 4), E5M2), "shape [1, 4] for a tensor of shape [4]"),
    (lambda: fp8.cast(ONE, ONE.half(), E5M2), "a torch.float16 scale"),
    (lambda: fp8.cast_with_amax(torch.ones(4, 5), torch.ones(4, 1), E5M2), "Use one scale, of shape []"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.heavy
@NEEDS_TRITON
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_interpreted_kernels_pass_these_tests(implementation: str) -> None:
    if implementation != "numba":
        pytest.skip("once is enough")
    run_interpreted(Path(__file__))


def run_interpreted(file: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (1, 1), (2, 64)])
def test_a_single_row_or_column_has_scales_of_its_own(
    shape: tuple[int, int], dim: int | None, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 37.0
    codes, scale = fp8.quantize(x, dtype, dim=dim)
    expected_codes, expected_scale = reference.quantize(x, dtype, 0, dim)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
