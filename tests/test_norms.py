"""layer_norm and rms_norm with 16 bits in and out: FP32 inside, forward and backward, in both implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.norms import layer_norm, rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16])
Norm = Callable[..., Tensor]


def theirs(x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, *rest: Tensor | None) -> Tensor:
    """rms_norm with FP32's epsilon, whatever the format; PyTorch warns of a weight of another one."""
    return torch.rms_norm(x, shape, weight if weight is None else weight.to(x.dtype), 2.0**-23)


# Ours and PyTorch's, of an input, a shape and parameters.
OPS: dict[str, tuple[Norm, Norm]] = {
    "layer_norm": (layer_norm, torch.layer_norm),
    "rms_norm": (lambda x, shape, weight=None, bias=None: rms_norm(x, shape, weight), theirs),
}
BOTH = pytest.mark.parametrize("op", OPS)


pytestmark = pytest.mark.skipif(not backend.is_installed("numba"), reason="needs numba")


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of 16-bit numbers at FP64 values."""
    limits = torch.finfo(dtype)
    exponent = values.double().abs().clamp(min=limits.smallest_normal).log2().floor()
    return torch.exp2(exponent) * limits.eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(op: str, leading: Any, shape: Any, dtype: torch.dtype, kinds: Any = (FP32, FP32)) -> Any:
    x = (normal(*leading, *shape) * 3 + 1).to(dtype)
    made = zip((normal(*shape, seed=1) + 1, normal(*shape, seed=2)), kinds)
    parameters = [None if kind is None else value.to(kind) for value, kind in made]
    return [x, *parameters[: 2 if op == "layer_norm" else 1]]


def leaves(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


def run(norm: Norm, inputs: list[Tensor], shape: tuple[int, ...], dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of what is there."""
    out = norm(inputs[0], shape, *inputs[1:])
    wanted = [tensor for tensor in inputs if tensor is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, dy.to(out.dtype))]


# Leading dimensions, normalised ones: rows of one element, of less and more than 64, blocks that do not divide.
SHAPES = [
    ((3,), (1,)),
    ((5,), (7,)),
    ((), (64,)),
    ((2, 3), (100,)),
    ((2,), (4, 5, 6)),
    ((70,), (384,)),
    ((3,), (1037,)),
]
KINDS = [("fp32", "fp32"), ("own", "own"), ("fp32", None), (None, "fp32"), (None, None)]


@HALVES
@BOTH
@pytest.mark.parametrize("names", KINDS)
def test_forward_is_fp32s_within_an_ulp_and_backward_is_rounded_once(
    names: tuple[str | None, str | None], op: str, dtype: torch.dtype
) -> None:
    ours, its = OPS[op]
    for leading, shape in SHAPES:
        kinds = tuple({"fp32": FP32, "own": dtype, None: None}[name] for name in names)
        inputs = leaves(inputs_of(op, leading, shape, dtype, kinds))
        dy = normal(*leading, *shape, seed=4).to(dtype)
        x, weight, bias = (*inputs, None)[:3]
        out, *got = run(ours, inputs, shape, dy)
        assert (out.dtype, out.shape) == (dtype, x.shape)
        wide = its(x.float(), shape, *(p if p is None else p.float() for p in inputs[1:])).detach()
        # Where terms cancel, the result's ulp is smaller than an FP32 term's: those errors are FP32's own.
        w = torch.ones(shape).double() if weight is None else weight.detach().double().abs()
        terms = w * (wide.double().abs() + 2) + (0 if bias is None else bias.detach().abs())
        expected = wide.to(dtype).double()
        assert ((out.double() - expected).abs() <= ulp(expected, dtype) + 2**-20 * terms).all()

        _, *truths = run(its, leaves(inputs, torch.float64), shape, dy.double())
        rows = x.detach().double().flatten(-len(shape))
        variance = rows.var(-1, correction=0) if op == "layer_norm" else rows.square().mean(-1)
        rstd = (variance + (1e-5 if op == "layer_norm" else 2**-23)).rsqrt()
        for own, grad, truth in zip((p for p in inputs if p is not None), got, truths):
            assert (grad.dtype, grad.shape) == (own.dtype, own.shape)
            half = 0.5 * ulp(truth, grad.dtype) if grad.dtype is not FP32 else 0.0
            # Besides one rounding: FP32's own errors, of terms that are no larger than `most`.
            most = dy.abs().max() * w.max() * rstd.max() if own is x else dy.abs().float().sum()
            assert ((grad.double() - truth).abs() <= half * (1 + 2**-8) + 2**-19 * float(most)).all()


