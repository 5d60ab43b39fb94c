"""Products of block formats by `scaled_mm`, without a GPU: layouts by its meta kernel, values by reading them back."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.core import formats
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.recipes import RECIPES, Factor, Recipe
from mezzo.pytorch.kernels import quantized_linear
from mezzo.pytorch.kernels.quantized import Quantized

BLOCKS = ["mxfp8", "fp8-block", "nvfp4"]
CUDA = torch.device("cuda")
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def unswizzled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """By cuBLAS's documentation: tiles of 128 x 4, filled up with zeros."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = row // 128 * -(-columns // 4) + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert not flat.view(torch.uint8).index_fill(0, place.flatten(), 0).any()
    return flat.float()[place]


E2M1 = torch.tensor([formats.decode(code, "e2m1") for code in range(16)])


def decoded(codes: Tensor, scales: Any, recipe: Any) -> Tensor:
    """FP64 [R, S] of a factor as `scaled_mm` receives it, by its documentation."""
    kind = (recipe[0] if isinstance(recipe, list) else recipe).name
    if kind in ("BlockWise1x128", "BlockWise128x128"):
        assert scales.stride(0) == 1
        if kind == "BlockWise128x128":
            scales = scales.t()[:, : codes.shape[1] // 128].repeat_interleave(128, 0)
        return codes.double() * scales.repeat_interleave(128, 1)
    if kind == "BlockWise1x32":
        values, size, tensor = codes.float(), 32, 1.0
    else:
        packed = codes.view(torch.uint8).long()
        values, size, tensor = E2M1[torch.stack([packed & 15, packed >> 4], 2).flatten(1)], 16, scales[1]
    rows, columns = values.shape
    blocks = unswizzled(scales[0], rows, columns // size)
    return values.double() * blocks.repeat_interleave(size, 1) * tensor


def scaled_mm(a: Tensor, b: Tensor, *, output_dtype: torch.dtype, **settings: Any) -> Tensor:
    left = decoded(a, settings["scale_a"], settings["scale_recipe_a"])
    right = decoded(b.t(), settings["scale_b"], settings["scale_recipe_b"])
    return (left @ right.t()).to(output_dtype)


def step(recipe: Recipe, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    y = quantized_linear.quantized_linear(*leaves, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def given(recipe: Recipe, rows: int = 21) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    inputs, outputs = recipe.multiple * 3, recipe.multiple * 5
    x, w = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs) / 8
    return x, w, torch.randn(outputs), torch.randn(rows, outputs).bfloat16()


TWO_ROWS = replace(
    RECIPES["mxfp8"],
    name="square",
    output=(Factor("e4m3fn", (1, 32), "e8m0"), Factor("e5m2", (32, 32), "e8m0")),
)


@pytest.mark.parametrize("recipe", [*(RECIPES[name] for name in BLOCKS), TWO_ROWS], ids=lambda r: r.name)
def test_native_products_are_those_of_the_emulation(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "")  # FP32 products: rounded once
    x, w, b, g = given(recipe)
    emulated = step(recipe, x, w, b, g)
    monkeypatch.setattr(quantized_linear, "is_native", lambda device, kind: True)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    for found, expected in zip(step(recipe, x, w, b, g), emulated):
        assert found.dtype is expected.dtype
        ulp = 2.0**-7 if found.dtype is torch.bfloat16 else 2.0**-20
        assert torch.allclose(found, expected, rtol=ulp, atol=ulp * float(expected.abs().max()) / 16)
    for tensor, place in ((x, (3, 5)), (w, (4, 6)), (g, (2, 1))):
        bad = [t.clone() if t is tensor else t for t in (x, w, b, g)]
        next(t for t, old in zip(bad, (x, w, b, g)) if old is tensor)[place] = math.nan
        with monkeypatch.context() as emulation:
            emulation.setattr(quantized_linear, "is_native", lambda device, kind: False)
            wanted = step(recipe, *bad)
        for found, expected in zip(step(recipe, *bad), wanted):
            assert torch.equal(found.isnan(), expected.isnan())


def check_on_meta(recipe: Recipe, rows: int, device: str = "meta") -> None:
    """Output and gradients of tensors without storage, for which PyTorch checks what `scaled_mm` is given."""
    real = given(recipe, rows)
    fake = FakeTensorMode() if device == "cuda" else contextlib.nullcontext()
    with fake, torch.no_grad():  # autograd would ask CUDA itself
        x, w, b, g = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in real)
        y, codes, inv_scale, tensor = quantized_linear._QuantizedLinear.forward(x, w, b, recipe, True)
        ctx = SimpleNamespace(recipe=recipe, dtypes=(x.dtype, w.dtype, b.dtype), needs_input_grad=[True] * 3)
        grads = quantized_linear._gradients(ctx, g, w, Quantized(codes, inv_scale, tensor))
    for found, like in zip([y, *grads], (g, x, w, b)):
        assert (found.shape, found.dtype, found.device.type) == (like.shape, like.dtype, device)


@pytest.mark.parametrize("rows", [128, 21, 1])
@pytest.mark.parametrize("name", BLOCKS)
def test_scaled_mm_takes_the_layouts(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's meta kernel checks shapes, strides, dtypes and swizzles as its CUDA kernel does, which tensors without
    storage take as well.
    """
    monkeypatch.setattr(quantized_linear, "is_native", lambda device, kind: True)
    made: list[Any] = []
    real = F.scaled_mm

    def noted(a: Tensor, b: Tensor, **settings: Any) -> Tensor:
        if name == "fp8-block":  # as the CUDA kernel checks them
            for scales in (settings["scale_a"], settings["scale_b"]):
                assert scales.stride() == (1, scales.shape[0]) or scales.shape[1] == 1 == scales.stride(1)
        made.append((settings["scale_recipe_a"], settings["scale_recipe_b"], a.dtype))
        return real(a, b, **settings)

    monkeypatch.setattr(F, "scaled_mm", noted)
    check_on_meta(RECIPES[name], rows)
    kinds = F.ScalingType
    if name == "fp8-block":
        wide = (kinds.BlockWise1x128, kinds.BlockWise128x128, E4)
        assert made == [wide, wide, (kinds.BlockWise1x128, kinds.BlockWise1x128, E4)]
    else:
        levels = [kinds.BlockWise1x32] if name == "mxfp8" else [kinds.BlockWise1x16, kinds.TensorWise]
        assert made == [(levels, levels, E4 if name == "mxfp8" else torch.float4_e2m1fn_x2)] * 3


@pytest.mark.parametrize("rows", [32, 21])
@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise"])
def test_fp8_products_have_a_gpu_s_layout(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_FP8", "native")
    made: list[tuple[Any, ...]] = []
    real = torch._scaled_mm

    def noted(a: Tensor, b: Tensor, *scales: Tensor, **kwargs: Any) -> Tensor:
        assert a.stride()[1] == b.stride()[0] == 1
        assert all(size % 16 == 0 for size in (a.shape[1], *b.shape))
        assert kwargs["use_fast_accum"] is False
        made.append(((a.dtype, b.dtype), [tuple(s.shape) for s in scales], kwargs["out_dtype"]))
        return real(a, b, *scales, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    check_on_meta(RECIPES[name], rows, "cuda")
    dtypes, scales, results = zip(*made)
    assert dtypes == ((E4, E4), (E5, E4), (E5, E4))
    if name == "fp8-rowwise":
        assert scales == ([(rows, 1), (1, 80)], [(rows, 1), (1, 48)], [(80, 1), (1, 48)])
        assert results == (torch.bfloat16,) * 3
    else:
        assert scales == ([(), ()],) * 3
        assert results == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("scale", ["power-of-two", "fp32"])
@pytest.mark.parametrize("squares", [*itertools.product((1, 128), repeat=4)])
def test_what_is_native_has_a_layout(scale: str, squares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "is_native", lambda device, kind: True)
    row, *others = (Factor("e4m3fn", (height, 128), scale) for height in (1, *squares))
    recipe = Recipe("r", (row, others[0]), (row, others[1]), (others[2], others[3]), 128)
    assert recipe.hardware == ("fp8-block" if squares[2] == 1 else "")
    for rows in (1, 21):
        if recipe.hardware:
            check_on_meta(recipe, rows)


def test_which_recipes_gpus_multiply() -> None:
    found = {name: recipe.hardware for name, recipe in RECIPES.items()}
    others = {"fp8-rowwise": "fp8", "mxfp8-floor": "mxfp8", "nvfp4-nearest": "nvfp4", "nvfp4-plain": "nvfp4"}
    assert found == {"fp8": "fp8", **{name: name for name in BLOCKS}, **others}
    mx, short = Factor("e4m3fn", (1, 32), "e8m0"), Factor("e2m3", (1, 32), "e8m0")
    wide = Factor("e5m2", (1, 32), "e8m0")
    for output in ((mx, short), (wide, wide), (mx, replace(mx, block=(1, 16)))):
        assert replace(RECIPES["mxfp8"], output=output).hardware == ""
    assert replace(RECIPES["nvfp4"], multiple=8 * 16 + 16).hardware == "nvfp4"
    assert replace(RECIPES["fp8"], multiple=8).hardware == ""
    assert replace(RECIPES["fp8"], output=(Factor("e5m2", (0, 0)),) * 2).hardware == ""


# product, compute capability, CUDA, what the reason names: nothing if it is native
DEVICES = [
    ("fp8", (8, 6), "13.0", ("8.9 or later", "8.6")),
    ("fp8", (8, 9), "13.0", ()),
    ("fp8", (10, 0), "13.0", ()),
    ("mxfp8", (9, 0), "13.0", ("10.0 or later", "9.0")),
    ("mxfp8", (10, 0), "12.8", ()),
    ("nvfp4", (12, 0), "13.0", ()),
    ("nvfp4", (10, 0), "12.6", ("12.8", "12.6")),
    ("fp8-block", (8, 9), "13.0", ("9.0 to 9.9", "8.9")),
    ("fp8-block", (9, 0), "12.9", ()),
    ("fp8-block", (10, 0), "13.0", ("9.0 to 9.9", "10.0")),
    ("", (10, 0), "13.0", ("no GPU",)),
]


@pytest.mark.parametrize(("kind", "capability", "cuda", "parts"), DEVICES)
def test_which_gpus_have_which_products(
    kind: str, capability: Any, cuda: str, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEZZO_FP8", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    why = quantized_linear.why_emulated(CUDA, kind)
    assert all(part in why for part in parts)
    assert quantized_linear.is_native(CUDA, kind) is (why == "") is (not parts)
    assert not quantized_linear.is_native(torch.device("cpu"), kind)
    monkeypatch.setattr(torch.version, "hip", "6.0")  # whose codes are others
    assert not quantized_linear.is_native(CUDA, kind)


def test_what_cannot_be_native_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZZO_FP8", "native")
    odd = replace(RECIPES["mxfp8"], output=(Factor("e4m3fn", (1, 16)),) * 2)
    for recipe, part in ((RECIPES["mxfp8"], "10.0"), (odd, "no GPU")):
        with pytest.raises(UsageError, match=f"MEZZO_FP8.*{part}.*emulated"):
            step(recipe, *given(recipe))
    assert quantized_linear.is_native(torch.device("cpu"))
    monkeypatch.setenv("MEZZO_FP8", "nativ")
    with pytest.raises(UnknownNameError, match=r"MEZZO_FP8='nativ'.*emulated, native. Did you mean 'native'"):
        quantized_linear.is_native(CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4099, 1])
@pytest.mark.parametrize("name", BLOCKS)
def test_native_products_on_a_gpu(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := quantized_linear.why_emulated(CUDA, RECIPES[name].hardware):
        pytest.skip(why)
    x, w, b, g = given(RECIPES[name], rows)
    there = [t.cuda() for t in (x, w, b, g)]
    found = {}
    for path in ("native", "emulated"):
        monkeypatch.setenv("MEZZO_FP8", path)
        found[path] = step(RECIPES[name], *there)
    for native, emulated in zip(found["native"], found["emulated"]):
        bound = 2.0**-7 * float(emulated.abs().max())  # sums have another order, then rounding to bf16
        assert float((native.float() - emulated.float()).abs().max()) <= bound
