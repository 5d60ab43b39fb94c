"""NaN, infinities, signed zeros, subnormals and values that overflow, through every cast that emulates a format.

What each becomes is `mezzo.formats`' word: IEEE's for fp16, bf16 and TF32, where what is too large is infinite; for the
two 8-bit formats, that finite values saturate and no infinity is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mezzo.core import formats
from mezzo.core.formats import FORMATS, Format
from mezzo.pytorch.kernels import fp8, tf32
from mezzo.pytorch.kernels.emulated import EMULATED
from mezzo.pytorch.kernels.emulated.packing import Rounded

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
EIGHTS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAMES = [*HALVES, "tf32", *EIGHTS]


def values(form: Format) -> list[float]:
    """Of both signs: no numbers, zeros, ends of the format and of FP32, ties there, and what lies beyond."""
    smallest, normal = float(form.smallest_subnormal), float(form.smallest_normal)
    largest = float(form.max)
    last = float(formats.ulp(largest, form))
    found = [
        math.nan,
        math.inf,
        0.0,
        smallest,
        smallest / 2,
        smallest * 0.75,
        smallest * 1.5,
        smallest * 2.5,
        normal,
        normal - smallest,
        normal - smallest / 2,
        1.0,
        1 + float(form.eps) / 2,
        1 + float(form.eps) * 1.5,
        largest,
        largest - last,
        largest + last / 4,
        largest + last / 2,
        largest + last,
        2.0**-149,
        2.0**-126,
        float(FORMATS["fp32"].max),
    ]
    held = [formats.round(value, "fp32") for value in found]  # what lies between FP32s, or beyond them
    return [math.copysign(float(value), sign) for value in held for sign in (1, -1)]


def expected(value: float, form: Format) -> float:
    """The value of the code that a cast writes."""
    overflow = "saturate" if form.bits == 8 and math.isfinite(value) else "infinity"
    return float(formats.round(value, form, overflow=overflow))


def assert_same(got: Tensor, name: str, is_sum: bool = False) -> None:
    """What came out is what is expected, zeros with their sign; but a sum that begins at 0 has no -0."""
    form = FORMATS[name]
    for value, is_ in zip(values(form), got.float().flatten().tolist(), strict=True):
        want = expected(value, form)
        told = f"{name} of {value!r}: {is_!r}, not {want!r}"
        assert is_ == want or (math.isnan(is_) and math.isnan(want)), told
        if want == 0 and not is_sum:
            assert math.copysign(1, is_) == math.copysign(1, want), told


def inputs(name: str) -> Tensor:
    return torch.tensor(values(FORMATS[name]))


# The same value, by each way that a tensor takes into a format.

ONE = torch.ones(())


def by_linear(x: Tensor, compute: torch.dtype) -> Tensor:
    """The only term of a sum: rounded on the way in, multiplied by 1, rounded on the way out."""
    product: Tensor = EMULATED["linear"](x[:, None], torch.ones(1, 1), compute=compute)
    return product.flatten()


def by_op(x: Tensor, compute: torch.dtype) -> Tensor:
    """An op without a sum, whose slope is 1 on both sides."""
    out: Tensor = EMULATED["prelu"](x, torch.ones(1), compute=compute)
    return out


def by_gradient(x: Tensor, compute: torch.dtype) -> Tensor:
    """The gradient that comes in, rounded, and out as an FP32 input's gradient."""
    source = torch.ones(len(x), 1, requires_grad=True)
    out: Tensor = EMULATED["linear"](source, torch.ones(1, 1), compute=compute)
    (slope,) = torch.autograd.grad(out, source, x[:, None].to(out.dtype))
    return slope.flatten()


def by_saved(x: Tensor, compute: torch.dtype) -> Tensor:
    """What backward multiplies with: the input as it was kept, and widened again."""
    weight = torch.ones(len(x), requires_grad=True)
    source = x.clone().requires_grad_()
    out: Tensor = EMULATED["bmm"](source[:, None, None], weight[:, None, None], compute=compute)
    (slope,) = torch.autograd.grad(out.float().sum(), weight)
    return slope


HALF_WAYS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "cast": lambda x, compute: Rounded(x, compute).wide,
    "op": by_op,
    "linear": by_linear,
    "gradient": by_gradient,
    "saved": by_saved,
}


@pytest.mark.parametrize("way", HALF_WAYS)
@pytest.mark.parametrize("name", HALVES)
def test_emulated_16_bits(name: str, way: str) -> None:
    is_sum = way in ("linear", "gradient", "saved")
    assert_same(HALF_WAYS[way](inputs(name), HALVES[name]), name, is_sum)


EIGHT_WAYS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "one": lambda x, dtype: fp8.decode(fp8.encode(x, dtype)),
    "bf16": lambda x, dtype: fp8.Quantized(fp8.encode(x, dtype), ONE).values(torch.bfloat16),
    "vmap": torch.func.vmap(lambda x, dtype: fp8.decode(fp8.encode(x, dtype)), in_dims=(0, None)),
}


@pytest.mark.parametrize("way", EIGHT_WAYS)
@pytest.mark.parametrize("name", EIGHTS)
def test_8_bits(name: str, way: str) -> None:
    assert_same(EIGHT_WAYS[way](inputs(name), EIGHTS[name]), name)


def test_tf32() -> None:
    assert_same(tf32.round_tf32(inputs("tf32")), "tf32")
    assert_same(torch.func.vmap(tf32.round_tf32)(inputs("tf32")), "tf32")


@pytest.mark.parametrize("name", EIGHTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_seen_and_spoils_no_other(name: str, bad: float) -> None:
    """The scale is of what is finite, so that the others keep their digits beside it."""
    x = torch.linspace(-1, 1, 40).view(4, 10)
    clean = fp8.quantize(x, EIGHTS[name])
    x[2, 3] = bad
    found = fp8.quantize(x, EIGHTS[name])
    assert torch.equal(found.inv_scale, clean.inv_scale)
    seen = found.values(torch.float32)
    assert not seen[2, 3].isfinite()
    others = torch.ones_like(x, dtype=torch.bool)
    others[2, 3] = False
    assert torch.equal(found.codes.view(torch.uint8)[others], clean.codes.view(torch.uint8)[others])


def test_the_rows_have_what_each_format_is_about() -> None:
    """Not a row but is rounded, and none is there twice over for want of FP32's own digits."""
    for name in NAMES:
        form = FORMATS[name]
        wanted = [expected(value, form) for value in values(form)]
        assert any(0 < abs(value) < float(form.smallest_normal) for value in wanted)
        assert float(form.max) in wanted
        assert any(math.isinf(value) for value in wanted) == form.has_infinity
        assert any(math.isnan(value) for value in wanted)
        assert any(value == 0 and math.copysign(1, value) < 0 for value in wanted)
