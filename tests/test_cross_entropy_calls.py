"""Who calls cross entropy, and how: row functions, transforms, compilers, second derivatives, and wrong arguments."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels import cross_entropy as kernel
from mezzo.pytorch.kernels.cross_entropy import cross_entropy_loss
from mezzo.pytorch.kernels.cross_entropy.reference import Rows

NEEDS_NUMBA = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
TARGET = torch.tensor([1, 0, 2])


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SMALL", 0)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)


# Row functions.


@NEEDS_NUMBA
def test_the_exponential_is_within_two_ulp_where_it_counts() -> None:
    """A gradient where the log-sum-exp is 0 and the scale 1 is exp itself, but for the target."""
    rows, one = backend.load(kernel.__name__, "cpu"), torch.ones(1)
    edges = [0.0, -16.0, -87.0, -131.0]
    for high, low, most in zip(edges, edges[1:], (1.5, 5, 5)):
        x = torch.linspace(high, low, 200_001, dtype=torch.float64).float()[None]
        out = torch.empty_like(x)
        rows.rows_gradient(Rows(x, torch.tensor([0])), one.double() * 0, one, out)
        exact = x[0, 1:].double().exp()
        ulp = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact)[1] - 24).clamp(min=-149))
        assert float(((out[0, 1:] - exact).abs() / ulp).max()) <= most
    least = torch.tensor([[0.0, -math.inf, -104.0, -1e30, -88.0]])
    out = torch.empty_like(least)
    rows.rows_gradient(Rows(least, torch.tensor([0])), one.double() * 0, one, out)
    assert out[0, :4].tolist() == [0, 0, 0, 0]
    assert out[0, 4] == pytest.approx(math.exp(-88), rel=1e-5)


@NEEDS_NUMBA
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_ties_go_to_even_and_what_is_too_large_to_infinity(dtype: torch.dtype, bits: int) -> None:
    """Where logit and log-sum-exp are 0, the gradient is the scale."""
    ulp, largest = 2.0**-bits, torch.finfo(dtype).max
    edge = largest * (1 + ulp / 4)  # half an ulp above the largest is a tie, with infinity
    scale = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, -1 - ulp / 2, largest, edge, -edge])
    logits, out = torch.zeros(6, 2, dtype=dtype), torch.empty(6, 2, dtype=dtype)
    rows = backend.load(kernel.__name__, "cpu")
    rows.rows_gradient(Rows(logits, torch.zeros(6).long()), torch.zeros(6).double(), scale, out)
    assert torch.equal(out[:, 1], scale.to(dtype))


# Which calls are PyTorch's.


def test_a_few_logits_are_pytorchs_and_many_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = kernel.SMALL // 8
    names = [
        type(cross_entropy_loss(values(n, 8).requires_grad_(), torch.zeros(n, dtype=torch.int64)).grad_fn)
        for n in (rows, rows + 1)
    ]
    assert [name.__name__ for name in names] == ["NllLossBackward0", "_CrossEntropyBackward"]


def second(logits: Tensor, call: object, target: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    out = call(leaf * 1, target)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(out, leaf, create_graph=True)
    (again,) = torch.autograd.grad(gradient.float().square().sum() * 100, leaf)
    return again


def test_a_second_derivative() -> None:
    logits, target = values(3, 6), TARGET
    got = second(logits, cross_entropy_loss, target)
    want = second(logits, lambda x, t: F.cross_entropy(x.float(), t), target)
    assert want.any()
    assert torch.equal(got, want)


@pytest.mark.heavy
@pytest.mark.compiler
def test_transforms_tracers_and_compilers_give_the_same_numbers() -> None:
    logits = values(3, 6)
    gradient = torch.func.grad(lambda x: cross_entropy_loss(x, TARGET))(logits)
    wide = torch.func.grad(lambda x: F.cross_entropy(x, TARGET))(logits.float())
    assert torch.equal(gradient, wide.bfloat16())
    each = torch.func.vmap(lambda x, t: cross_entropy_loss(x, t))(logits, TARGET)
    torch.testing.assert_close(each, F.cross_entropy(logits.float(), TARGET, reduction="none"))
    with FakeTensorMode() as mode:
        fake = cross_entropy_loss(mode.from_tensor(logits), mode.from_tensor(TARGET))
    assert (fake.shape, fake.dtype) == ((), torch.float32)
    assert cross_entropy_loss(logits.to("meta"), TARGET.to("meta"), None, 0).shape == (3,)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, t: cross_entropy_loss(x, t, None, 1, -100, 0.1), fullgraph=True, backend="aot_eager"
    )
    results = []
    for call in (compiled, lambda x, t: cross_entropy_loss(x, t, None, 1, -100, 0.1)):
        leaf = values(3, 6).requires_grad_()
        out = call(leaf, TARGET)
        out.backward()
        results.append((out.detach(), leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2**-8, atol=1e-7)


def test_targets_and_weights_that_need_a_gradient_get_pytorchs() -> None:
    logits = values(3, 6)
    results = []
    for call in (cross_entropy_loss, lambda x, t, w: F.cross_entropy(x.float(), t, w)):
        target = torch.full((3, 6), 1 / 6, requires_grad=True)
        weight = torch.linspace(0.5, 1, 6, requires_grad=True)
        call(logits, target, weight).backward()
        results.append((target.grad, weight.grad))
    for mine, its in zip(*results):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.int64, torch.uint8, torch.bfloat16, torch.float32])
def test_formats_of_targets_and_weights(target: torch.dtype, weight: torch.dtype) -> None:
    logits, weights = values(3, 6), torch.linspace(0.5, 1, 6).to(weight)
    given = TARGET.to(target) if not target.is_floating_point else torch.full((3, 6), 1 / 8, dtype=target)
    got = cross_entropy_loss(logits, given, weights)
    wide = given.float() if given.dtype is torch.bfloat16 else given
    want = F.cross_entropy(logits.float(), wide, weights.float())
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=5e-7, atol=0)


# Wrong arguments.

LOGITS = values(3, 6)
WRONG = {
    "a class too high": (LOGITS, torch.tensor([1, 6, 9]), {}),
    "a class below": (LOGITS, torch.tensor([1, 2, -1]), {}),
    "too few": (LOGITS, torch.tensor([1, 2]), {}),
    "another shape": (LOGITS[:, :, None], torch.tensor([[1, 2]]), {}),
    "integers of 32 bits": (LOGITS, TARGET.int(), {}),
    "classes as numbers": (LOGITS, TARGET.float(), {}),
    "classes in the logits' shape": (LOGITS, torch.ones(3, 6, dtype=torch.int64), {}),
    "probabilities and an ignored class": (LOGITS, torch.ones(3, 6), {"ignore_index": 2}),
    "weights of too few classes": (LOGITS, TARGET, {"weight": torch.ones(5)}),
    "smoothing above 1": (LOGITS, TARGET, {"label_smoothing": 1.5}),
    "no classes": (LOGITS[:, :0], TARGET, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_as_by_pytorch(name: str) -> None:
    logits, target, options = WRONG[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011  # which one is PyTorch's to say
        torch.ops.aten.cross_entropy_loss(logits.float(), target, **options)
    with pytest.raises(theirs.type) as mine:
        cross_entropy_loss(logits, target, **options)
    assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize("reduction", [0, 1])
def test_a_batch_of_gradients(reduction: int) -> None:
    x = values(3, 4).requires_grad_()
    out = cross_entropy_loss(x, TARGET, None, reduction)
    seeds = torch.rand(2, *out.shape)
    (found,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True, retain_graph=True)
    for one, seed in zip(found, seeds):
        (alone,) = torch.autograd.grad(out, x, seed, retain_graph=True)
        assert one.dtype is x.dtype
        torch.testing.assert_close(
            one, alone, rtol=2**-7, atol=1e-6
        )  # one ulp: two orders of FP32's operations
