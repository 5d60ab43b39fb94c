"""The compiled quantization of a CPU against its specification in PyTorch operations, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mezzo.core.recipes import RECIPES, Factor
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.quantized import Quantized, quantize

pytest.importorskip("numba", reason="the compiled loops need Numba")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

RECIPE_FACTORS = {
    factor
    for recipe in RECIPES.values()
    for pair in (recipe.output, recipe.input_gradient, recipe.weight_gradient)
    for factor in pair
}
OTHERS = [
    Factor("e4m3fn", (1, 32), "e8m0-floor"),
    Factor("e3m2", (1, 32), "e8m0"),
    Factor("e2m1", (0, 16), "e8m0", stochastic=True),
    *(Factor(element, (1, 32), "e8m0", stochastic=True) for element in ("e4m3fn", "e5m2", "e3m2", "e2m3")),
]
FACTORS = [*sorted(RECIPE_FACTORS, key=str), *OTHERS]


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * 64).round() / 64  # 16 of them are summed exactly, in any order


def wide(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return matrix(rows, columns, seed) * 2.0 ** torch.randint(-12, 9, (rows, columns), generator=generator)


def inputs(factor: Factor) -> dict[str, Tensor]:
    """Matrices by what is awkward about them."""
    make = matrix if factor.hadamard else wide
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
    return (
        torch.where(x.isnan(), math.nan, x).contiguous().view(torch.int16 if x.dtype is BF16 else torch.int32)
    )


def assert_same(found: Quantized, expected: Quantized, what: object) -> None:
    assert torch.equal(pattern(found.codes), pattern(expected.codes)), what
    assert torch.equal(pattern(found.inv_scale), pattern(expected.inv_scale)), what
    if expected.tensor_scale is None:
        assert found.tensor_scale is None
    else:
        assert found.tensor_scale is not None
        assert torch.equal(pattern(found.tensor_scale), pattern(expected.tensor_scale)), what


def agree(factor: Factor, source: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, x in inputs(factor).items():
        for dim in (1, 0):
            what, x = (name, dim), x.to(source)
            monkeypatch.setenv(backend.KERNELS, "reference")
            expected = quantize(x, factor, dim)
            values = pattern(expected.values(dtype))
            monkeypatch.setenv(backend.KERNELS, "numba")
            for found in (quantize(x, factor, dim, dtype), quantize(x, factor, dim)):
                assert_same(found, expected, what)
                assert torch.equal(pattern(found.values(dtype)), values), what


@pytest.mark.heavy
@pytest.mark.parametrize("factor", FACTORS, ids=str)
def test_codes_scales_and_values_are_those_of_the_specification(
    factor: Factor, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(factor, BF16, BF16, monkeypatch)


@pytest.mark.heavy
@pytest.mark.parametrize("source", [FP32, FP16], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_other_inputs_and_fp32_values(
    name: str, source: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(RECIPES[name].output[1], source, FP32, monkeypatch)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    threads = torch.get_num_threads()
    try:
        for factor in (*RECIPES["mxfp8"].weight_gradient, *RECIPES["nvfp4"].weight_gradient):
            found = []
            for count in (1, 3):
                torch.set_num_threads(count)
                found.append(quantize(matrix(512, 512, 0).bfloat16(), factor, 0, BF16))
            assert_same(found[0], found[1], factor)
            assert torch.equal(found[0].values(BF16), found[1].values(BF16))
    finally:
        torch.set_num_threads(threads)
