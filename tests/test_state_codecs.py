"""The optimizer states' small forms: right on average, relatively precise in every group, never flushed to zero."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import patterns
from mezzo.pytorch.kernels.optimizer_step import storage
from mezzo.pytorch.kernels.optimizer_step.storage import GROUP, STEP, groups, noise_key

SIGNED, UNSIGNED = True, False
TABLES = pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
FIELDS = (1, 2, 60, 127, 200, 252, 253)


def code_value(code: int, signed: bool) -> Fraction:
    """What a byte stands for, before its scale: a sign, an exponent and 3 bits, as the format's table says."""
    if signed:
        exponent, mantissa = (code & 0x7F) >> 3, code & 7
        size = (
            Fraction(8 + mantissa) * Fraction(2) ** (exponent - 18)
            if exponent
            else mantissa * Fraction(1, 1 << 17)
        )
        return -size if code & 0x80 else size
    exponent, mantissa = code >> 3, code & 7
    return Fraction(8 + mantissa) * Fraction(2) ** (exponent - 34) if code else Fraction()


def scale(field: int) -> Fraction:
    return Fraction(2) ** (field - 127)


def fp32(number: Fraction) -> float:
    """The nearest FP32: Python rounds to FP64 and torch to FP32, which for these short numbers is one rounding."""
    return float(torch.tensor(float(number), dtype=torch.float64).float())


def scales(fields: list[int]) -> Tensor:
    return (torch.tensor(fields, dtype=torch.int32) << 7).to(torch.int16).view(torch.bfloat16)


def encode(value: Tensor, signed: bool, noise: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    bits = noise if isinstance(noise, Tensor) else torch.full(value.shape, noise, dtype=torch.int32)
    return storage.encode_int8(value, bits, signed=signed)


def through(value: Tensor, signed: bool, noise: int | Tensor = 0) -> Tensor:
    return storage.decode_int8(*encode(value, signed, noise), signed=signed)


@TABLES
@pytest.mark.parametrize("field", FIELDS)
def test_every_code_is_decoded_as_the_table_says_and_encoded_to_itself(signed: bool, field: int) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = storage.decode_int8(codes, scales([field] * 4), signed=signed)
    want = [fp32(code_value(code, signed) * scale(field)) for code in range(256)]
    assert values.tolist() == want
    held = float(
        torch.tensor([1.5]) * scales([field]).float()
    )  # a neighbour, by which the group has this scale
    for code in range(256):
        if Fraction(want[code]) != code_value(code, signed) * scale(field):
            continue  # below FP32's smallest
        got, kept = encode(torch.tensor([want[code], held]), signed, noise=0xFFFFF if code % 2 else 0)
        assert storage.decode_int8(got, kept, signed=signed)[0] == want[code]
        if abs(code_value(code, signed)) < 1.875:  # which may be rounded up to, but then has the next scale
            assert patterns.words(kept) == [field << 7]
            assert int(got[0]) == (code if want[code] else 0)


@TABLES
def test_a_value_becomes_one_of_its_two_neighbouring_codes_and_is_itself_on_average(signed: bool) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32) * 16 + 8  # of 2**20, evenly
    smallest = 2.0**-14 if signed else 1.125 * 2.0**-31
    for number in (smallest, 1.0, 1.01, 0.9999, 3e-4, 1.874, 0.3 * 2**-5, 2.0**-13 + 2.0**-20):
        value = torch.full((1 << 16,), number, dtype=torch.float32)
        value[::GROUP] = 1.0  # the scale is 1
        got = through(value, signed, every.clone())
        picked = torch.ones(1 << 16, dtype=torch.bool)
        picked[::GROUP] = False
        levels = got[picked].unique()
        exact = float(torch.tensor(number))
        assert len(levels) <= 2
        assert float(levels[0]) <= exact <= float(levels[-1])
        # Over all noise: each group leaves one of 64 values out, evenly spaced, worth at most one noise unit.
        step = float(levels[-1] - levels[0])
        assert abs(float(got[picked].double().mean()) - exact) <= step * 2.0**-15


