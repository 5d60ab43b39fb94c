"""A linear layer with 8-bit factors against the FP64 products of the very values that its codes stand for."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alive import bytes_alive
from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import fp8
from mezzo.pytorch.kernels.fp8 import fp8_linear, quantize

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
TENSORWISE, ROWWISE = "tensorwise", "rowwise"
SCALINGS = [TENSORWISE, ROWWISE]
WAYS = {
    "bf16 products": {"MEZZO_ASSUME_NATIVE": "bf16", "MEZZO_FP8": "emulated"},
    "fp32 products": {"MEZZO_ASSUME_NATIVE": "", "MEZZO_FP8": "emulated"},
    "_scaled_mm": {"MEZZO_ASSUME_NATIVE": "bf16", "MEZZO_FP8": "native"},
}
both = pytest.mark.parametrize("scaling", SCALINGS, ids=str)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
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
        assert grad.dtype is of.dtype
        assert grad.shape == of.shape
    return {"y": y, **dict(zip(inputs, grads))}


SHAPES = [
    ((), 64, 48),
    ((1,), 16, 16),
    ((17,), 64, 48),
    ((3, 5), 80, 32),
    ((16,), 1024, 16),
    ((2, 1, 7), 16, 96),
]


@both
def test_products_are_those_of_the_8_bit_values(scaling: str, way: str) -> None:
    for (batch, K, N), bias in itertools.product(SHAPES, (True, False)):
        x, w, b, g = given(batch, K, N, bias)
        exact = Exact(x, w, b, g, scaling)
        for name, found in run(x, w, b, g, scaling).items():
            assert exact.holds(name, found), (name, bias)


def test_an_fp32_weight_s_gradient_is_fp32_where_the_product_gives_it(way: str) -> None:
    for scaling, expected in ((TENSORWISE, way != "bf16 products"), (ROWWISE, way == "fp32 products")):
        found = run(*given((32,), 64, 48), scaling)["dw"]
        assert (not torch.equal(found, found.bfloat16().float())) is expected


@both
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=lambda d: str(d)[6:]
)
def test_formats_of_inputs(dtype: torch.dtype, scaling: str, way: str) -> None:
    x, w, b, g = given((17,), 64, 48, dtype=dtype)
    exact = Exact(x, w, b, g, scaling)
    for name, found in run(x, w, b, g, scaling).items():
        assert exact.holds(name, found), name
    with pytest.raises(UsageError, match=r"weight is torch\.int64.*float32, bfloat16"):
        fp8_linear(x, w.detach().long(), b, scaling=scaling)


@pytest.mark.parametrize(("batch", "K", "N"), [((17,), 60, 48), ((2, 0), 64, 10), ((), 8, 8)])
def test_other_sizes_are_bf16_s_own(batch: tuple[int, ...], K: int, N: int, way: str) -> None:
    found = run(*given(batch, K, N), TENSORWISE)
    x, w, b, g = given(batch, K, N)
    assert b is not None
    y = F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
    expected = {"y": y, **dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, (x, w, b), g)))}
    if way == "fp32 products":  # sums in another order
        assert all(
            torch.allclose(found[n].float(), expected[n].float(), rtol=2**-7, atol=1e-2) for n in found
        )
    else:
        assert all(torch.equal(found[n], expected[n]) for n in found)


@both
def test_an_empty_input_and_shapes_that_do_not_fit(scaling: str) -> None:
    found = run(*given((0,), 64, 48), scaling)
    assert not found["dw"].any()
    assert not found["db"].any()
    x, w, b, _ = given((17,), 64, 48)
    assert b is not None
    assert not torch.equal(
        fp8_linear(x, w, b, scaling=scaling), F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fp8_linear(x, w[:, :48], b, scaling=scaling)


@both
def test_nan_and_infinities_stay_visible(scaling: str, way: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x, w, b, g = given((20,), 64, 48)
        assert b is not None
        with torch.no_grad():
            x[3, 5] = bad
        found = run(x, w, b, g, scaling)
        assert found["y"][3].isnan().all()
        assert found["dw"][:, 5].isnan().all()
        for name, cut in (("y", found["y"]), ("dw", found["dw"].T)):
            rest = torch.cat((cut[:3], cut[6:]))
            assert rest.isfinite().all(), name
            assert rest.any(), f"{name}: a scale that {bad} decided"
        assert found["dx"].isfinite().all()

        x, w, b, g = given((20,), 64, 48)
        assert b is not None
        with torch.no_grad():
            w[4, 6] = bad
        found = run(x, w, b, g, scaling)
        assert found["y"][:, 4].isnan().all()
        assert found["dx"][:, 6].isnan().all()
        assert found["y"][:, 5:].isfinite().all()
        assert found["dx"][:, 7:].isfinite().all()

        x, w, b, g = given((20,), 64, 48)
        g[2, 1] = bad
        found = run(x, w, b, g, scaling)
        assert not found["dx"][2].isfinite().any()
        assert not found["dw"][1].isfinite().any()
        assert not found["db"][1].isfinite()
        assert found["dx"][3:].isfinite().all()
        assert found["dx"][3:].any()
        assert found["dw"][2:].isfinite().all()


@pytest.mark.parametrize("name", ["y", "dx", "dw"])
def test_an_outlier_costs_its_own_row_and_column_only(name: str, way: str) -> None:
    """Of what a product keeps, each row and column has its own scale: one for all of them loses all but the largest."""
    x, w, _, g = given((16,), 64, 48, bias=False)
    with torch.no_grad():
        if name == "y":
            x[3], w[5] = x[3] * 2.0**24, w[5] * 2.0**24
        elif name == "dx":
            g[3], w[:, 5] = g[3] * 2.0**40, w[:, 5] * 2.0**24
        else:
            g[:, 3], x[:, 5] = g[:, 3] * 2.0**40, x[:, 5] * 2.0**24
    truth = {"y": (x @ w.T), "dx": (g.float() @ w), "dw": (g.float().T @ x)}[name].detach()
    error = {}
    for scaling in SCALINGS:
        found = run(x, w, None, g, scaling)[name].detach().float()
        rest, exact = [t[[i for i in range(len(t)) if i != 3]] for t in (found, truth)]
        rest, exact = (t[:, [i for i in range(t.shape[1]) if i != 5]] for t in (rest, exact))
        error[scaling] = float((rest - exact).norm() / exact.norm())
    assert error[ROWWISE] < 0.1
    assert error[TENSORWISE] == 1.0, "nothing is left"


@both
@pytest.mark.parametrize(
    "powers",
    [(1e30, 1.0, 1.0), (1e30, 1e-30, 1e30), (1e-30, 1e-30, 1e-30)],
    ids=str,
)
def test_magnitudes(powers: tuple[float, ...], scaling: str, way: str) -> None:
    x, w, _, g = given((17,), 64, 48, bias=False)
    x, w = ((t.detach() * power).requires_grad_() for t, power in zip((x, w), powers))
    g = (g.float() * powers[2]).bfloat16()
    exact = Exact(x, w, None, g, scaling)
    largest = torch.finfo(torch.bfloat16).max
    for name, found in run(x, w, None, g, scaling).items():
        beyond = exact.of[name].abs() > largest
        if beyond.any():  # 1e30 by 1e30
            # On a CPU with AMX infinities of both signs meet in the sum and give NaN; elsewhere it is infinite.
            assert not found[beyond].isfinite().any()
            assert powers[0] * powers[2] > largest
            continue
        assert exact.holds(name, found), name
        if powers[0] != powers[1] or name != "y":
            assert found.any() or powers.count(1e-30) > 1, name


def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms of the products that are made from now on."""
    made: list[str] = []
    real = fp8.product

    def counted(form: str, *args: Any, **kwargs: Any) -> Tensor:
        made.append(form)
        return real(form, *args, **kwargs)

    monkeypatch.setattr(fp8, "product", counted)
    return made