@BOTH
def test_saved_for_backward_are_the_16_bit_input_itself_and_a_few_numbers_a_row(op: str) -> None:
    inputs = leaves(inputs_of(op, (32,), (64,), BF16))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        OPS[op][0](inputs[0], (64,), *inputs[1:])
    others = [t for t in saved if t.data_ptr() not in {given.data_ptr() for given in inputs}]
    assert len(others) == len(saved) - len(inputs)
    assert sum(t.numel() * t.element_size() for t in others) == 32 * 4 * (len(inputs) - 1)


@BOTH
def test_strides_make_no_difference_and_no_rows_are_fine(op: str) -> None:
    ours = OPS[op][0]
    wide = normal(6, 80).bfloat16()
    parameters = [normal(40, 2)[:, 0], normal(2, 40)[1]][: 2 if op == "layer_norm" else 1]
    dy = torch.tensor(0.5, dtype=BF16).expand(6, 40)
    got = run(ours, [t.requires_grad_() for t in (wide[:, ::2], *parameters)], (40,), dy)
    dense = leaves([t.contiguous() for t in (wide[:, ::2], *parameters)])
    assert all(torch.equal(a, b) for a, b in zip(got, run(ours, dense, (40,), dy.contiguous())))
    odd = torch.cat([wide.flatten(), wide.flatten()])[1:241].view(6, 40)  # not at a multiple of 4 bytes
    assert torch.equal(ours(odd, (40,), *parameters), ours(odd.clone(), (40,), *parameters))
    empty = leaves([torch.zeros(0, 3, 8, dtype=BF16), *(torch.ones(8) for _ in parameters)])
    out, dx, *sums = run(ours, empty, (8,), torch.zeros(0, 3, 8))
    assert out.shape == dx.shape == (0, 3, 8)
    assert [each.tolist() for each in sums] == [[0.0] * 8] * len(sums)


def test_an_output_beyond_the_format_overflows_to_infinity_and_ties_go_to_even() -> None:
    x = torch.tensor([[1.0, -1.0]])
    for dtype, largest in ((BF16, torch.finfo(BF16).max), (FP16, 65504.0)):
        weight = torch.tensor([largest * 1.01, largest])
        assert layer_norm(x.to(dtype), (2,), weight, None, 0.0).tolist() == [[math.inf, -largest]]
        eps = torch.finfo(dtype).eps
        ties = torch.tensor([1 + eps / 2, 1 + 1.5 * eps])
        got = layer_norm(x.to(dtype), (2,), ties, None, 0.0)
        assert got.tolist() == [[1.0, -(1 + 2 * eps)]]


@HALVES
def test_the_largest_and_the_smallest_inputs(dtype: torch.dtype) -> None:
    largest = 65504.0 if dtype is FP16 else 2.0**60
    x = torch.tensor([largest, -largest, largest / 2, 0.0] * 16, dtype=dtype).view(1, 64)
    expected = torch.layer_norm(x.float(), (64,)).to(dtype)
    assert (layer_norm(x, (64,)).float() - expected.float()).abs().max() <= torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal
    x = (torch.arange(64) / 64 * tiny).to(dtype).view(1, 64)  # subnormals
    assert x.unique().numel() > 32
    scale = torch.full((64,), 2.0**10 if dtype is FP16 else 2.0**126)
    expected = torch.layer_norm(x.double(), (64,), scale.double(), None, 1e-10)
    got = layer_norm(x, (64,), scale, None, 1e-10).double()
    assert ((got - expected).abs() <= ulp(expected, dtype) + expected.abs().max() * 2**-20).all()
    assert got.unique().numel() > 32
    bias, constant = normal(4096), torch.full((2, 4096), 65504.0, dtype=FP16)
    assert torch.equal(layer_norm(constant, (4096,), None, bias), bias.half().expand(2, 4096))
    assert rms_norm(constant, (4096,), torch.full((4096,), 65504.0)).unique().tolist() == [65504.0]


BAD: list[tuple[Any, ...]] = [
    ((7,), None, None),
    ((2, 8), torch.ones(8), None),
    ((8,), torch.ones(7), None),
    ((8,), torch.ones(8, dtype=torch.float64), None),
]


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_raises_as_pytorch_does(bad: tuple[Any, ...]) -> None:
    x = normal(4, 8)
    with pytest.raises(RuntimeError) as expected:
        torch.layer_norm(x, *bad)
    with pytest.raises(RuntimeError) as got:
        layer_norm(x.bfloat16(), *bad)
    assert str(got.value) == str(expected.value)