def test_a_signed_value_below_the_smallest_normal_code_is_itself_on_average() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32) * 16 + 8  # of 2**20, evenly
    for number in (
        2.0**-17,
        2.0**-18,
        5.3 * 2.0**-17,
        2.0**-14 - 2.0**-24,
        2.0**-25,
        -(2.0**-19),
        -3.3 * 2.0**-17,
    ):
        value = torch.full((1 << 16,), number, dtype=torch.float32)
        value[::GROUP] = 1.0
        picked = torch.ones(1 << 16, dtype=torch.bool)
        picked[::GROUP] = False
        mean = float(through(value, SIGNED, every.clone())[picked].double().mean())
        assert abs(mean - float(value[1])) <= 2.0**-17 * 2.0**-15


@TABLES
@pytest.mark.parametrize("largest", [1e-30, 1e-20, 1.0, 1e30, 2.0**-126, 1.48e38, 1.8749999, 1.875, 1.9375])
def test_relative_error_is_at_most_an_eighth_down_to_the_codes_range(signed: bool, largest: float) -> None:
    spread = torch.logspace(0, -4 if signed else -9, GROUP, dtype=torch.float64)
    value = (spread * largest).float()
    for noise in (0, 0x80000, 0xFFFFF):
        got = through(value, signed, noise)
        exact = value.double()
        normal = exact >= 2.0**-126
        error = ((got.double() - exact) / exact).abs()[normal]
        assert float(error.max()) <= 1 / 8
        subnormal = (got.double() - exact).abs()[~normal]
        assert (subnormal <= exact[~normal] / 8 + 2.0**-149).all()


@TABLES
def test_a_scale_grows_where_the_largest_code_would_no_longer_reach(signed: bool) -> None:
    below = patterns.masters([patterns.pattern(1.875) - 1])
    for largest, field in [(below, 127), (torch.tensor([1.875]), 128), (torch.tensor([1.0]), 127)]:
        assert patterns.words(encode(largest, signed)[1]) == [field << 7]


@TABLES
def test_a_small_group_beside_a_large_one_keeps_its_precision(signed: bool) -> None:
    small = torch.linspace(0.1, 1, GROUP) * 1e-30
    value = torch.cat([torch.full((GROUP,), 1e30), small, torch.full((GROUP,), 1e30)])
    got = through(value, signed, 0x80000)[GROUP : 2 * GROUP]
    assert float(((got - small) / small).abs().max()) <= 1 / 8


@TABLES
def test_beyond_the_largest_scale_values_saturate(signed: bool) -> None:
    got = through(torch.tensor([3.4e38, 1.6e38, 1e38]), signed)
    assert got[:2].tolist() == [1.875 * 2.0**126] * 2
    assert float(got[2]) == pytest.approx(1e38, rel=1 / 8)


def test_a_second_moment_that_is_not_zero_never_becomes_zero() -> None:
    tiny = [2.0**-149, 3 * 2.0**-149, 2.0**-140, 2.0**-130, 2.0**-126, 1e-37, 1e-30, 1e-10]
    for number, largest in itertools.product(tiny, [2.0**-149, 2.0**-120, 2.0**-117, 1e-30, 1.0, 1e38, 3e38]):
        value = torch.tensor([number, largest])
        for noise in (0, 0xFFFFF):
            assert float(through(value, UNSIGNED, noise)[0]) > 0, (number, largest, noise)
    assert through(torch.tensor([0.0, 1e38]), UNSIGNED, 0xFFFFF)[0] == 0


@TABLES
def test_groups_of_zeros_and_of_numbers_that_are_none(signed: bool) -> None:
    codes, kept = encode(torch.zeros(GROUP), signed, 0xFFFFF)
    assert codes.count_nonzero() == 0
    assert patterns.words(kept) == [0]
    assert through(torch.zeros(GROUP), signed).count_nonzero() == 0
    for bad in (math.nan, math.inf) + ((-math.inf, -math.nan) if signed else ()):
        value = torch.ones(2 * GROUP)
        value[5] = bad
        got = through(value, signed)
        assert got[:GROUP].isnan().all()
        assert torch.equal(got[GROUP:], torch.ones(GROUP))
        assert patterns.words(encode(value, signed)[1]) == [0x7FC0, 127 << 7]
    zeros = torch.zeros(GROUP, dtype=torch.uint8)
    assert storage.decode_int8(zeros, torch.tensor([math.nan]).bfloat16(), signed=signed).isnan().all()


