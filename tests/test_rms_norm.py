"""rms_norm with 16 bits in and out: what differs from layer_norm, whose loops it shares (`test_layer_norm.py`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.rms_norm import rms_norm
from test_layer_norm import (
    BF16,
    FP16,
    FP32,
    HALVES,
    IMPLEMENTATIONS,
    SHAPES,
    copies,
    error,
    gradients,
    kinds_of,
    normal,
    parameters,
    ulp,
)


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba" and not backend.is_installed("numba"):
        pytest.skip("numba is not installed")
    monkeypatch.setenv(backend.KERNELS, request.param)
    return str(request.param)


@HALVES
@pytest.mark.parametrize("kind", ["fp32", "own", None])
@pytest.mark.parametrize(("leading", "shape"), SHAPES)
def test_forward_is_fp32s_within_an_ulp_and_backward_is_rounded_once(
    leading: tuple[int, ...], shape: tuple[int, ...], kind: str | None, dtype: torch.dtype
) -> None:
    x = (normal(*leading, *shape) * 3 + 1).to(dtype).requires_grad_()
    weight, _ = parameters(shape, kinds_of((kind, None), dtype))
    dy = normal(*leading, *shape, seed=4).to(dtype)
    out = rms_norm(x, shape, weight)
    assert out.dtype is dtype
    assert out.shape == x.shape
    expected = torch.rms_norm(x.float(), shape, None if weight is None else weight.float()).to(dtype)
    assert ((out.double() - expected.double()).abs() <= ulp(expected.detach(), dtype)).all()

    inputs = [x, weight]
    got = gradients(lambda x, w: rms_norm(x, shape, w), inputs, dy)
    truths = gradients(lambda x, w: torch.rms_norm(x, shape, w, 2.0**-23), copies(inputs), dy.double())
    w = torch.ones(()) if weight is None else weight.detach().abs().float()
    rstd = (x.detach().double().flatten(-len(shape)).square().mean(-1) + 2**-23).rsqrt()
    mosts = (dy.abs().max() * w.max() * rstd.max(), dy.abs().float().sum())
    for grad, truth, own, most in zip(got, truths, (p for p in inputs if p is not None), mosts):
        assert grad.dtype is own.dtype
        assert grad.shape == own.shape
        half = 0.5 * ulp(truth, grad.dtype) if grad.dtype is not FP32 else 0.0
        assert ((grad.double() - truth).abs() <= half * (1 + 2**-8) + 2**-19 * float(most)).all()


@HALVES
@pytest.mark.parametrize("own", [False, True])
def test_the_weights_gradient_over_many_rows_is_summed_in_fp32(dtype: torch.dtype, own: bool) -> None:
    rows = 65_536
    x = normal(rows, 16).to(dtype).requires_grad_()
    weight, _ = parameters((16,), (dtype if own else FP32, None))
    dy = (normal(rows, 16, seed=3) * 0.5 + 0.3).to(dtype)
    _, grad = gradients(lambda x, w: rms_norm(x, (16,), w), [x, weight], dy)
    exact = copies([x, weight])
    _, truth = gradients(lambda x, w: torch.rms_norm(x, (16,), w, 2.0**-23), exact, dy.double())
    assert error(grad, truth) <= (1.05 * error(truth.to(dtype), truth) if own else 1e-5)


@HALVES
def test_no_gradient_is_worse_than_the_naive_16_bit_paths(dtype: torch.dtype) -> None:
    inputs = [normal(4096, 48).to(dtype).requires_grad_(), parameters((48,), (dtype, None))[0]]
    dy = normal(4096, 48, seed=3).to(dtype)
    exact = copies(inputs)
    truths = gradients(lambda x, w: torch.rms_norm(x, (48,), w, 2.0**-23), exact, dy.double())
    naive = gradients(lambda x, w: torch.rms_norm(x, (48,), w), inputs, dy)
    ours = gradients(lambda x, w: rms_norm(x, (48,), w), inputs, dy)
    for mine, its, truth in zip(ours, naive, truths):
        assert error(mine, truth) <= error(its, truth) * 1.001 + 1e-6


@HALVES
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, implementation: str) -> None:
    if implementation == "reference":
        pytest.skip("PyTorch's own operations share out their sums themselves")
    before = torch.get_num_threads()
    inputs = [normal(700, 100).to(dtype).requires_grad_(), parameters((100,), (FP32, None))[0]]
    dy = normal(700, 100, seed=3).to(dtype)
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = rms_norm(inputs[0], (100,), inputs[1])
            found.append([out, *torch.autograd.grad(out, inputs, dy)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_epsilon_is_fp32s_unless_it_is_given() -> None:
    x = torch.full((1, 8), 2.0**-11, dtype=BF16)
    assert rms_norm(x, (8,)).tolist() == torch.rms_norm(x.float(), (8,)).bfloat16().tolist()
    assert rms_norm(x, (8,), None, 0.0).tolist() == [[1.0] * 8]
    assert rms_norm(x, (8,), None, 3 * 2.0**-22).tolist() == [[0.5] * 8]


def test_saved_for_backward_are_the_16_bit_input_itself_and_one_number_a_row() -> None:
    x, (weight, _) = normal(32, 64).bfloat16().requires_grad_(), parameters((64,), (FP32, None))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rms_norm(x, (64,), weight)
    assert weight is not None
    others = [t for t in saved if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert len(others) == len(saved) - 2
    assert sum(t.numel() * t.element_size() for t in others) == 32 * 4


@pytest.mark.parametrize("wanted", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[int, int]) -> None:
    tensors = [normal(6, 40).bfloat16(), normal(40, seed=1)]
    dy = normal(6, 40, seed=3).bfloat16()
    everything = [t.clone().requires_grad_() for t in tensors]
    rms_norm(everything[0], (40,), everything[1]).backward(dy)
    some = [t.clone().requires_grad_(bool(want)) for t, want in zip(tensors, wanted)]
    out = rms_norm(some[0], (40,), some[1])
    assert out.requires_grad is any(wanted)
    if any(wanted):
        out.backward(dy)
    for tensor, full, want in zip(some, everything, wanted):
        assert (tensor.grad is not None) is bool(want)
        assert tensor.grad is None or torch.equal(tensor.grad, full.grad)


def test_strides_and_no_rows() -> None:
    x, weight = normal(6, 80).bfloat16()[:, ::2], normal(40, 2)[:, 0]
    assert torch.equal(rms_norm(x, (40,), weight), rms_norm(x.contiguous(), (40,), weight.contiguous()))
    empty = torch.zeros(0, 8, dtype=BF16, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    dx, dweight = torch.autograd.grad(rms_norm(empty, (8,), weight).sum(), (empty, weight))
    assert dx.shape == (0, 8)
    assert dweight.tolist() == [0.0] * 8


@HALVES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_as_fp32_has_it_and_the_others_stay(
    dtype: torch.dtype, bad: float
) -> None:
    x = normal(5, 100).to(dtype)
    clean = rms_norm(x, (100,))
    x[2, 70] = bad
    got = rms_norm(x, (100,))
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    torch.testing.assert_close(
        got[2], torch.rms_norm(x, (100,), None, 2.0**-23)[2], rtol=0, atol=0, equal_nan=True
    )


def test_the_largest_inputs_of_fp16() -> None:
    x = torch.full((2, 4096), 65504.0, dtype=FP16)
    assert torch.equal(rms_norm(x, (4096,)), torch.ones(2, 4096, dtype=FP16))
    assert rms_norm(x, (4096,), torch.full((4096,), 65504.0)).unique().tolist() == [65504.0]


@HALVES
@pytest.mark.parametrize("index", [0, 1])
def test_a_second_derivative(dtype: torch.dtype, index: int) -> None:
    def twice(op: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(op(*inputs), inputs, dy, create_graph=True)
        assert first[index].requires_grad
        seed = normal(*first[index].shape, seed=9).to(first[index].dtype)
        found = torch.autograd.grad(first[index], (*inputs, dy), seed, allow_unused=True)
        return tuple(grad for grad in found if grad is not None)

    weight, _ = parameters((30,), (FP32, None))
    inputs = [normal(4, 30).to(dtype).requires_grad_(), weight]
    dy = normal(4, 30, seed=3).to(dtype).requires_grad_()
    got = twice(lambda x, w: rms_norm(x, (30,), w), inputs, dy)
    exact = copies([*inputs, dy])
    expected = twice(lambda x, w: torch.rms_norm(x, (30,), w, 2.0**-23), exact[:2], exact[2])
    assert len(got) == len(expected) == 3 - index
    for a, b in zip(got, expected):
        assert error(a, b) <= 2 * torch.finfo(dtype).eps


def naive(x: Tensor, weight: Tensor) -> Tensor:
    return torch.rms_norm(x.float(), (8,), weight).to(x.dtype)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, (8,), weight)


def test_transforms_and_tracers_take_it_apart() -> None:
    given = normal(4, 8).bfloat16(), normal(8, seed=1)
    mine, its = (
        torch.func.grad(lambda *a, op=op: op(*a).float().square().sum(), (0, 1))(*given)
        for op in (ours, naive)
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, its))
    with FakeTensorMode() as mode:
        fake = ours(*(mode.from_tensor(t) for t in given))
        assert (fake.shape, fake.dtype) == ((4, 8), BF16)
    x, weight = (t.requires_grad_() for t in given)
    out, dys = ours(x, weight), normal(5, 4, 8, seed=3).bfloat16()
    batched = torch.autograd.grad(out, (x, weight), dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        for many, one in zip(batched, torch.autograd.grad(out, (x, weight), dy, retain_graph=True)):
            torch.testing.assert_close(many[i], one)


def test_a_graph_has_the_casts_in_it() -> None:
    inputs = [normal(4, 8).bfloat16().requires_grad_(), parameters((8,), (FP32, None))[0]]
    dy = normal(4, 8, seed=3).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, inputs, dy), gradients(ours, inputs, dy)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_wider_input_is_pytorchs_own(dtype: torch.dtype) -> None:
    x, weight = normal(4, 8).to(dtype).requires_grad_(), normal(8).to(dtype)
    out = rms_norm(x, (8,), weight)
    assert torch.equal(out, torch.rms_norm(x, (8,), weight))
    assert "RMSNorm" not in type(out.grad_fn).__name__


@pytest.mark.parametrize(
    "bad", [((7,), None), ((), None), ((2, 8), torch.ones(8)), ((8,), torch.ones(7)), ((3, 4, 8), None)]
)
def test_what_does_not_fit_raises_as_pytorch_does(bad: tuple[tuple[int, ...], Tensor | None]) -> None:
    x = normal(4, 8)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        torch.rms_norm(x, *bad)
    with pytest.raises(expected.type) as got:
        rms_norm(x.bfloat16(), *bad)
    assert str(got.value) == str(expected.value)


def test_pytorchs_warning_about_a_wider_weight_is_not_given() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rms_norm(normal(4, 8).bfloat16(), (8,), torch.ones(8)).dtype is BF16
