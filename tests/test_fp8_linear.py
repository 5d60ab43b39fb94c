"""A linear layer with 8-bit factors against the FP64 products of the very values that its codes stand for."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alive import bytes_alive
from eight_bits import fp8_linear, quantize
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import quantized_linear as fp8
from releases import before_torch

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
TENSORWISE, ROWWISE = "tensorwise", "rowwise"
SCALINGS = [TENSORWISE, ROWWISE]
WAYS = {
    "bf16 products": {"MEZZO_ASSUME_NATIVE": "bf16", "MEZZO_FP8": "emulated"},
    "fp32 products": {"MEZZO_ASSUME_NATIVE": "", "MEZZO_FP8": "emulated"},
    "_scaled_mm": {"MEZZO_ASSUME_NATIVE": "bf16", "MEZZO_FP8": "native"},
}
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not fp8.is_native(torch.device("cuda")), reason="needs a CUDA device with fp8"),
]
both = pytest.mark.parametrize("scaling", SCALINGS, ids=str)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "_scaled_mm":
        before_torch(2, 12, "a CPU's _scaled_mm has scales of whole tensors only")
    for name, value in WAYS[request.param].items():
        monkeypatch.setenv(name, value)
    return str(request.param)


def values(x: Tensor, dtype: torch.dtype, scaling: str, dim: int) -> Tensor:
    """What the codes of x stand for, in FP64; `dim` is summed over."""
    found = quantize(x.float(), dtype, scaling, dim)
    return found.codes.double() * found.inv_scale.double()


class Exact:
    """The three products and the bias gradient in FP64, and for each the sum of its terms' magnitudes."""

    def __init__(self, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor, scaling: str) -> None:
        x, w, g = x.detach().reshape(-1, x.shape[-1]), w.detach(), g.reshape(-1, g.shape[-1])
        factors = {
            "y": (values(x, E4, scaling, 1), values(w, E4, scaling, 1).T),
            "dx": (values(g, E5, scaling, 1), values(w, E4, scaling, 0)),
            "dw": (values(g, E5, scaling, 0).T, values(x, E4, scaling, 0)),
        }
        self.of = {name: left @ right for name, (left, right) in factors.items()}
        self.terms = {name: left.abs() @ right.abs() for name, (left, right) in factors.items()}
        self.of["db"], self.terms["db"] = g.double().sum(0), g.double().abs().sum(0)
        if b is not None:
            low = b.detach().to(torch.bfloat16).double()
            self.of["y"], self.terms["y"] = self.of["y"] + low, self.terms["y"] + low.abs()

    def holds(self, name: str, found: Tensor) -> bool:
        """Summed in FP32 and rounded once: to bf16, or `found`'s format if that is coarser; db to that only."""
        exact, terms = self.of[name], self.terms[name]
        eps = max(2.0**-24 if name == "db" else 2.0**-8, torch.finfo(found.dtype).eps / 2)
        tiny = max(2.0**-126, torch.finfo(found.dtype).tiny)  # what CPUs flush in bf16 products
        bound = eps * exact.abs() + (terms.numel() and 1024 * 2.0**-24) * terms + tiny
        error = (found.detach().double().reshape(exact.shape) - exact).abs()
        return bool((error <= bound).all())


def given(
    batch: tuple[int, ...], K: int, N: int, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(K + N + len(batch))
    x = torch.randn(*batch, K).to(dtype).requires_grad_()
    w = (torch.randn(N, K) / K**0.5).to(dtype).requires_grad_()
    b = torch.randn(N).to(dtype).requires_grad_() if bias else None
    return x, w, b, torch.randn(*batch, N).bfloat16()


def run(x: Tensor, w: Tensor, b: Tensor | None, g: Tensor, scaling: str) -> dict[str, Tensor]:
    y = fp8_linear(x, w, b, scaling=scaling)
    assert y.dtype is torch.bfloat16
    assert y.shape == (*x.shape[:-1], len(w))
    inputs = {"dx": x, "dw": w} | ({} if b is None else {"db": b})
    grads = torch.autograd.grad(y, list(inputs.values()), g)
    for grad, of in zip(grads, inputs.values()):
        assert (grad.dtype, grad.shape) == (of.dtype, of.shape)
    return {"y": y, **dict(zip(inputs, grads))}


# Leading dimensions, K, N, format, and what multiplies the input and divides the weight.
SHAPES = [
    ((), 64, 48, torch.float32, 1.0),
    ((1,), 16, 16, torch.float32, 1e30),
    ((17,), 64, 48, torch.bfloat16, 1e-30),
    ((16,), 1024, 16, torch.float32, 1.0),
    ((2, 1, 7), 16, 96, torch.float16, 1.0),
]


@both
def test_products_are_those_of_the_8_bit_values(scaling: str, way: str) -> None:
    for (batch, K, N, dtype, power), bias in itertools.product(SHAPES, (True, False)):
        x, w, b, g = given(batch, K, N, bias, dtype)
        x, w = ((t.detach() * factor).requires_grad_() for t, factor in ((x, power), (w, 1 / power)))
        exact = Exact(x, w, b, g, scaling)
        for name, found in run(x, w, b, g, scaling).items():
            assert exact.holds(name, found), (name, bias)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fp8_linear(torch.ones(2, 16), torch.ones(16, 32), scaling=scaling)


@both
def test_what_needs_no_gradient_costs_none(scaling: str) -> None:
    x, w, b, _ = given((17,), 64, 48)
    for for_x, for_w in itertools.product((True, False), repeat=2):
        y = fp8_linear(x.detach().requires_grad_(for_x), w.detach().requires_grad_(for_w), b, scaling=scaling)
        weight, codes, *_ = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
        assert (weight is not None, codes is not None) == (for_x, for_w)


def test_an_fp32_weight_s_gradient_is_fp32_where_the_product_gives_it(way: str) -> None:
    for scaling, expected in ((TENSORWISE, way != "bf16 products"), (ROWWISE, way == "fp32 products")):
        found = run(*given((32,), 64, 48), scaling)["dw"]
        assert (not torch.equal(found, found.bfloat16().float())) is expected


@pytest.mark.parametrize(("batch", "K", "N"), [((17,), 60, 48), ((2, 0), 64, 10), ((), 8, 8)])
def test_other_sizes_are_bf16_s_own(batch: tuple[int, ...], K: int, N: int, way: str) -> None:
    found = run(*given(batch, K, N), TENSORWISE)
    *leaves, g = given(batch, K, N)
    y = F.linear(*(leaf.bfloat16() for leaf in leaves))
    expected = {"y": y, **dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, leaves, g)))}
    for name, value in expected.items():
        if way == "fp32 products":  # sums in another order
            assert torch.allclose(found[name].float(), value.float(), rtol=2**-7, atol=1e-2)
        else:
            assert torch.equal(found[name], value)