@both
def test_what_needs_no_gradient_costs_none(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = products(monkeypatch)
    x, w, b, g = given((17,), 64, 48)
    rows = [
        ((True, True), ["NT", "NN", "TN"], (True, True)),
        ((False, True), ["NT", "TN"], (False, True)),
        ((True, False), ["NT", "NN"], (True, False)),
        ((False, False), ["NT"], (False, False)),  # only the bias
    ]
    for (for_x, for_w), expected, (weight_held, codes_held) in rows:
        made.clear()
        left, right = x.detach().requires_grad_(for_x), w.detach().requires_grad_(for_w)
        y = fp8_linear(left, right, b, scaling=scaling)
        assert y.grad_fn is not None
        held = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
        assert (held[0] is not None, held[1] is not None) == (weight_held, codes_held)
        y.backward(g)
        assert made == expected
        assert (left.grad is not None, right.grad is not None) == (for_x, for_w)
    made.clear()
    with torch.no_grad():
        assert not fp8_linear(x, w, b, scaling=scaling).requires_grad
    assert made == ["NT"]


def test_one_byte_an_element_is_held() -> None:
    K, N, scaling = 256, 256, ROWWISE
    w = torch.randn(N, K, requires_grad=True)
    h = torch.randn(4096, K).bfloat16().requires_grad_()
    fp8_linear(h, w, scaling=scaling).sum().backward()  # what kernels keep for ever
    before = bytes_alive()
    y = fp8_linear(h, w, scaling=scaling)
    held = bytes_alive() - before - y.numel() * y.element_size()
    scales = 4 * K + 4 * N
    assert 4096 * K <= held <= 4096 * K + scales + 64
    assert held <= 0.6 * 4 * 4096 * K
    y.sum().backward()


@both
def test_a_weight_that_changes_before_backward_is_refused(scaling: str) -> None:
    x, w, b, g = given((17,), 64, 48)
    y = fp8_linear(x, w, b, scaling=scaling)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)
    x, w, b, g = given((17,), 64, 48)
    expected = run(x, w, b, g, scaling)
    y = fp8_linear(x, w, b, scaling=scaling)
    with torch.no_grad():
        x.zero_()  # its codes are held, not itself
    (dw,) = torch.autograd.grad(y, w, g)
    assert torch.equal(dw, expected["dw"])


