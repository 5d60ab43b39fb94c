"""Who multiplies fp8 factors: `torch._scaled_mm` with the layouts that hardware wants, and which layers fit it."""

from __future__ import annotations

import doctest
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.core.errors import UnknownNameError
from mezzo.pytorch.kernels import fp8
from mezzo.pytorch.kernels.fp8 import Quantized, product, quantize

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2

# form -> (shape of a, shape of b) from M, K, N; which dimension of each is summed over.
FORMS: dict[str, Any] = {
    "NT": (lambda M, K, N: ((M, K), (N, K)), (1, 1)),
    "NN": (lambda M, K, N: ((M, N), (N, K)), (1, 0)),
    "TN": (lambda M, K, N: ((M, N), (M, K)), (0, 0)),
}


def factors(form: str, sizes: tuple[int, int, int], rowwise: bool) -> list[Quantized]:
    torch.manual_seed(0)
    shapes, dims = FORMS[form]
    found = []
    for shape, dim, dtype in zip(shapes(*sizes), dims, (E4 if form == "NT" else E5, E4)):
        found.append(quantize(torch.randn(shape), dtype, "rowwise" if rowwise else "tensorwise", dim))
    return found


def exact(form: str, a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    left, right = (f.codes.double() * f.inv_scale.double() for f in (a, b))
    left, right = (left.t() if form == "TN" else left), (right.t() if form == "NT" else right)
    return left @ right, left.abs() @ right.abs()


def within(found: Tensor, truth: Tensor, terms: Tensor, eps: float) -> bool:
    return bool(((found.double() - truth).abs() <= eps * truth.abs() + 2.0**-20 * terms).all())


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_a_bias_is_added_before_the_result_is_rounded(rowwise: bool) -> None:
    a, b = factors("NT", (17, 64, 48), rowwise)
    truth, terms = exact("NT", a, b)
    bias = -truth.mean(0).float() * 1000
    truth, terms = truth + bias.bfloat16().double(), terms + bias.abs().double()
    for is_native in (False, True):
        assert within(product("NT", a, b, bias, native=is_native), truth, terms, 2.0**-8)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("batch", [(32,), (3, 7)], ids=str)
def test_on_a_gpu_every_product_has_the_layout_that_it_needs(
    batch: tuple[int, ...], scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one: PyTorch's meta kernel checks shapes, strides and dtypes as its CUDA kernel does."""
    monkeypatch.setenv("MEZZO_FP8", "native")
    made: list[dict[str, Any]] = []
    real = torch._scaled_mm

    def noted(a: Tensor, b: Tensor, *scales: Tensor, **kwargs: Any) -> Tensor:
        assert a.stride()[1] == 1
        assert b.stride()[0] == 1
        assert all(size % 16 == 0 for size in (a.shape[1], *b.shape))
        assert kwargs["use_fast_accum"] is False
        made.append(kwargs | {"dtypes": (a.dtype, b.dtype), "scales": [tuple(s.shape) for s in scales]})
        return real(a, b, *scales, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    rows = max(1, torch.Size(batch).numel())
    with FakeTensorMode(), torch.no_grad():  # autograd would ask CUDA itself
        x = torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16)
        w, b = torch.empty(48, 64, device="cuda"), torch.empty(48, device="cuda")
        y, codes, inv_scale = fp8._Fp8Linear.forward(x, w, b, scaling, True)
        assert codes is not None
        assert inv_scale is not None
        ctx = types.SimpleNamespace(
            scaling=scaling, dtypes=(x.dtype, w.dtype, b.dtype), needs_input_grad=[True] * 3
        )
        grads = fp8._gradients(ctx, torch.empty_like(y), w, Quantized(codes, inv_scale))
    assert (y.shape, y.dtype, y.device.type) == ((rows, 48), torch.bfloat16, "cuda")
    for grad, of in zip(grads, (x, w, b)):
        assert grad is not None
        assert (grad.shape, grad.dtype, grad.device) == (of.shape, of.dtype, of.device)
    assert [row["dtypes"] for row in made] == [(E4, E4), (E5, E4), (E5, E4)]
    if scaling == "rowwise":
        assert [row["scales"] for row in made] == [
            [(rows, 1), (1, 48)],
            [(rows, 1), (1, 64)],
            [(48, 1), (1, 64)],
        ]
        assert [row["out_dtype"] for row in made] == [torch.bfloat16] * 3
    else:
        assert [row["scales"] for row in made] == [[(), ()]] * 3
        assert [row["out_dtype"] for row in made] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_which_way_a_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZZO_FP8", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, c=capability: c)
        assert fp8.is_native(cuda) is expected
    assert not fp8.is_native(cpu)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not fp8.is_native(cuda)
    monkeypatch.setenv("MEZZO_FP8", "native")
    assert fp8.is_native(cpu)
    monkeypatch.setenv("MEZZO_FP8", "nativ")
    with pytest.raises(UnknownNameError, match=r"MEZZO_FP8='nativ'.*emulated, native. Did you mean 'native'"):
        fp8.is_native(cpu)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((64, 64), ""),
        ((16, 16), ""),
        ((64, 10), "10 outputs are not a multiple of 16"),
        ((8, 64), "8 inputs are not a multiple of 16"),
        ((0, 64), "0 inputs"),
    ],
)
def test_which_layers_can_multiply_in_fp8(sizes: tuple[int, int], why: str) -> None:
    found = fp8.misfit(*sizes)
    assert bool(found) is bool(why)
    assert why in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_s_own_products(form: str, rowwise: bool) -> None:
    if not fp8.is_native(torch.device("cuda")):
        pytest.skip("needs fp8 products: compute capability 8.9")
    a, b = (Quantized(f.codes.cuda(), f.inv_scale.cuda()) for f in factors(form, (4099, 1024, 512), rowwise))
    truth, terms = exact(form, a, b)
    for out in (torch.bfloat16, torch.float32):
        found = product(form, a, b, out_dtype=out, native=True)
        assert within(found, truth, terms, 2.0**-8 if rowwise or out is torch.bfloat16 else 2.0**-23)


def test_the_page_and_the_docstrings_are_true() -> None:
    page = Path(__file__).parent.parent / "docs" / "fp8.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert (failed, tried >= 2) == (0, True)
    assert doctest.testmod(fp8).failed == 0
