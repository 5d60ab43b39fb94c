"""layer_norm with 16 bits in and out: FP32 inside, forward and backward, in both implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.layer_norm import layer_norm

IMPLEMENTATIONS = ["reference", "numba"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16])


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba" and not backend.is_installed("numba"):
        pytest.skip("numba is not installed")
    monkeypatch.setenv(backend.KERNELS, request.param)
    return str(request.param)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of 16-bit numbers at FP64 values."""
    limits = torch.finfo(dtype)
    exponent = values.double().abs().clamp(min=limits.smallest_normal).log2().floor()
    return torch.exp2(exponent) * limits.eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(
    shape: tuple[int, ...], kinds: tuple[torch.dtype | None, torch.dtype | None]
) -> list[Tensor | None]:
    made = (normal(*shape, seed=1) + 1, normal(*shape, seed=2))
    return [None if kind is None else x.to(kind).requires_grad_() for x, kind in zip(made, kinds)]


def copies(tensors: list[Tensor | None], dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    return [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]


def gradients(op: Callable[..., Tensor], inputs: list[Tensor | None], dy: Tensor) -> list[Tensor]:
    x, *rest = inputs
    assert x is not None
    out = op(x, *rest)
    wanted = [tensor for tensor in inputs if tensor is not None]
    return list(torch.autograd.grad(out, wanted, dy.to(out.dtype)))


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


# Leading dimensions, normalised ones: rows of one element, of less and more than 64, blocks that do not divide.
SHAPES = [
    ((3,), (1,)),
    ((5,), (7,)),
    ((), (64,)),
    ((33,), (64,)),
    ((2, 3), (100,)),
    ((2,), (4, 5, 6)),
    ((70,), (384,)),
    ((3,), (1037,)),
]
KINDS = [("fp32", "fp32"), ("own", "own"), ("fp32", None), (None, "fp32"), (None, None), ("own", "fp32")]


def kinds_of(names: tuple[str | None, str | None], dtype: torch.dtype) -> tuple[torch.dtype | None, ...]:
    return tuple({"fp32": FP32, "own": dtype, None: None}[name] for name in names)


@HALVES
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("leading", "shape"), SHAPES)
def test_forward_is_fp32s_within_an_ulp_and_backward_is_rounded_once(
    leading: tuple[int, ...],
    shape: tuple[int, ...],
    kinds: tuple[str | None, str | None],
    dtype: torch.dtype,
) -> None:
    x = (normal(*leading, *shape) * 3 + 1).to(dtype).requires_grad_()
    weight, bias = parameters(shape, kinds_of(kinds, dtype))
    inputs, exact = [x, weight, bias], copies([x, weight, bias])
    dy = normal(*leading, *shape, seed=4).to(dtype)

    def truth_op(x: Tensor, *rest: Tensor | None) -> Tensor:
        return torch.layer_norm(x, shape, *rest)

    out = layer_norm(x, shape, weight, bias)
    assert out.dtype is dtype
    assert out.shape == x.shape
    wide = torch.layer_norm(x.float(), shape, *(p if p is None else p.float() for p in (weight, bias)))
    # Where terms cancel, the result's ulp is smaller than an FP32 term's: those errors are FP32's own.
    w = torch.ones(shape).double() if weight is None else weight.detach().double().abs()
    terms = w * (wide.detach().double().abs() + 2) + (0 if bias is None else bias.detach().abs())
    expected = wide.detach().to(dtype).double()
    assert ((out.detach().double() - expected).abs() <= ulp(expected, dtype) + 2**-20 * terms).all()

    names = [name for name, p in zip(("dx", "dweight", "dbias"), inputs) if p is not None]
    got = gradients(lambda x, *rest: layer_norm(x, shape, *rest), inputs, dy)
    truths = gradients(truth_op, exact, dy.double())
    rstd = (x.detach().double().flatten(-len(shape)).var(-1, correction=0) + 1e-5).rsqrt()
    for name, own, grad, truth in zip(names, (p for p in inputs if p is not None), got, truths):
        assert grad.dtype is own.dtype
        assert grad.shape == own.shape
        half = 0.5 * ulp(truth, grad.dtype) if grad.dtype is not FP32 else 0.0
        # Besides one rounding: FP32's own errors, of terms that are no larger than `most`.
        most = float(dy.abs().max() * w.max() * rstd.max() if name == "dx" else dy.abs().float().sum()) * 8
        assert ((grad.double() - truth).abs() <= half * (1 + 2**-8) + 2**-22 * most).all(), name