@TABLES
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130])
def test_the_last_group_may_be_short(signed: bool, count: int) -> None:
    value = torch.arange(1, count + 1).float()
    codes, kept = encode(value, signed)
    assert codes.shape == (count,)
    assert kept.shape == (groups(count),)
    for group in range(groups(count)):
        own = slice(group * GROUP, (group + 1) * GROUP)
        alone, its = encode(value[own], signed)
        assert torch.equal(alone, codes[own])
        assert torch.equal(its, kept[group : group + 1])


def test_a_sign_survives_even_that_of_zero() -> None:
    value = torch.tensor([1.0, -1.0, -0.0, 0.0, -1e-9, -0.5])
    codes, _ = encode(value, SIGNED)
    assert (codes >= 0x80).tolist() == [False, True, True, False, True, True]
    assert torch.equal(through(-value, SIGNED), -through(value, SIGNED))


def reference_code(number: float, inverse: Fraction, noise: int, signed: bool) -> int:
    """Encode with exact fractions: cut to 3 bits after adding the noise's part of the last of them."""
    size = abs(Fraction(number)) * inverse
    if size == 0:
        return 0
    part = Fraction(noise, 1 << 20)
    if signed and size < Fraction(1, 1 << 14):
        code = (round(size * (1 << 37)) + noise) >> 20  # the nearest of the noise's units, ties to even
    else:
        exponent = math.frexp(float(size))[1] - 1  # FP64 holds it exactly
        eighths = math.floor(size / Fraction(2) ** (exponent - 3) + part)
        code = (exponent + (15 if signed else 31)) * 8 + eighths - 8
    if not signed:
        return min(max(code, 1), 255)
    return min(code, 127) | (0x80 if number < 0 else 0)


@TABLES
def test_codes_are_those_of_exact_arithmetic(signed: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(64 * GROUP, generator=generator) * torch.exp2(
        torch.randint(-20, 3, (64 * GROUP,), generator=generator).float()
    )
    value = value * torch.exp2(torch.linspace(-120, 120, 64)).repeat_interleave(GROUP)
    if not signed:
        value = value.abs()
    noise = storage.first_noise(storage.noise_bits(1, 0, value.numel()))
    codes, kept = encode(value, signed, noise)
    for group, s in enumerate(kept.float().tolist()):
        for i in range(group * GROUP, (group + 1) * GROUP):
            want = reference_code(float(value[i]), 1 / Fraction(s), int(noise[i]), signed)
            assert int(codes[i]) == want, (i, float(value[i]))


@TABLES
def test_a_decay_of_a_thousandth_a_step_which_no_code_can_show_happens_on_average(signed: bool) -> None:
    count, steps = 256 * GROUP, 200
    value = torch.full((count,), 0.9)
    value[::GROUP] = 1.0  # the scale stays: these don't decay
    for step in range(1, steps + 1):
        decayed = value * 0.999
        decayed[::GROUP] = 1.0
        word = storage.noise_bits(noise_key(step, 0, STEP), 0, count)
        field = storage.first_noise(word) if signed else storage.second_noise(word)
        value = through(decayed, signed, field)
    rest = value.view(-1, GROUP)[:, 1:].double()
    assert float(rest.mean()) == pytest.approx(0.9 * 0.999**steps, rel=2e-3)


def test_bf16_states_are_right_on_average_and_exact_where_bf16_is() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32) << 4
    got = storage.encode_bf16(torch.full((1 << 16,), 1.0 + 2**-10 + 2**-20), every).double()
    assert float(got.mean()) == 1.0 + 2**-10 + 2**-20
    exact = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = exact[~exact.isnan()]
    noisy = torch.full(finite.shape, 0xFFFFF, dtype=torch.int32)
    assert torch.equal(storage.encode_bf16(finite.float(), noisy), finite)
