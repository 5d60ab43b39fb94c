"""Rounding, against ml_dtypes, numpy and torch: every code point up to 16 bits, every tie between two neighbours, and
the float32 on either side of each; numbers, arrays and tensors on the same points.

Where the oracles disagree: beyond e4m3fn's 448, ml_dtypes gives NaN (OFP8's non-saturating mode, our "infinity") and
torch gives 448 (its saturating mode, our "saturate"). From float64, torch and ml_dtypes go through float32 and round
twice; numpy's float16 does not. Rounding to odd first makes an oracle for float64.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mezzo.core import formats, rounding
from mezzo.core.errors import UsageError
from mezzo.core.formats import FORMATS
from mezzo.pytorch.rounding import round_array as round_tensor
from releases import TORCH, before_torch

SMALL = {
    "fp16": (np.float16, torch.float16, np.uint16),
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16, np.uint16),
    "e4m3fn": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, np.uint8),
    "e5m2": (ml_dtypes.float8_e5m2, torch.float8_e5m2, np.uint8),
}
Floats = NDArray[Any]


def same_bits(left: Floats, right: Floats) -> bool:
    """Equal patterns, the sign of zero included; any NaN equals any NaN."""
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    word = np.uint32 if left.dtype == np.float32 else np.uint64
    return bool(np.all((left.view(word) == right.view(word)) | (np.isnan(left) & np.isnan(right))))


@cache
def code_points(name: str) -> Floats:
    """The value of every code point of a format, in float32, by ml_dtypes."""
    dtype, _, word = SMALL[name]
    with np.errstate(invalid="ignore"):
        return np.arange(2 ** FORMATS[name].bits).astype(word).view(dtype).astype(np.float32)


@cache
def points(name: str) -> Floats:
    """Every code point, the tie to its upper neighbour, and the float32 on either side of both; both signs."""
    finite = np.unique(np.abs(code_points(name)[np.isfinite(code_points(name))]))
    above_max = np.float32(2 * float(FORMATS[name].max) - float(finite[-2]) if name != "bf16" else np.inf)
    upper = np.append(finite[1:], above_max)
    with np.errstate(over="ignore"):
        ties = (finite.astype(np.float64) + upper.astype(np.float64)) / 2
    if name == "bf16":
        ties[-1] = 2.0**128 - 2.0**119
    exact = np.concatenate([finite.astype(np.float64), ties, [0.0, np.inf, np.nan, 2.0**127, 1e9, 1e-45]])
    middle = exact.astype(np.float32)
    assert np.array_equal(middle.astype(np.float64)[:-1], exact[:-1], equal_nan=True)
    with np.errstate(over="ignore"):
        near = [np.nextafter(middle, np.float32(-np.inf)), middle, np.nextafter(middle, np.float32(np.inf))]
    both = np.concatenate(near)
    return np.concatenate([both, -both])


def by_ml_dtypes(x: Floats, name: str) -> Floats:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return x.astype(SMALL[name][0]).astype(np.float32)


def by_torch(x: Floats, name: str) -> Floats:
    return torch.from_numpy(x).to(SMALL[name][1]).float().numpy()


def saturated(x: Floats, name: str) -> Floats:
    """A cast after a clamp to the largest value: what "saturate" means."""
    largest = np.float32(FORMATS[name].max)
    return by_ml_dtypes(np.clip(x, -largest, largest), name)


ORACLES = [
    *[(name, "infinity", by_ml_dtypes) for name in SMALL],
    *[(name, "infinity", by_torch) for name in SMALL if name != "e4m3fn"],
    *[(name, "saturate", saturated) for name in SMALL],
    ("e4m3fn", "saturate" if TORCH >= (2, 13) else "infinity", by_torch),  # NaN in older casts
]


@pytest.mark.parametrize(("name", "overflow", "oracle"), ORACLES)
def test_arrays_round_as_the_oracle_casts(name: str, overflow: str, oracle: Any) -> None:
    assert same_bits(formats.round(points(name), name, overflow=overflow), oracle(points(name), name))


@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("overflow", formats.OVERFLOW)
@pytest.mark.parametrize("name", [*SMALL, "tf32", "e8m0", "e2m1"])
def test_numbers_arrays_and_tensors_round_alike(name: str, overflow: str, seed: int | None) -> None:
    how: dict[str, Any] = {"overflow": overflow, "seed": seed}
    x = points(name if name in SMALL else "fp16")
    as_array = formats.round(x, name, **how)
    assert same_bits(formats.round(torch.from_numpy(x), name, **how).numpy(), as_array)
    # Numbers take microseconds each: of 16-bit formats every 61st, which visits every offset in turn.
    wide = x[:: 1 if name in ("e4m3fn", "e5m2") else 61].astype(np.float64)
    if seed is not None:  # a number has the random bits of an array of one
        wide = wide[:: len(wide) // 200]
    size = len(wide) if seed is None else 1
    parts = [formats.round(wide[i : i + size], name, **how) for i in range(0, len(wide), size)]
    as_numbers = [formats.round(float(value), name, **how) for value in wide]
    assert same_bits(np.array(as_numbers), np.concatenate(parts))


PARTS = 16


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("storage", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3", "e4m3fn", "e5m2", "e8m0"])
def test_stochastic_rounding_goes_up_as_often_as_a_value_is_far(name: str, storage: str, xp: Any) -> None:
    """Between all neighbours, subnormals included, at each sixteenth of the gap: over all random bits that matter, the
    share of results that are the upper one is the distance from the lower. The other random bits are all 0 or all 1.
    """
    form, dtype = FORMATS[name], {"fp32": np.float32, "fp64": np.float64}[storage]
    values = {formats.decode(code, form) for code in range(1 << form.bits)}
    finite = np.array(sorted({abs(value) for value in values if math.isfinite(value)}))
    part = np.arange(PARTS)
    x = (finite[:-1, None] + (finite[1:] - finite[:-1])[:, None] * part / PARTS).astype(dtype)
    plan = rounding.RoundingPlan(form, FORMATS[storage], "saturate")
    for sign in (1, -1)[: 1 + form.signed]:
        ups = np.zeros(x.shape, int)
        for random in range(PARTS):
            for rest in (0, (1 << plan.random_bits - 4) - 1):
                bits = np.full(x.shape, (random << plan.random_bits - 4) + rest, plan.word)
                given = (sign * x, bits) if xp is np else (torch.from_numpy(sign * x), torch.from_numpy(bits))
                rounded = sign * np.asarray(plan.round(given[0], xp, given[1]))
                assert np.all((rounded == finite[:-1, None]) | (rounded == finite[1:, None]))
                ups += rounded == finite[1:, None]
        assert np.array_equal(ups, np.broadcast_to(2 * part, x.shape))


def test_stochastic_rounding_repeats_and_depends_on_seed_and_place() -> None:
    x = torch.full((64, 64), 2.75)
    first, second = (formats.round(x, "e2m1", seed=seed) for seed in (0, 1))
    assert torch.equal(first, formats.round(x, "e2m1", seed=0))
    assert not torch.equal(first, second)
    for found in (first, second):
        assert found.unique().tolist() == [2.0, 3.0]
        assert abs(found.mean() - 2.75) < 5 * 0.43 / 64  # five standard errors
    assert formats.round(2.0**-149, "e2m1", seed=0) == 0


@pytest.mark.parametrize("name", SMALL)
def test_every_code_point_decodes_and_encodes(name: str) -> None:
    form = FORMATS[name]
    codes = torch.arange(2**form.bits).to(getattr(torch, f"uint{form.bits}"))
    assert same_bits(code_points(name), codes.view(SMALL[name][1]).float().numpy())
    # Numbers take microseconds each: of 16-bit formats every 13th, and both ends of each exponent.
    ends = 1 << form.nmant
    some = [code for code in range(2**form.bits) if form.bits == 8 or code % 13 == 0 or (code + 1) % ends < 3]
    ours = [formats.decode(code, name) for code in some]
    assert same_bits(np.array(ours, np.float32), code_points(name)[some])
    for code, value in zip(some, ours):
        pattern = formats.bits(value, name)
        if math.isnan(value):
            assert (pattern.kind, pattern.sign) == ("nan", code >> (form.bits - 1))
        else:
            assert pattern.code == code


@pytest.mark.parametrize("name", SMALL)
def test_nan_is_quiet_without_payload_and_keeps_its_sign(name: str) -> None:
    dtype, _, word = SMALL[name]
    for nan in (math.nan, -math.nan):
        assert formats.bits(nan, name).code == int(np.array([nan], np.float32).astype(dtype).view(word)[0])
    # float32's quiet and signalling NaNs with any payload, of either sign
    patterns = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF], np.uint32)
    for overflow in formats.OVERFLOW:
        array = formats.round(patterns.view(np.float32), name, overflow=overflow)
        tensor = formats.round(torch.from_numpy(patterns.view(np.float32)), name, overflow=overflow)
        expected = [0x7FC00000] * 3 + [0xFFC00000] * 3
        assert array.view(np.uint32).tolist() == tensor.numpy().view(np.uint32).tolist() == expected


def to_odd(x: Floats) -> Floats:
    """float64 to float32, inexact values to the neighbour whose last bit is 1: a cast after it rounds only once."""
    with np.errstate(over="ignore", under="ignore"):
        near = x.astype(np.float32)
    wide = near.astype(np.float64)
    toward_zero = np.where(np.abs(wide) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    odd = np.where(wide != x, toward_zero.view(np.uint32) | np.uint32(1), toward_zero.view(np.uint32))
    return np.where(np.isfinite(x), odd.view(np.float32), near)


@pytest.mark.parametrize("name", SMALL)
def test_float64_is_rounded_once(name: str) -> None:
    x = points(name).astype(np.float64)
    x = x[np.isfinite(x)]
    # float64s that float32 takes for a tie: the trap of a cast by way of float32
    x = np.concatenate(
        [x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf), x * (1 + 2.0**-40), x * (1 - 2.0**-40)]
    )
    expected = by_ml_dtypes(to_odd(x), name).astype(np.float64)
    assert not same_bits(by_ml_dtypes(x.astype(np.float32), name).astype(np.float64), expected)
    assert same_bits(formats.round(x, name), expected)
    assert same_bits(formats.round(torch.from_numpy(x), name).numpy(), expected)
    some = slice(None, None, 997 if FORMATS[name].bits == 16 else 7)
    assert same_bits(np.array([formats.round(v, name) for v in x[some].tolist()], np.float64), expected[some])


@given(
    st.sampled_from([name for name in FORMATS if name != "e8m0"]),
    st.fractions(min_value=1, max_value=2),
    st.integers(-1100, 1100),
)
@settings(max_examples=60, deadline=None)
def test_rounding_is_to_the_nearest_in_any_width(name: str, x: Fraction, shift: int) -> None:
    form = FORMATS[name]
    exact = x * Fraction(2) ** max(form.minexp - form.nmant - 3, min(form.maxexp - 3, shift))
    rounded = formats.round(exact, form)
    code = formats.bits(exact, form).code
    assert formats.decode(code, form) == rounded
    distance = abs(Fraction(rounded) - exact)
    for neighbour in (code - 1, code + 1):
        if neighbour >= 0:
            other = abs(Fraction(formats.decode(neighbour, form)) - exact)
            assert distance < other or (distance == other and code % 2 == 0)


IN_FLOAT32 = [np.float16, ml_dtypes.bfloat16, ">f4", *(row[1] for row in SMALL.values())]
IN_FLOAT64 = ["f8", ">f8", "?", "u1", "i4", ">i8", torch.float64, torch.bool, torch.uint8, torch.int32]


@pytest.mark.parametrize("dtype", [*IN_FLOAT32, *IN_FLOAT64], ids=str)
def test_every_dtype_of_arrays_and_tensors(dtype: Any) -> None:
    values = [0, 1, 3, 100, 101, 113]
    is_tensor = isinstance(dtype, torch.dtype)
    x: Any = torch.tensor(values).to(dtype) if is_tensor else np.array(values).astype(dtype)
    rounded = formats.round(x.reshape(2, 3), "e5m2")
    wide = "float32" if dtype in IN_FLOAT32 else "float64"
    assert str(rounded.dtype).removeprefix("torch.") == wide
    assert rounded.reshape(6).tolist() == [formats.round(float(value), "e5m2") for value in x]


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_input_is_never_written_and_never_handed_back(form: formats.Format, dtype: type) -> None:
    x = np.array([1.0, 0.1, -0.0, 3e38, np.nan], dtype)
    before, tensor = x.copy(), torch.from_numpy(x)
    rounded, as_tensor = formats.round(x, form), formats.round(tensor, form)
    assert same_bits(x, before)
    assert not np.shares_memory(rounded, x)
    assert as_tensor.data_ptr() != tensor.data_ptr()
    assert same_bits(as_tensor.numpy(), rounded)
    assert same_bits(rounded[:4], np.array([formats.round(v, form) for v in x.tolist()[:4]], dtype))


def test_shapes_strides_and_scalars() -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
    expected = np.array([formats.round(v, "e4m3fn") for v in x.ravel().tolist()], np.float32).reshape(x.shape)
    assert same_bits(np.ascontiguousarray(formats.round(x.T, "e4m3fn")), np.ascontiguousarray(expected.T))
    assert same_bits(formats.round(x[:, ::-1, ::2], "e4m3fn"), expected[:, ::-1, ::2].copy())
    turned = torch.from_numpy(x).permute(2, 0, 1)
    assert torch.equal(formats.round(turned, "e4m3fn"), torch.from_numpy(expected).permute(2, 0, 1))
    for nothing in (x[:0], torch.zeros(0, 2), np.array(0.3), torch.tensor(0.3)):
        assert formats.round(nothing, "e4m3fn").shape == nothing.shape
    for kind, name in ((np.float32, "e4m3fn"), (np.float64, "e4m3fn"), (np.float32, "fp64")):
        one = formats.round(kind(0.3125), name)
        assert (type(one), one) == (kind, 0.3125)
    size = 2 * rounding._BLOCK + 5  # blocks of an array join without a seam
    x = np.linspace(-70000, 70000, size, dtype=np.float32)
    assert same_bits(formats.round(x, "fp16"), by_ml_dtypes(x, "fp16"))


WRONG = [
    (np.zeros(2, np.complex64), "bf16", "infinity", "cannot round a complex64 array exactly"),
    (np.array([2**53 + 1]), "bf16", "infinity", "int64 values of 2**53 or more"),
    (torch.zeros(2, dtype=torch.int64), "bf16", "infinity", "cannot round a torch.int64 tensor"),
    (torch.eye(2).to_sparse(), "bf16", "infinity", "layout torch.sparse_coo"),
    (torch.zeros(2), "fp64", "saturate", "largest value of fp64"),
]


@pytest.mark.parametrize(("x", "name", "overflow", "message"), WRONG, ids=[row[3] for row in WRONG])
def test_what_cannot_be_rounded_exactly_is_refused(x: Any, name: str, overflow: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        formats.round(x, name, overflow=overflow)
    assert message in str(caught.value)


def test_autograd_torch_func_and_a_compiled_graph_see_a_cast() -> None:
    x = torch.tensor([0.1, -2.3, 1e6], requires_grad=True)
    y = formats.round(x, "fp16")
    assert y.tolist() == x.detach().half().float().tolist()
    y.backward(torch.tensor([0.1, 0.2, 0.3]))
    assert x.grad.tolist() == torch.tensor([0.1, 0.2, 0.3]).tolist()
    x = torch.from_numpy(points("e5m2")).reshape(4, -1)
    before_torch(2, 13, "torch.func.vmap has no rule for Tensor.view(dtype)")
    expected = formats.round(x, "fp16")
    assert same_bits(torch.func.vmap(lambda row: formats.round(row, "fp16"))(x).numpy(), expected.numpy())
    slopes = torch.func.vmap(torch.func.grad(lambda row: formats.round(row, "fp16").nan_to_num().sum()))
    assert torch.equal(slopes(torch.ones(2, 3)), torch.ones(2, 3))
    form = FORMATS["fp16"]
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: round_tensor(t, form, "infinity"), backend="eager", fullgraph=True)
    assert same_bits(compiled(x).numpy(), expected.numpy())
    compiled = torch.compile(lambda t: round_tensor(t, form, "infinity", 3), backend="eager", fullgraph=True)
    assert same_bits(compiled(x).numpy(), formats.round(x, "fp16", seed=3).numpy())
    torch._dynamo.reset()


def test_flushing_denormals_changes_nothing() -> None:
    x = torch.from_numpy(points("fp16"))
    expected = formats.round(x, "e5m2")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = formats.round(x, "e5m2")
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(flushed.numpy(), expected.numpy())


@given(st.floats(allow_nan=False, width=64))
def test_ulp_is_pythons_and_numpys(x: float) -> None:
    assert formats.ulp(x, "fp64") == math.ulp(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for name, kind in (("fp32", np.float32), ("fp16", np.float16)):
            near = kind(x)
            if np.isfinite(near) and abs(near) != np.finfo(kind).max:
                assert formats.ulp(float(near), name) == abs(float(np.spacing(np.abs(near))))
    assert math.isnan(formats.ulp(math.nan, "bf16"))
    assert (formats.ulp(65504, "fp16"), formats.ulp(65520, "fp16")) == (32, math.inf)


THEIRS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def many_values(name: str) -> np.ndarray:
    """Every bf16 value, and a million random float32 values; without NaN where the format has none."""
    few = np.arange(1 << 16, dtype=np.uint32) << 16
    many = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    x = np.concatenate([few, many]).view(np.float32)
    if name == "e8m0":  # ml_dtypes rounds up every value between the two smallest, 2^-127 and 2^-126
        return x[~((x > 2.0**-127) & (x < 2.0**-126))]
    return x[~np.isnan(x)]


@pytest.mark.parametrize("name", THEIRS)
def test_arrays_and_tensors_round_as_ml_dtypes_casts(name: str) -> None:
    x = many_values(name)
    with np.errstate(invalid="ignore"):
        expected, wide = x.astype(THEIRS[name]).astype(np.float32), x.astype(np.float64)
    rounded = formats.round(x, name)
    assert np.array_equal(rounded, expected, equal_nan=True)
    assert np.array_equal(np.signbit(rounded[rounded == 0]), np.signbit(x[rounded == 0]))
    assert np.array_equal(formats.round(torch.from_numpy(x), name).numpy(), expected, equal_nan=True)
    assert np.array_equal(formats.round(wide, name), expected.astype(np.float64), equal_nan=True)
    some = slice(None, None, 501)
    assert np.array_equal([formats.round(v, name) for v in x[some].tolist()], expected[some], equal_nan=True)


@pytest.mark.parametrize("name", THEIRS)
def test_every_code_point_of_a_block_format(name: str) -> None:
    form = FORMATS[name]
    theirs = np.arange(1 << form.bits, dtype=np.uint8).view(THEIRS[name]).astype(np.float64)
    for code, value in enumerate(theirs.tolist()):
        ours = formats.decode(code, name)
        assert ours == value or (math.isnan(ours) and math.isnan(value))
        assert formats.bits(ours, name).code == code
        assert (formats.bits(ours, name).kind == "nan") == math.isnan(value)


# The ties of e2m1 from its standard; e8m0's middles, its smallest value, and what it has no value for.
NUMBERS = [
    *(("e2m1", sign * tie, sign * value) for tie, value in
      {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}.items() for sign in (1, -1)),
    *(("e8m0", number, value) for number, value in
      {3: 4, 2.999: 2, 2.0**-140: 2.0**-127, 1.4 * 2.0**-127: 2.0**-127}.items()),
    *(("e8m0", number, math.nan) for number in (0.0, -0.0, -1.0, -math.inf, math.inf, math.nan, 2.0**128)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "value"), NUMBERS)
def test_ties_and_what_a_format_has_no_value_for(name: str, number: float, value: float) -> None:
    for form in (float, np.float64, *([np.float32] if number != 2.0**128 else [])):
        assert formats.round(form(number), name) == pytest.approx(value, rel=0, abs=0, nan_ok=True)
    if name == "e2m1":
        least = Fraction(1, 10**30)
        below, above = (formats.round(Fraction(number) + sign * least, "fp4") for sign in (-1, 1))
        assert below < above


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3"])
def test_without_nan_and_infinity_what_is_too_large_becomes_the_largest(name: str) -> None:
    largest = FORMATS[name].max
    for overflow in formats.OVERFLOW:
        assert formats.round(-math.inf, name, overflow=overflow) == -largest
        assert formats.round(torch.tensor([1e30]), name, overflow=overflow).item() == largest
    assert math.isnan(formats.round(math.nan, name))  # the rounded value is a float32, which has NaN
    with pytest.raises(UsageError, match="no code for NaN"):
        formats.bits(math.nan, name)
