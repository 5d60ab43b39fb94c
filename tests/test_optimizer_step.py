"""The reference of the optimizers' step: against scalar arithmetic; how masters and moments are stored; the noise."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import patterns
import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, formulas
from mezzo.pytorch.kernels.optimizer_step.formulas import GROUP, STEP, WEIGHT, noise_key
from mezzo.pytorch.kernels.optimizer_step.reference import (
    decode_master,
    encode_master,
    groups,
    load_state,
    store_state,
)
from mezzo.pytorch.optim.optimizers import adam_hyper, sgd_hyper

RULES = pytest.mark.parametrize("rule", sorted(cases.SETTINGS))
MASTERS = pytest.mark.parametrize("masters", sorted(cases.WEIGHTS))


def row(values: Tensor, hyper: Hyper, masters: str = "own", state: str = "fp32", ordinal: int = 0) -> Row:
    """A row of a parameter with these values, as far as its weight's format has them, that was never stepped."""
    made = cases.row(hyper, (masters, state, torch.float32), len(values), ordinal)
    made.weight.copy_(values)
    if made.master is not None:
        made.master.copy_(made.weight if made.master.is_floating_point() else torch.zeros(()))
    return made


def step(hyper: Hyper, grad: Tensor, *rows: Row, **tensors: Tensor) -> None:
    for each in rows:
        each.grad = grad
    cases.reference_move(hyper, rows, **tensors)


def gradients(count: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, generator=generator) * torch.logspace(-6, 1, count) for _ in range(steps)]


def start(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(99)) * 0.3


# Scalar arithmetic: Python's, rounded to FP32 after every operation.


def f(x: float) -> float:
    """To FP32. One FP64 operation and this is one FP32 operation: 53 bits are more than twice 24 and 2."""
    return patterns.to_fp32(x)


def scalar_adam(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    lr, beta1, beta2, decay = h["lr"], h["beta1"], h["beta2"], h["weight_decay"]
    if h["decoupled"]:
        w = f(w * f(1 - lr * decay))
    elif decay:
        g = patterns.fma(f(decay), w, g)
    m = f(s[0] + f(f(1 - beta1) * f(g - s[0])))
    v = f(f(f(beta2) * s[1]) + f(f(f(1 - beta2) * g) * g))
    down = f(f(f(math.sqrt(v)) * f(1 / math.sqrt(1 - beta2**t))) + f(h["eps"]))
    return f(w - f(f(f(lr / (1 - beta1**t)) * m) / down)), [m, v]


def scalar_sgd(w: float, g: float, s: list[float], t: int, h: dict[str, Any]) -> tuple[float, list[float]]:
    if h["weight_decay"]:
        g = patterns.fma(f(h["weight_decay"]), w, g)
    if h["momentum"]:
        b = g if t == 1 else patterns.fma(f(1 - h["dampening"]), g, f(f(h["momentum"]) * s[0]))
        g = patterns.fma(f(h["momentum"]), b, g) if h["nesterov"] else b
        s = [b]
    return patterns.fma(-f(h["lr"]), g, w), s


SCALAR = {adam_hyper: scalar_adam, sgd_hyper: scalar_sgd}


@RULES
@pytest.mark.parametrize("scaled", [False, True])
def test_every_bit_is_that_of_scalar_arithmetic(rule: str, scaled: bool) -> None:
    hyper, count = cases.HYPERS[rule], 40
    make, settings = cases.SETTINGS[rule]
    values = start(count)
    values[:3] = torch.tensor([0.0, 1e-40, 1e30])
    ours = row(values, hyper)
    tensors = {"multiplier": torch.tensor(0.37)} if scaled else {}
    ws, states = values.tolist(), [[0.0] * len(hyper.states)] * count
    for t, grad in enumerate(gradients(count, 4), start=1):
        grad[5] = 0.0
        step(hyper, grad, ours, **tensors)
        for i, g in enumerate(grad.tolist()):
            g = f(g * f(0.37)) if scaled else g
            g = -g if hyper.maximize else g
            ws[i], states[i] = SCALAR[make](ws[i], g, states[i], t, settings)
        assert ours.weight.tolist() == ws
        assert [s.tolist() for s in ours.states] == [list(column) for column in zip(*states)]
    assert float(ours.step) == 4


@MASTERS
def test_small_steps_are_not_lost(masters: str) -> None:
    hyper = sgd_hyper(1e-3)
    ours = row(torch.ones(20_000), hyper, masters)
    for _ in range(20):
        step(hyper, torch.ones(20_000), ours)
    exact = decode_master(ours.masters, ours.weight, ours.master)
    assert float(ours.weight.float().mean()) == pytest.approx(0.98, abs=2e-3 if masters != "none" else 1e-3)
    assert float(exact.mean()) == pytest.approx(0.98, abs=3e-4 if masters == "none" else 1e-5)


@RULES
def test_what_is_not_finite_reaches_its_own_element_alone(rule: str) -> None:
    for bad in (math.nan, math.inf):
        ours = row(start(200), cases.HYPERS[rule], "split")
        grad = gradients(200, 1)[0]
        grad[70] = bad
        step(cases.HYPERS[rule], grad, ours)
        assert ours.weight.isfinite().sum() >= 199
        assert math.isinf(bad) or bool(ours.weight[70].isnan())


NANS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFF8000, 0xFFFFFFFF]
REMAINDERS = {"split": (-32768, -32767, -1, 0, 1, 32767), "split8": (-128, -127, -1, 0, 1, 127)}
KEPT = {"split": torch.int16, "split8": torch.int8}
PARTS = pytest.mark.parametrize("masters", sorted(REMAINDERS))