@HALVES
@pytest.mark.parametrize("own", [False, True])
def test_the_parameters_gradients_over_many_rows_are_summed_in_fp32(dtype: torch.dtype, own: bool) -> None:
    rows, columns = 65_536, 16
    x = normal(rows, columns).to(dtype).requires_grad_()
    weight, bias = parameters((columns,), (dtype, dtype) if own else (FP32, FP32))
    dy = (normal(rows, columns, seed=3) * 0.5 + 0.3).to(dtype)
    _, dweight, dbias = gradients(lambda *a: layer_norm(a[0], (columns,), *a[1:]), [x, weight, bias], dy)
    exact = copies([x, weight, bias])
    _, *truths = gradients(lambda *a: torch.layer_norm(a[0], (columns,), *a[1:]), exact, dy.double())
    for grad, truth in zip((dweight, dbias), truths):
        assert error(grad, truth) <= (1.05 * error(truth.to(dtype), truth) if own else 1e-5)


@HALVES
def test_no_gradient_is_worse_than_the_naive_16_bit_paths(dtype: torch.dtype) -> None:
    x = normal(4096, 48).to(dtype).requires_grad_()
    weight, bias = parameters((48,), (FP32, FP32))
    dy = normal(4096, 48, seed=3).to(dtype)
    inputs = [x, weight, bias]
    truths = gradients(lambda *a: torch.layer_norm(a[0], (48,), *a[1:]), copies(inputs), dy.double())
    naive = gradients(lambda *a: torch.layer_norm(a[0], (48,), *a[1:]), inputs, dy)
    ours = gradients(lambda *a: layer_norm(a[0], (48,), *a[1:]), inputs, dy)
    for mine, its, truth in zip(ours, naive, truths):
        assert error(mine, truth) <= error(its, truth) * 1.001 + 1e-6