# What is spoilt, and where; the parts of the results that show it, and some that do not.
SPOILT: list[tuple[str, tuple[int, int], dict[str, Any], dict[str, Any]]] = [
    ("x", (3, 5), {"y": np.s_[3], "dw": np.s_[:, 5]}, {"y": np.s_[4:], "dw": np.s_[:, 6:], "dx": np.s_[:]}),
    ("w", (4, 6), {"y": np.s_[:, 4], "dx": np.s_[:, 6]}, {"y": np.s_[:, 5:], "dx": np.s_[:, 7:]}),
    ("g", (2, 1), {"dx": np.s_[2], "dw": np.s_[1], "db": np.s_[1]}, {"dx": np.s_[3:], "dw": np.s_[2:]}),
]


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("place", "at", "shown", "clean"), SPOILT)
def test_nan_and_infinities_stay_visible(
    place: str, at: tuple[int, int], shown: Any, clean: Any, bad: float, scaling: str, way: str
) -> None:
    """In their row or column, and no scale follows them."""
    x, w, b, g = given((20,), 64, 48)
    with torch.no_grad():
        {"x": x, "w": w, "g": g}[place][at] = bad
    found = run(x, w, b, g, scaling)
    for name, part in shown.items():
        got = found[name][part]
        assert not got.isfinite().any()
        assert place == "g" or got.isnan().all()  # e5m2 has infinities
    for name, part in clean.items():
        assert found[name][part].isfinite().all()
        assert found[name][part].any()


def test_one_byte_an_element_is_held() -> None:
    w = torch.randn(256, 256, requires_grad=True)
    h = torch.randn(4096, 256).bfloat16().requires_grad_()
    fp8_linear(h, w, scaling=ROWWISE).sum().backward()  # what kernels keep for ever
    before = bytes_alive()
    y = fp8_linear(h, w, scaling=ROWWISE)
    held, scales = bytes_alive() - before - y.nbytes, 4 * 256 + 4 * 256
    assert h.numel() <= held <= h.numel() + scales + 64


@both
def test_a_second_derivative_is_refused_and_a_first_one_of_a_graph_is_not(scaling: str) -> None:
    x, w, b, g = given((17,), 64, 48)
    expected = run(x, w, b, g, scaling)
    grads = torch.autograd.grad(fp8_linear(x, w, b, scaling=scaling), (x, w), g, create_graph=True)
    assert torch.equal(grads[0], expected["dx"])
    assert torch.equal(grads[1], expected["dw"])
    for grad in grads:
        with pytest.raises(UsageError, match=r"second derivatives.*module\.NAME=bf16"):
            grad.float().sum().backward(retain_graph=True)

    def loss(x: Tensor) -> Tensor:
        return (fp8_linear(x, w, b, scaling=scaling).float() ** 2).sum()

    with pytest.raises(UsageError, match="second derivatives"):
        torch.func.jacrev(torch.func.grad(loss))(x.detach())


@pytest.mark.heavy
@pytest.mark.compiler
# Both are PyTorch's own: of Inductor, and of Dynamo where it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_by_inductor() -> None:
    """An ulp of bf16, of the tensor's largest value for what cancels: sums have another order.

    The loss is linear, since Inductor need not round a gradient to bf16 between two of its own operations, and an 8-bit
    cast would show whether it did.
    """
    torch._dynamo.reset()
    x, w, b, g = given((32,), 64, 48)

    def weighed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (fp8_linear(x, w, b).float() * g.float()).sum()

    compiled: Callable[..., Tensor] = torch.compile(weighed, fullgraph=True)
    grads = (torch.autograd.grad(call(x, w, b), (x, w, b)) for call in (compiled, weighed))
    for found, expected in zip(*grads):
        assert torch.allclose(found, expected, rtol=2**-7, atol=2**-11 * float(expected.abs().max()))


@pytest.mark.parametrize("scaling", [pytest.param(scaling, marks=GPU) for scaling in SCALINGS])
def test_products_on_a_gpu(scaling: str) -> None:
    x, w, b, g = given((4099,), 1024, 512)
    exact = Exact(x, w, b, g, scaling)
    there = [t.detach().cuda().requires_grad_() for t in (x, w, b)]  # type: ignore[union-attr]
    for name, found in run(*there, g.cuda(), scaling).items():
        assert exact.holds(name, found.cpu()), name