@PARTS
def test_masters_are_decoded_to_themselves(masters: str) -> None:
    """Every upper half with the lower halves that matter; of 24 bits, every 37th."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)[:, None] << 16
    bits = (high + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).flatten()
    if masters == "split8":
        bits = torch.arange(-(1 << 23), 1 << 23, 37, dtype=torch.int32) << 8
    master = bits.view(torch.float32)
    weight, remainder = encode_master(masters, master)
    is_nan = master.isnan()
    decoded = decode_master(masters, weight, remainder).view(torch.int32)
    assert torch.equal(decoded[~is_nan], bits[~is_nan])
    separate, _ = encode_master("fp32", master, torch.bfloat16)
    assert torch.equal(weight[~is_nan], separate[~is_nan])
    assert (weight.view(torch.int16)[is_nan] == 0x7FC0).all()
    assert (remainder[is_nan] == 0).all()
    assert (decoded[is_nan] == formulas.NAN).all()


@pytest.mark.parametrize("masters", ["split", "split8", "none"])
def test_noise_moves_neither_nan_nor_infinity_and_may_carry_the_largest_masters_to_it(masters: str) -> None:
    most = 0xFFFF if masters == "none" else 0xFF if masters == "split8" else 0
    weight, kept = encode_master(masters, patterns.masters(NANS), noise=most)
    assert patterns.words(weight) == [0x7FC0] * len(NANS)
    assert masters == "none" or not kept.any()
    assert decode_master(masters, weight, kept).isnan().all()
    largest = patterns.masters([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF])
    decoded = patterns.words(decode_master(masters, *encode_master(masters, largest, noise=most)))
    assert decoded == (patterns.words(largest) if masters == "split" else [0x7F800000, 0xFF800000] * 2)


@PARTS
@pytest.mark.parametrize("edge", range(6))
def test_any_weight_beside_any_remainder_is_within_an_ulp_of_its_master(masters: str, edge: int) -> None:
    remainder = REMAINDERS[masters][edge]
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    master = decode_master(masters, weight, torch.full((1 << 16,), remainder, dtype=KEPT[masters]))
    is_nan = weight.isnan()
    assert torch.equal(master.isnan(), is_nan)
    if remainder >= 0:
        assert torch.equal(master[weight.isinf()], weight[weight.isinf()].float())
    else:
        zero = weight == 0
        assert torch.equal(master[zero].view(torch.int32), weight[zero].float().view(torch.int32))
    far = 2.0**128  # where the next number after the largest would be
    exact = weight[~is_nan].double().clamp(-far, far)
    moved = (master[~is_nan].double().clamp(-far, far) - exact).abs()
    ulp = 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert (moved <= ulp).all()


SIGNED, UNSIGNED = True, False
TABLES = pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])


def code_value(code: int, signed: bool) -> Fraction:
    """What a byte stands for, before its scale: a sign, an exponent and 3 bits, as the format's table says."""
    if not signed:
        return Fraction(8 + (code & 7)) * Fraction(2) ** ((code >> 3) - 34) if code else Fraction()
    exponent, mantissa = (code & 0x7F) >> 3, code & 7
    normal = Fraction(8 + mantissa) * Fraction(2) ** (exponent - 18)
    size = normal if exponent else mantissa * Fraction(1, 1 << 17)
    return -size if code & 0x80 else size