@HALVES
@pytest.mark.parametrize(("rows", "columns"), [(1000, 100), (70, 1024)])
def test_the_number_of_threads_changes_no_bit(
    rows: int, columns: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    inputs = [normal(rows, columns).to(dtype).requires_grad_(), *parameters((columns,), (FP32, dtype))]
    dy = normal(rows, columns, seed=3).to(dtype)
    found = []
    for count in (1, 2, 3):
        threads(count)
        out = layer_norm(inputs[0], (columns,), *inputs[1:])
        found.append([out, *torch.autograd.grad(out, inputs, dy)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@pytest.fixture
def threads(implementation: str) -> Iterator[Callable[[int], None]]:
    if implementation == "reference":
        pytest.skip("PyTorch's own operations share out their sums themselves")
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@HALVES
def test_saved_for_backward_are_the_16_bit_input_itself_and_two_numbers_a_row(dtype: torch.dtype) -> None:
    x, (weight, bias) = normal(32, 64).to(dtype).requires_grad_(), parameters((64,), (FP32, FP32))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer_norm(x, (64,), weight, bias)
    assert weight is not None
    others = [t for t in saved if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert len(others) == len(saved) - 2
    assert sum(t.numel() * t.element_size() for t in others) == 32 * 2 * 4


@pytest.mark.parametrize("wanted", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[int, int, int]) -> None:
    tensors = [normal(6, 40).bfloat16(), normal(40, seed=1), normal(40, seed=2)]
    everything = [t.clone().requires_grad_() for t in tensors]
    layer_norm(everything[0], (40,), *everything[1:]).backward(normal(6, 40, seed=3).bfloat16())
    some = [t.clone().requires_grad_(bool(want)) for t, want in zip(tensors, wanted)]
    out = layer_norm(some[0], (40,), *some[1:])
    assert out.requires_grad is any(wanted)
    if any(wanted):
        out.backward(normal(6, 40, seed=3).bfloat16())
    for tensor, full, want in zip(some, everything, wanted):
        assert (tensor.grad is not None) is bool(want)
        assert tensor.grad is None or torch.equal(tensor.grad, full.grad)
    with torch.no_grad():
        assert torch.equal(layer_norm(some[0], (40,), *some[1:]), out)


@HALVES
def test_strides_make_no_difference(dtype: torch.dtype) -> None:
    wide = normal(6, 80).to(dtype)
    weight, bias = normal(40, 2)[:, 0].requires_grad_(), normal(2, 40)[1].requires_grad_()
    x = wide[:, ::2].detach().requires_grad_()
    dense = x.detach().contiguous().requires_grad_()
    dy = torch.tensor(0.5, dtype=dtype).expand(6, 40)
    got = gradients(lambda *a: layer_norm(a[0], (40,), *a[1:]), [x, weight, bias], dy)
    others = [dense, weight.detach().contiguous().requires_grad_(), bias]
    expected = gradients(lambda *a: layer_norm(a[0], (40,), *a[1:]), others, dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    odd = torch.cat([wide.flatten(), wide.flatten()])[1:241].view(6, 40)  # not at a multiple of 4 bytes
    assert torch.equal(layer_norm(odd, (40,), weight, bias), layer_norm(odd.clone(), (40,), weight, bias))


@HALVES
@pytest.mark.parametrize("own", [False, True])
def test_no_rows(dtype: torch.dtype, own: bool) -> None:
    x = torch.zeros(0, 3, 8, dtype=dtype, requires_grad=True)
    weight, bias = parameters((8,), (dtype, dtype) if own else (FP32, FP32))
    out = layer_norm(x, (8,), weight, bias)
    assert out.shape == (0, 3, 8)
    dx, dweight, dbias = torch.autograd.grad(out, (x, weight, bias), torch.zeros_like(out))
    assert dx.shape == (0, 3, 8)
    assert dweight.tolist() == dbias.tolist() == [0.0] * 8


@HALVES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_and_the_others_stay(dtype: torch.dtype, bad: float) -> None:
    x = normal(5, 100).to(dtype)
    weight = normal(100, seed=1)
    clean = layer_norm(x, (100,), weight)
    x[2, 70] = bad
    got = layer_norm(x, (100,), weight)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, 0x7F800001])
def test_a_nan_of_any_pattern_stays_nan(bits: int) -> None:
    weight = torch.ones(8)
    weight.view(torch.int32)[3] = bits
    got = layer_norm(normal(4, 8).bfloat16(), (8,), weight)
    assert got[:, 3].isnan().all()
    assert not got[:, :3].isnan().any()


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
    small = torch.full((64,), tiny / 8)  # the output's subnormals
    x = normal(1, 64).to(dtype)
    expected = torch.layer_norm(x.float(), (64,), small).to(dtype)
    got = layer_norm(x, (64,), small)
    assert ((got.double() - expected.double()).abs() <= ulp(expected, dtype)).all()
    assert got.abs().max() > 0


def test_the_largest_constant_row_is_its_bias() -> None:
    x = torch.full((2, 4096), 65504.0, dtype=FP16)
    bias = normal(4096)
    assert torch.equal(layer_norm(x, (4096,), None, bias), bias.half().expand(2, 4096))


@HALVES
@pytest.mark.parametrize("index", [0, 1])
def test_a_second_derivative(dtype: torch.dtype, index: int) -> None:
    def twice(op: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(op(*inputs), inputs, dy, create_graph=True)
        assert first[index].requires_grad
        seed = normal(*first[index].shape, seed=9).to(first[index].dtype)
        found = torch.autograd.grad(first[index], (*inputs, dy), seed, allow_unused=True)
        return tuple(grad for grad in found if grad is not None)

    inputs = [normal(4, 30).to(dtype).requires_grad_(), *parameters((30,), (FP32, FP32))]
    dy = normal(4, 30, seed=3).to(dtype).requires_grad_()
    got = twice(lambda x, w, b: layer_norm(x, (30,), w, b), inputs, dy)
    exact = copies([*inputs, dy])
    expected = twice(lambda x, w, b: torch.layer_norm(x, (30,), w, b), exact[:3], exact[3])
    assert len(got) == len(expected) == 3 - index
    for a, b in zip(got, expected):
        assert error(a, b) <= 2 * torch.finfo(dtype).eps


def test_an_input_changed_before_backward_is_noticed() -> None:
    x = normal(4, 8).bfloat16()
    weight = torch.ones(8, requires_grad=True)
    out = layer_norm(x, (8,), weight)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def naive(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.layer_norm(x.float(), (8,), weight, bias).to(x.dtype)


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, (8,), weight, bias)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's jvp loads its own
def test_transforms_and_tracers_take_it_apart() -> None:
    x, weight, bias = normal(3, 4, 8).bfloat16(), normal(8, seed=1), normal(8, seed=2)
    both = ours, naive
    assert torch.equal(
        torch.func.vmap(ours, (0, None, None))(x, weight, bias),
        torch.func.vmap(naive, (0, None, None))(x, weight, bias),
    )
    given = x, weight, bias
    pairs = [
        [torch.func.grad(lambda *a, op=op: op(*a).float().square().sum(), (0, 1, 2))(*given) for op in both],
        [torch.func.jvp(op, given, given) for op in both],
    ]
    for mine, its in pairs:
        assert all(torch.equal(a, b) for a, b in zip(mine, its))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(ours(dual, weight, bias)).tangent is not None
    with FakeTensorMode() as mode:
        fake = ours(*(mode.from_tensor(t) for t in (x, weight, bias)))
        assert (fake.shape, fake.dtype) == (x.shape, BF16)
    assert ours(*(t.to("meta") for t in (x, weight, bias))).is_meta


def test_gradients_come_in_batches() -> None:
    x, weight, bias = normal(4, 8).bfloat16().requires_grad_(), *parameters((8,), (FP32, FP32))
    dys = normal(5, 4, 8, seed=3).bfloat16()
    out = layer_norm(x, (8,), weight, bias)
    inputs = (x, weight, bias)
    batched = torch.autograd.grad(out, inputs, dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        for many, one in zip(batched, torch.autograd.grad(out, inputs, dy, retain_graph=True)):
            torch.testing.assert_close(many[i], one)


def test_a_graph_has_the_casts_in_it() -> None:
    inputs = [normal(4, 8).bfloat16().requires_grad_(), *parameters((8,), (FP32, FP32))]
    dy = normal(4, 8, seed=3).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, inputs, dy), gradients(ours, inputs, dy)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_wider_input_is_pytorchs_own(dtype: torch.dtype) -> None:
    x, weight = normal(4, 8).to(dtype).requires_grad_(), normal(8).to(dtype)
    out = layer_norm(x, (8,), weight)
    assert torch.equal(out, torch.layer_norm(x, (8,), weight))
    assert "NativeLayerNorm" in type(out.grad_fn).__name__


BAD: list[tuple[tuple[int, ...], Tensor | None, Tensor | None]] = [
    ((7,), None, None),
    ((), None, None),
    ((2, 8), torch.ones(8), None),
    ((8,), torch.ones(7), None),
    ((8,), None, torch.ones(1, 8)),
    ((8,), torch.ones(8, dtype=torch.float64), None),
    ((3, 4, 8), None, None),
]


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_raises_as_pytorch_does(
    bad: tuple[tuple[int, ...], Tensor | None, Tensor | None],
) -> None:
    x = normal(4, 8)
    with pytest.raises(RuntimeError) as expected:
        torch.layer_norm(x, *bad)
    with pytest.raises(RuntimeError) as got:
        layer_norm(x.bfloat16(), *bad)
    assert str(got.value) == str(expected.value)
