"""Masters in parts: exact for every pattern, and harmless when the weight beside them was edited."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import patterns
from mezzo.pytorch.kernels.optimizer_step import storage
from mezzo.pytorch.kernels.optimizer_step.storage import (
    decode_split,
    decode_split8,
    encode_nearest,
    encode_split,
    encode_split8,
    encode_stochastic,
    refreshed,
)

BLOCK = 1 << 18
NANS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFF8000, 0xFFFFFFFF]
CANONICAL = 0x7FC00000


@pytest.mark.heavy
def test_every_pattern_that_is_no_nan_is_decoded_to_itself_and_every_nan_to_the_canonical_one() -> None:
    count = torch.arange(BLOCK, dtype=torch.int32)
    for start in range(-(1 << 31), 1 << 31, BLOCK):
        bits = count + start
        weight, remainder = encode_split(bits.view(torch.float32))
        decoded = decode_split(weight, remainder).view(torch.int32)
        magnitude_start = start & 0x7FFFFFFF
        if magnitude_start < patterns.FP32_INFINITY:
            assert torch.equal(decoded, bits), hex(start)
            continue
        first = 1 if magnitude_start == patterns.FP32_INFINITY else 0  # the infinity itself
        assert torch.equal(decoded[:first], bits[:first])
        assert (weight.view(torch.int16)[first:] == 0x7FC0).all()
        assert (remainder[first:] == 0).all()
        assert (decoded[first:] == CANONICAL).all()


def test_a_weight_is_the_nearest_bf16_and_the_remainder_is_what_is_left() -> None:
    words = patterns.awkward_words()
    weight, remainder = encode_split(patterns.masters(words))
    for word, got, left in zip(words, patterns.words(weight), remainder.tolist()):
        assert got == patterns.nearest_bf16(word), hex(word)
        assert (got << 16) + left == word
    assert patterns.words(decode_split(weight, remainder)) == words


def test_masters_from_0x7f7f8000_up_give_an_infinite_weight_and_come_back() -> None:
    words = [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]
    words += [word | 1 << 31 for word in words]
    weight, remainder = encode_split(patterns.masters(words))
    assert weight.isinf().tolist() == [False, True, True, True] * 2
    assert patterns.words(decode_split(weight, remainder)) == words


@pytest.mark.parametrize("encode", ["split", "split8", "none"])
def test_nan_is_stored_as_one_pattern_so_that_the_weight_shows_it(encode: str) -> None:
    masters = patterns.masters(NANS)
    every = torch.full((len(NANS),), -1, dtype=torch.int32)
    if encode == "none":
        assert patterns.words(encode_stochastic(masters, every)) == [0x7FC0] * len(NANS)
        return
    weight, remainder = encode_split(masters) if encode == "split" else encode_split8(masters, every)
    assert patterns.words(weight) == [0x7FC0] * len(NANS)
    assert remainder.tolist() == [0] * len(NANS)
    decode = decode_split if encode == "split" else decode_split8
    assert patterns.words(decode(weight, remainder)) == [CANONICAL] * len(NANS)


REMAINDERS = {"split": (-32768, -32767, -1, 0, 1, 32767), "split8": (-128, -127, -1, 0, 1, 127)}


@pytest.mark.parametrize("masters", sorted(REMAINDERS))
@pytest.mark.parametrize("edge", range(6))
def test_any_weight_beside_any_remainder_is_within_an_ulp_of_its_master(masters: str, edge: int) -> None:
    remainder = REMAINDERS[masters][edge]
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    weight = high.view(torch.bfloat16)
    kept = torch.full((1 << 16,), remainder, dtype=torch.int16 if masters == "split" else torch.int8)
    master = decode_split(weight, kept) if masters == "split" else decode_split8(weight, kept)

    is_nan = weight.isnan()
    assert torch.equal(master.isnan(), is_nan)
    assert set(patterns.words(master[is_nan])) == {CANONICAL}
    if remainder >= 0:
        assert torch.equal(master[weight.isinf()], weight[weight.isinf()].float())
    far = 2.0**128  # where the next number after the largest would be
    exact = weight[~is_nan].double().clamp(-far, far)
    moved = (master[~is_nan].double().clamp(-far, far) - exact).abs()
    ulp = 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert (moved <= ulp).all()


@pytest.mark.parametrize("masters", sorted(REMAINDERS))
def test_a_weight_set_to_zero_is_zero_and_to_infinity_is_no_nan(masters: str) -> None:
    decode = decode_split if masters == "split" else decode_split8
    dtype = torch.int16 if masters == "split" else torch.int8
    lowest, highest = min(REMAINDERS[masters]), max(REMAINDERS[masters])
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert patterns.words(decode(zeros, torch.full((2,), lowest, dtype=dtype))) == [0, 1 << 31]
    infinities = torch.tensor([math.inf, -math.inf], dtype=torch.bfloat16)
    assert torch.equal(decode(infinities, torch.full((2,), highest, dtype=dtype)), infinities.float())


def test_every_24_bit_master_is_exact_without_noise() -> None:
    count = torch.arange(BLOCK, dtype=torch.int32)
    for start in range(0, 1 << 24, BLOCK):
        bits = (count + start) << 8
        master = bits.view(torch.float32)
        weight, remainder = encode_split8(master, torch.zeros_like(bits))
        decoded = decode_split8(weight, remainder).view(torch.int32)
        assert torch.equal(decoded, torch.where(master.isnan(), CANONICAL, bits)), hex(start)
        assert torch.equal(weight, encode_split(master)[0]) or bool(master.isnan().any())
        assert torch.equal(weight.isnan(), master.isnan())


def exact_mean(tensor: Tensor) -> Fraction:
    return sum((Fraction(number) for number in tensor.double().tolist()), Fraction()) / tensor.numel()


FINITE = [word for word in patterns.awkward_words(20) if word & 0x7FFFFFFF < 0x7F7F0000]


def test_an_8_bit_remainder_is_right_on_average_over_all_noise() -> None:
    every = torch.arange(256, dtype=torch.int32)
    for word in FINITE[::7]:
        master = patterns.masters([word]).expand(256).contiguous()
        mean = exact_mean(decode_split8(*encode_split8(master, every)))
        assert mean == Fraction(patterns.value(word)), hex(word)


def test_only_the_low_bits_of_the_noise_count() -> None:
    master = patterns.masters(patterns.awkward_words(50))
    bits = storage.noise_bits(3, 0, master.numel())
    for got, want in zip(encode_split8(master, bits), encode_split8(master, bits & 0xFF)):
        assert torch.equal(got.view(torch.int8), want.view(torch.int8))
    assert torch.equal(encode_stochastic(master, bits), encode_stochastic(master, bits & 0xFFFF))


def test_without_a_remainder_a_weight_is_right_on_average_over_all_noise() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    for word in FINITE[::97]:
        stored = encode_stochastic(patterns.masters([word]).expand(1 << 16).contiguous(), every)
        values, counts = stored.float().unique(return_counts=True)
        mean = sum(Fraction(v) * c for v, c in zip(values.tolist(), counts.tolist())) / (1 << 16)
        assert mean == Fraction(patterns.value(word)), hex(word)
        assert len(values) == (1 if word & 0xFFFF == 0 else 2)


def test_noise_moves_no_infinity_and_may_carry_the_largest_masters_to_it() -> None:
    words = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF]
    every = torch.full((4,), -1, dtype=torch.int32)
    infinite = [0x7F800000, 0xFF800000] * 2
    assert patterns.words(decode_split8(*encode_split8(patterns.masters(words), every))) == infinite
    assert patterns.words(encode_stochastic(patterns.masters(words), every).float()) == infinite


def test_beside_a_separate_master_bf16_rounds_half_away_and_fp16_to_even() -> None:
    words = patterns.awkward_words()
    assert patterns.words(encode_nearest(patterns.masters(words), torch.bfloat16)) == [
        patterns.nearest_bf16(word) for word in words
    ]
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25])
    nearest = encode_nearest(ties, torch.float16).tolist()
    assert nearest == [1.0, 1 + 2 * 2**-10, 65504.0, math.inf, 0.0, 2 * 2.0**-24]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_edited_weight_replaces_its_separate_master_and_others_keep_theirs(dtype: torch.dtype) -> None:
    master = torch.tensor([1.0 + 2**-20, 2.5 + 2**-20, math.nan, math.nan, 1e-30, -1e-42, math.inf, 3.0])
    weight = encode_nearest(master, dtype)
    weight[1] = 7.0
    weight[3] = 5.0
    weight[5] = 0.0  # was -0: a weight set to zero is zero
    weight[7] = math.nan
    got = refreshed(master, weight)
    want = torch.tensor([1.0 + 2**-20, 7.0, math.nan, 5.0, 1e-30, 0.0, math.inf, math.nan])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(9.0).view(torch.int32), want.nan_to_num(9.0).view(torch.int32))


# From a C program of the same definition.
FROZEN = {
    (1, 0, 0): 0xE3F751B2,
    (1, 0, 1): 0xCE480C29,
    (7, 3, 0): 0x5323D912,
    (1 << 24, 100_000, 1): 0xC2ED0820,
}


def test_the_noise_of_an_element_is_a_hash_that_stays_what_it_is() -> None:
    for (step, ordinal, stream), frozen in FROZEN.items():
        key = storage.noise_key(step, ordinal, stream)
        assert key == frozen, (step, ordinal, stream)
        for start in (0, 1, (1 << 32) - 50, 1 << 33):
            got = storage.noise_bits(key, start, 100).tolist()
            want = [
                storage.noise_word((index * 0x9E3779B1 + key) & 0xFFFFFFFF)
                for index in range(start, start + 100)
            ]
            assert [word & 0xFFFFFFFF for word in got] == want
    assert storage.mix(1) == 0x688990C0
    assert storage.noise_bits(0, 0, 0).shape == (0,)


FIELDS = {
    "first": (storage.first_noise, 20),
    "second": (storage.second_noise, 20),
    "remainder": (storage.remainder_noise, 8),
    "alone": (storage.weight_noise, 16),
}
# Neighbours, groups, vectors and blocks; and Fibonacci numbers, over which multiples of the golden ratio nearly meet.
DISTANCES = [
    *range(1, 65),
    89,
    128,
    144,
    233,
    256,
    377,
    512,
    610,
    987,
    1024,
    1597,
    2048,
    2584,
    4096,
    4181,
    6765,
]


def test_noise_is_even_and_independent_across_uses_steps_and_parameters() -> None:
    count = 1 << 16
    drawn = []
    for step, ordinal, stream in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]:
        word = storage.noise_bits(storage.noise_key(step, ordinal, stream), 0, count)
        for name in ("alone",) if stream else ("first", "second", "remainder"):
            field, width = FIELDS[name]
            drawn.append((field(word).double() + 0.5) / (1 << width) - 0.5)
    spread = 1 / math.sqrt(12)
    for i, one in enumerate(drawn):
        assert abs(float(one.mean())) < 5 * spread / math.sqrt(count)
        for other in drawn[i + 1 :]:
            for a, b in ((one, other), (one[1:], other[:-1]), (one[:-1], other[1:])):
                assert abs(float((a * b).mean())) / spread**2 < 5 / math.sqrt(count)


@pytest.mark.parametrize("name", FIELDS)
def test_every_bit_of_noise_is_even_and_independent_of_those_of_elements_nearby(name: str) -> None:
    count = 1 << 17
    field, width = FIELDS[name]
    drawn = field(storage.noise_bits(storage.noise_key(5, 2, name == "alone"), 0, count))
    below = {"first": 8, "alone": 0}.get(name, 0)  # the first state's last bits decide in one of 4096 cases
    bits = torch.stack([((drawn >> i) & 1).float() * 2 - 1 for i in range(below, width)])
    assert float(bits.mean(1).abs().max()) < 5.5 / math.sqrt(count)
    among = bits @ bits.T / count - torch.eye(width - below)
    assert float(among.abs().max()) < 5.5 / math.sqrt(count)
    for distance in DISTANCES:
        pairs = bits[:, :-distance] @ bits[:, distance:].T / (count - distance)
        assert float(pairs.abs().max()) < 5.5 / math.sqrt(count - distance), distance


@pytest.mark.parametrize("name", FIELDS)
def test_noise_and_pairs_of_neighbours_fill_their_range_evenly(name: str) -> None:
    count = 1 << 18
    field, width = FIELDS[name]
    top = field(storage.noise_bits(storage.noise_key(9, 4, name == "alone"), 0, count)).long() >> width - 5
    for distance in (1, 2, 3, 16, 64):
        cells = torch.bincount(top[:-distance] * 32 + top[distance:], minlength=1024).double()
        expected = (count - distance) / 1024
        chi_square = float(((cells - expected) ** 2 / expected).sum())
        assert abs(chi_square - 1023) < 5 * math.sqrt(2 * 1023), distance


def test_the_bits_that_two_states_share_make_their_roundings_no_more_alike() -> None:
    count = 1 << 18
    word = storage.noise_bits(storage.noise_key(1, 0, storage.STEP), 0, count)
    for one, other in itertools.product((0.001, 0.25, 0.5, 0.9), repeat=2):
        up = (storage.first_noise(word) < one * (1 << 20)).double() - one
        also = (storage.second_noise(word) < other * (1 << 20)).double() - other
        spread = math.sqrt(one * (1 - one) * other * (1 - other))
        assert abs(float((up * also).mean())) / spread < 5 / math.sqrt(count)