@both
def test_a_second_derivative_is_refused_and_a_first_one_of_a_graph_is_not(scaling: str) -> None:
    x, w, b, g = given((17,), 64, 48)
    expected = run(x, w, b, g, scaling)
    y = fp8_linear(x, w, b, scaling=scaling)
    grads = torch.autograd.grad(y, (x, w), g, create_graph=True)
    assert torch.equal(grads[0], expected["dx"])
    assert torch.equal(grads[1], expected["dw"])
    for grad in grads:
        with pytest.raises(UsageError, match=r"gradient of its gradient.*module\.NAME=bf16"):
            grad.float().sum().backward(retain_graph=True)
    with pytest.raises(UsageError, match="is_grads_batched"):
        torch.autograd.grad(y, x, torch.stack((g, g)), is_grads_batched=True)


def loss(x: Tensor, w: Tensor, b: Tensor, scaling: str) -> Tensor:
    return (fp8_linear(x, w, b, scaling=scaling).float() ** 2).sum()


def gradients(call: Callable[..., Tensor], scaling: str) -> list[Tensor]:
    x, w, b, _ = given((32,), 64, 48)
    assert b is not None
    return list(torch.autograd.grad(call(x, w, b, scaling), (x, w, b)))


def close(found: Tensor, expected: Tensor) -> bool:
    """Sums in another order: an ulp of bf16, of the tensor's largest value for what cancels."""
    return torch.allclose(found, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()) / 16)


@both
def test_function_transforms(scaling: str) -> None:
    x, w, b, _ = (None if t is None else t.detach() for t in given((32,), 64, 48))
    assert x is not None
    assert w is not None
    assert b is not None
    found = torch.func.grad(loss, argnums=(0, 1, 2))(x, w, b, scaling)
    assert all(close(f, e) for f, e in zip(found, gradients(loss, scaling)))
    parts = x.view(4, 8, 64)
    y = torch.func.vmap(lambda part: fp8_linear(part, w, b, scaling=scaling))(parts)
    each = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None, None, None))(
        parts, w, b, scaling
    )
    for i, part in enumerate(parts):
        assert close(y[i].float(), fp8_linear(part, w, b, scaling=scaling).float())
        own = w.clone().requires_grad_()
        assert close(each[i], torch.autograd.grad(loss(part, own, b, scaling), own)[0])
    with pytest.raises(UsageError, match="gradient of its gradient"):
        torch.func.jacrev(torch.func.grad(loss))(x[:2], w, b, scaling)


@pytest.mark.heavy
@pytest.mark.compiler
@pytest.mark.parametrize(("backend", "scaling"), [("aot_eager", ROWWISE), ("inductor", TENSORWISE)])
# Both are PyTorch's own: of Inductor, and of Dynamo where it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole(backend: str, scaling: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()
    *_, g = given((32,), 64, 48)

    def weighed(x: Tensor, w: Tensor, b: Tensor, scaling: str) -> Tensor:
        # Linear, since Inductor need not round a gradient to bf16 between two of its own operations, and an 8-bit cast
        # would show whether it did.
        return (fp8_linear(x, w, b, scaling=scaling).float() * g.float()).sum()

    compiled: Callable[..., Tensor] = torch.compile(weighed, backend=backend, fullgraph=True)
    for found, expected in zip(gradients(compiled, scaling), gradients(weighed, scaling)):
        assert close(found, expected)