def fp32(number: Fraction) -> float:
    """The nearest FP32: Python rounds to FP64 and torch to FP32, which for these short numbers is one rounding."""
    return float(torch.tensor(float(number), dtype=torch.float64).float())


def scales(fields: list[int]) -> Tensor:
    return (torch.tensor(fields, dtype=torch.int32) << 7).to(torch.int16).view(torch.bfloat16)


def encode(value: Tensor, signed: bool, noise: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    codes = torch.empty(value.shape, dtype=torch.uint8)
    kept = torch.empty(groups(value.numel()), dtype=torch.bfloat16)
    store_state(value, codes, kept, noise, signed=signed)
    return codes, kept


def through(value: Tensor, signed: bool, noise: int | Tensor = 0) -> Tensor:
    return load_state(*encode(value, signed, noise), signed=signed)


@TABLES
@pytest.mark.parametrize("field", [1, 60, 127, 252, 253])
def test_every_code_is_decoded_as_the_table_says_and_encoded_to_itself(signed: bool, field: int) -> None:
    scale = Fraction(2) ** (field - 127)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = load_state(codes, scales([field] * 4), signed=signed)
    want = [fp32(code_value(code, signed) * scale) for code in range(256)]
    assert values.tolist() == want
    held = float(1.5 * scales([field]).float())  # a neighbour, which gives the group this scale
    for code in range(256):
        if Fraction(want[code]) != code_value(code, signed) * scale:
            continue  # below FP32's smallest
        got, kept = encode(torch.tensor([want[code], held]), signed, noise=0xFFFFF if code % 2 else 0)
        assert load_state(got, kept, signed=signed)[0] == want[code]
        if abs(code_value(code, signed)) < 1.875:  # which may be rounded up to, but then has the next scale
            assert patterns.words(kept) == [field << 7]
            assert int(got[0]) == (code if want[code] else 0)


@TABLES
def test_edges_of_groups(signed: bool) -> None:
    # A scale grows where the largest code would no longer reach.
    below = patterns.masters([patterns.pattern(1.875) - 1])
    for largest, field in [(below, 127), (torch.tensor([1.875]), 128), (torch.tensor([1.0]), 127)]:
        assert patterns.words(encode(largest, signed)[1]) == [field << 7]
    # Beyond the largest scale values saturate.
    assert through(torch.tensor([3.4e38, 1.6e38]), signed).tolist() == [1.875 * 2.0**126] * 2
    # A value that is not finite makes its group NaN, and no other; zeros have the scale 0.
    for bad in (math.nan, math.inf):
        value = torch.ones(3 * GROUP)
        value[GROUP + 5], value[2 * GROUP :] = bad, 0.0
        codes, kept = encode(value, signed)
        assert patterns.words(kept) == [127 << 7, 0x7FC0, 0]
        decoded = load_state(codes, kept, signed=signed)
        assert decoded.isnan().tolist() == [False] * GROUP + [True] * GROUP + [False] * GROUP
        assert not decoded[2 * GROUP :].any()
    # The last group may be short.
    value = torch.arange(1, 131).float()
    codes, kept = encode(value, signed)
    assert len(kept) == groups(130) == 3
    assert [len(encode(value[:count], signed)[1]) for count in (0, 1, 63, 64, 65)] == [0, 1, 1, 1, 2]
    alone, its = encode(value[128:], signed)
    assert torch.equal(alone, codes[128:])
    assert torch.equal(its, kept[2:])


def test_a_second_moment_that_is_not_zero_never_becomes_zero() -> None:
    tiny = [2.0**-149, 3 * 2.0**-149, 2.0**-130, 2.0**-126, 1e-37, 1e-30, 1e-10]
    for number, largest in itertools.product(tiny, [2.0**-149, 2.0**-120, 1e-30, 1.0, 1e38, 3e38]):
        for noise in (0, 0xFFFFF):
            got = through(torch.tensor([number, largest]), UNSIGNED, noise)
            assert float(got[0]) > 0, (number, largest, noise)
    assert through(torch.tensor([0.0, 1e38]), UNSIGNED, 0xFFFFF)[0] == 0


def exact_code(number: float, inverse: Fraction, noise: int, signed: bool) -> int:
    """Encode with exact fractions: cut to 3 bits after adding the noise's part of the last of them."""
    size = abs(Fraction(number)) * inverse
    if size == 0:
        return 0
    if signed and size < Fraction(1, 1 << 14):
        code = (round(size * (1 << 37)) + noise) >> 20  # the nearest of the noise's units, ties to even
    else:
        exponent = math.frexp(float(size))[1] - 1  # FP64 holds it exactly
        eighths = math.floor(size / Fraction(2) ** (exponent - 3) + Fraction(noise, 1 << 20))
        code = (exponent + (15 if signed else 31)) * 8 + eighths - 8
    return (min(code, 127) | (0x80 if number < 0 else 0)) if signed else min(max(code, 1), 255)


@TABLES
def test_codes_are_those_of_exact_arithmetic(signed: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-20, 3, (64 * GROUP,), generator=generator).float()
    value = torch.randn(64 * GROUP, generator=generator) * torch.exp2(exponents)
    value = value * torch.exp2(torch.linspace(-120, 120, 64)).repeat_interleave(GROUP)
    value = value if signed else value.abs()
    noise = formulas.first_noise(words(1, value.numel()))
    codes, kept = encode(value, signed, noise)
    for group, scale in enumerate(kept.float().tolist()):
        for i in range(group * GROUP, (group + 1) * GROUP):
            want = exact_code(float(value[i]), 1 / Fraction(scale), int(noise[i]), signed)
            assert int(codes[i]) == want, (i, float(value[i]))


def test_bf16_states_are_right_on_average_and_exact_where_bf16_is() -> None:
    def stored(value: Tensor, noise: Tensor | int) -> Tensor:
        made = torch.empty(value.shape, dtype=torch.bfloat16)
        store_state(value, made, None, noise, signed=True)
        return made

    every = torch.arange(1 << 16, dtype=torch.int32) << 4
    number = 1.0 + 2**-10 + 2**-20
    assert float(stored(torch.full((1 << 16,), number), every).double().mean()) == number
    finite = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(stored(finite.float(), 0xFFFFF), finite)


def words(key: int, count: int, start: int = 0) -> Tensor:
    return formulas.noise(key, formulas.place(torch.arange(start, start + count)))


# From a C program of the same definition.
FIXED = {(1, 0, 0): 0xE3F751B2, (1, 0, 1): 0xCE480C29, (7, 3, 0): 0x5323D912, (1 << 24, 10**5, 1): 0xC2ED0820}


def test_the_noise_of_an_element_is_a_hash_that_stays_what_it_is() -> None:
    for (step, ordinal, stream), frozen in FIXED.items():
        key = noise_key(step, ordinal, stream)
        assert key & 0xFFFFFFFF == frozen, (step, ordinal, stream)
        for start in (0, (1 << 32) - 50, 1 << 33):
            want = [patterns.noise_word(index, frozen) for index in range(start, start + 100)]
            assert [word & 0xFFFFFFFF for word in words(key, 100, start).tolist()] == want


# Name -> what draws it, its bits, its stream, and how many of its lowest bits decide in one of 4096 cases only.
FIELDS = {
    "first": (formulas.first_noise, 20, STEP, 8),
    "second": (formulas.second_noise, 20, STEP, 0),
    "remainder": (formulas.remainder_noise, 8, STEP, 0),
    "alone": (formulas.weight_noise, 16, WEIGHT, 0),
}
# Neighbours, groups, vectors and blocks; and Fibonacci numbers, over which multiples of the golden ratio nearly meet.
DISTANCES = [*range(1, 65), 89, 128, 144, 233, 256, 377, 512, 610, 987, 1024, 1597, 2048, 2584, 4096, 6765]


@pytest.mark.parametrize("name", FIELDS)
def test_every_bit_of_noise_is_even_and_independent_of_those_of_elements_nearby(name: str) -> None:
    count = 1 << 17
    draw, width, stream, below = FIELDS[name]
    drawn = draw(words(noise_key(5, 2, stream), count))
    bits = torch.stack([((drawn >> i) & 1).float() * 2 - 1 for i in range(below, width)])
    assert float(bits.mean(1).abs().max()) < 5.5 / math.sqrt(count)
    among = bits @ bits.T / count - torch.eye(width - below)
    assert float(among.abs().max()) < 5.5 / math.sqrt(count)
    for distance in DISTANCES:
        pairs = bits[:, :-distance] @ bits[:, distance:].T / (count - distance)
        assert float(pairs.abs().max()) < 5.5 / math.sqrt(count - distance), distance
