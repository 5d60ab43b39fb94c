"""Who multiplies fp8 factors: `torch._scaled_mm` with the layouts that hardware wants, and which layers it pays for."""

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
from mezzo.core.fp8 import Fp8Scaling
from mezzo.pytorch.kernels.fp8 import linear, native, payoff, quantize
from mezzo.pytorch.kernels.fp8.linear import fp8_linear
from mezzo.pytorch.kernels.fp8.native import Factor, product

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
H200 = payoff.Rates(bf16=0.8 * 989e12, fp8=0.8 * 1979e12, bandwidth=4.8e12)

# form -> (shape of a, shape of b) from M, K, N; which dimension of each is summed over.
FORMS: dict[str, Any] = {
    "NT": (lambda M, K, N: ((M, K), (N, K)), (1, 1)),
    "NN": (lambda M, K, N: ((M, N), (N, K)), (1, 0)),
    "TN": (lambda M, K, N: ((M, N), (M, K)), (0, 0)),
}


def factors(form: str, sizes: tuple[int, int, int], rowwise: bool) -> list[Factor]:
    torch.manual_seed(0)
    shapes, dims = FORMS[form]
    found = []
    for shape, dim, dtype in zip(shapes(*sizes), dims, (E4 if form == "NT" else E5, E4)):
        codes, scale = quantize(torch.randn(shape), dtype, 0, dim if rowwise else None)
        found.append(Factor(codes, scale.reciprocal()))
    return found


def exact(form: str, a: Factor, b: Factor) -> tuple[Tensor, Tensor]:
    left, right = (f.codes.double() * f.inv_scale.double() for f in (a, b))
    left, right = (left.t() if form == "TN" else left), (right.t() if form == "NT" else right)
    return left @ right, left.abs() @ right.abs()


def within(found: Tensor, truth: Tensor, terms: Tensor, eps: float) -> bool:
    return bool(((found.double() - truth).abs() <= eps * truth.abs() + 2.0**-20 * terms).all())


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(17, 64, 48), (16, 16, 16), (2, 32, 64), (33, 1024, 16)], ids=str)
def test_scaled_mm_and_emulation_agree(
    form: str, sizes: tuple[int, int, int], rowwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = factors(form, sizes, rowwise)
    truth, terms = exact(form, a, b)
    for gemm in ("bf16", ""):
        monkeypatch.setenv("MEZZO_ASSUME_NATIVE", gemm)
        for is_native in (False, True):
            for out in (torch.bfloat16, torch.float32):
                found = product(form, a, b, out_dtype=out, native=is_native)
                assert found.dtype is out
                low = out is torch.bfloat16 or (rowwise if is_native else gemm == "bf16")
                assert within(found, truth, terms, 2.0**-8 if low else 2.0**-23), (gemm, is_native, out)


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_a_bias_is_added_before_the_result_is_rounded(rowwise: bool) -> None:
    a, b = factors("NT", (17, 64, 48), rowwise)
    truth, terms = exact("NT", a, b)
    bias = -truth.mean(0).float() * 1000
    truth, terms = truth + bias.bfloat16().double(), terms + bias.abs().double()
    for is_native in (False, True):
        assert within(product("NT", a, b, bias, native=is_native), truth, terms, 2.0**-8)


def test_pytorch_s_own_casts_and_product_are_the_oracle() -> None:
    """Nothing of ours but `fp8_linear`: scales in Python, torch's casts of clamped values, `torch._scaled_mm`."""
    torch.manual_seed(0)
    x, w, g = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48).bfloat16()

    def quantized(t: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
        scale = torch.tensor(1.0)
        while float(t.abs().max() * scale * 2) <= largest:
            scale = scale * 2
        return (t.float() * scale).clamp(-largest, largest).to(dtype), 1 / scale

    (xq, xs), (wq, ws), (gq, gs) = quantized(x, E4, 448.0), quantized(w, E4, 448.0), quantized(g, E5, 57344.0)
    mm = torch._scaled_mm
    expected = [
        mm(xq, wq.t(), xs, ws, out_dtype=torch.bfloat16),
        mm(gq, wq.t().contiguous().t(), gs, ws, out_dtype=torch.bfloat16),
        mm(gq.t().contiguous(), xq.t().contiguous().t(), gs, xs, out_dtype=torch.bfloat16),
    ]
    x.requires_grad_()
    w.requires_grad_()
    y = fp8_linear(x, w, scaling=Fp8Scaling())
    for found, oracle in zip((y, *torch.autograd.grad(y, (x, w), g)), expected):
        assert torch.allclose(found.float(), oracle.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("scaling", [Fp8Scaling(), Fp8Scaling("rowwise")], ids=str)
@pytest.mark.parametrize("batch", [(32,), (3, 7), ()], ids=str)
def test_on_a_gpu_every_product_has_the_layout_that_it_needs(
    batch: tuple[int, ...], scaling: Fp8Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one: PyTorch's meta kernel checks shapes, strides and dtypes as its CUDA kernel does."""
    monkeypatch.setenv("MEZZO_FP8", "native")
    scaling = Fp8Scaling(scaling.granularity, pays_from=0)
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
    past, rows = linear._Past(None, scaling), max(1, torch.Size(batch).numel())
    with FakeTensorMode(), torch.no_grad():  # autograd would ask CUDA itself
        x = torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16)
        w, b = torch.empty(48, 64, device="cuda"), torch.empty(48, device="cuda")
        y, kept = linear._forward(x, w, b, scaling, past, True)
        grads = linear._backward(torch.empty_like(y), w, kept, scaling, past, w.dtype)
    assert (y.shape, y.dtype, y.device.type) == ((rows, 48), torch.bfloat16, "cuda")
    for grad, of in zip(grads, (x, w)):
        assert grad is not None
        assert (grad.shape, grad.dtype, grad.device) == (of.shape, of.dtype, of.device)
    assert [row["dtypes"] for row in made] == [(E4, E4), (E5, E4), (E5, E4)]
    if scaling.granularity == "rowwise":
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
    native._is_native.cache_clear()
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
        native._is_native.cache_clear()
        assert native.is_native(cuda) is expected
    assert not native.is_native(cpu)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    native._is_native.cache_clear()
    assert not native.is_native(cuda)
    monkeypatch.setenv("MEZZO_FP8", "native")
    assert native.is_native(cpu)
    monkeypatch.setenv("MEZZO_FP8", "nativ")
    with pytest.raises(UnknownNameError, match=r"MEZZO_FP8='nativ'.*emulated, native. Did you mean 'native'"):
        native.is_native(cpu)
    monkeypatch.undo()
    native._is_native.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "device", "scaling", "expected", "why"),
    [
        ((64, 64), "cpu", Fp8Scaling(), True, "fp8, emulated: cpu has no fp8 products"),
        ((16, 16), "cpu", Fp8Scaling("rowwise"), True, "fp8, emulated"),
        ((64, 10), "cpu", Fp8Scaling(), False, "bf16: 10 outputs are no multiple of 16"),
        ((8, 64), "cuda", Fp8Scaling(), False, "bf16: 8 inputs are no multiple of 16"),
        ((0, 64), "cpu", Fp8Scaling(), False, "bf16: 0 inputs"),
        ((64, 64), "cpu", Fp8Scaling(pays_from=32), True, "fp8, emulated"),
        (
            (64, 64),
            "cpu",
            Fp8Scaling(pays_from=33),
            False,
            "is below 33, from which fp8 pays by scaling=tensorwise",
        ),
    ],
)
def test_which_layers_pay(
    sizes: tuple[int, int], device: str, scaling: Fp8Scaling, expected: bool, why: str
) -> None:
    assert payoff.pays(*sizes, device, scaling) is expected
    assert why in payoff.reason(*sizes, device, scaling)


class _Properties(types.SimpleNamespace):
    """What CUDA tells of an H200: kHz, bits."""

    def __init__(self, **changed: int) -> None:
        told = {"major": 9, "minor": 0, "multi_processor_count": 132, "clock_rate": 1_980_000}
        told |= {"memory_clock_rate": 3_201_000, "memory_bus_width": 6144}
        super().__init__(**(told | changed))


def test_a_gpu_s_threshold_follows_from_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payoff, "is_native", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = []
    for properties in (_Properties(), _Properties(major=99), _Properties(memory_clock_rate=0), object()):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        payoff.device_break_even.cache_clear()
        found.append(payoff.pays_from("cuda", Fp8Scaling()))
        assert payoff.pays_from("cuda", Fp8Scaling("rowwise")) == pytest.approx(found[-1] * 10 / 7)
    assert 300 < found[0] < 450
    assert found[0] != payoff.UNKNOWN_GPU
    assert found[1:] == [payoff.UNKNOWN_GPU] * 3
    assert round(payoff.break_even(H200)) == payoff.UNKNOWN_GPU
    assert payoff.pays(4096, 4096, "cuda", Fp8Scaling())
    assert not payoff.pays(384, 1536, "cuda", Fp8Scaling())
    assert payoff.pays(384, 1536, "cuda", Fp8Scaling(pays_from=300))
    assert payoff.reason(4096, 4096, "cuda", Fp8Scaling()).startswith(
        "fp8: K N / (K + N) = 2048 of this layer"
    )
    assert "from which fp8 pays on this device" in payoff.reason(384, 1536, "cuda", Fp8Scaling())
    payoff.device_break_even.cache_clear()


def test_at_the_threshold_gain_and_cost_are_equal() -> None:
    """By the times themselves, of any M."""
    for granularity, traffic in payoff.TRAFFIC.items():
        least = payoff.break_even(H200, granularity)
        for ratio in (1.0, 4.0):
            K = least * (1 + ratio) / ratio
            N, M = ratio * K, 8192.0
            assert payoff.size(1, 1) == 0.5
            gained = 6 * M * K * N * (1 / H200.bf16 - 1 / H200.fp8)
            assert gained == pytest.approx(M * (K + N) * traffic / H200.bandwidth)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_s_own_products(form: str, rowwise: bool) -> None:
    if not native.is_native(torch.device("cuda")):
        pytest.skip("needs fp8 products: compute capability 8.9")
    a, b = (Factor(f.codes.cuda(), f.inv_scale.cuda()) for f in factors(form, (4099, 1024, 512), rowwise))
    truth, terms = exact(form, a, b)
    for out in (torch.bfloat16, torch.float32):
        found = product(form, a, b, out_dtype=out, native=True)
        assert within(found, truth, terms, 2.0**-8 if rowwise or out is torch.bfloat16 else 2.0**-23)


def test_the_page_and_the_docstrings_are_true() -> None:
    page = Path(__file__).parent.parent / "docs" / "fp8.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert (failed, tried >= 10) == (0, True)
    assert doctest.testmod(payoff).failed == 0
