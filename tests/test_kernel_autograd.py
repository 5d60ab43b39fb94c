"""What every kernel owes to autograd: transforms, second derivatives, batches of gradients, tracers and compilers.

A row is a kernel with its tensors and the naive code that it equals. Expected are the numbers of its plain backward,
or of the naive code's; or the error of a kernel that has no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzo
from eight_bits import fp8_linear
from mezzo.core.errors import UsageError
from mezzo.nn import linear_cross_entropy
from mezzo.pytorch.kernels import backend, cross_entropy, emulated
from mezzo.pytorch.kernels.cross_entropy import cross_entropy_loss
from mezzo.pytorch.kernels.norms import layer_norm, rms_norm
from releases import before_torch

pytestmark = [
    pytest.mark.skipif(not backend.is_installed("numba"), reason="needs numba"),
    # PyTorch's own, of jvp, of Dynamo where it traces an autograd function, and of ops without a batching rule.
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TARGET, TOKENS = torch.arange(6) % 5, torch.arange(96) % 3


@dataclass(frozen=True)
class Kernel:
    """A kernel's call, the naive code, and the tensors that both take and differentiate.

    Args:
        op: the kernel, or PyTorch's op that a policy gives to it.
        saved: which tensor backward reads again, so that a change in between is an error.
        refuses: words of the error for a second derivative, and for a batch of gradients; None where it has them.
        policy: of the region around the op.
        eps: how far two orders of rounding are apart at most, relative.
    """

    op: Callable[..., Tensor]
    naive: Callable[..., Tensor]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    saved: int | None = 0
    refuses: tuple[str | None, str | None] = (None, None)
    policy: str = ""
    eps: float = 2.0**-6

    def region(self) -> AbstractContextManager[object]:
        return mezzo.autocast(self.policy, "cpu") if self.policy else nullcontext()

    def call(self, *tensors: Tensor) -> Tensor:
        with self.region():
            return self.op(*tensors)

    def leaves(self, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = [(torch.randn(shape, generator=generator) / 2).to(dtype) for shape, dtype in self.tensors]
        return [tensor.requires_grad_() for tensor in made]


def in_fp32(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: call(*(tensor.float() for tensor in tensors))


def embedded(table: Tensor) -> Tensor:
    return F.embedding(TOKENS, table)


def bags(table: Tensor) -> Tensor:
    return F.embedding_bag(TOKENS.view(-1, 8), table)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


def loss_rows(x: Tensor, weight: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, TARGET, reduction="none")


MATRICES = (((6, 4), FP32), ((5, 4), FP32))
PER_CHANNEL = (((6, 8), BF16), ((8,), FP32), ((8,), FP32))
LOW_AND_FP32 = (((6, 4), FP16), ((5, 4), FP32))
IMAGES = (((2, 2, 8, 8), FP16), ((4, 2, 3, 3), FP32))
HEADS = (((2, 2, 5, 8), FP16),) * 3
attention = F.scaled_dot_product_attention
UNDONE = ("is not implemented", None)  # PyTorch has no second derivative of these either
KERNELS: dict[str, Kernel] = {
    "layer_norm": Kernel(
        lambda x, w, b: layer_norm(x, (8,), w, b),
        in_fp32(lambda x, w, b: F.layer_norm(x, (8,), w, b)),
        PER_CHANNEL,
    ),
    "rms_norm": Kernel(
        lambda x, w: rms_norm(x, (8,), w), in_fp32(lambda x, w: F.rms_norm(x, (8,), w)), PER_CHANNEL[:2]
    ),
    "cross_entropy": Kernel(
        lambda x: cross_entropy_loss(x, TARGET, None, 0),
        in_fp32(lambda x: F.cross_entropy(x, TARGET, reduction="none")),
        (((6, 7), BF16),),
    ),
    "embedding": Kernel(embedded, in_fp32(embedded), (((5, 8), BF16),), saved=None, policy="bf16"),
    "embedding_bag": Kernel(
        bags, in_fp32(bags), (((5, 8), BF16),), saved=None, refuses=UNDONE, policy="bf16"
    ),
    "max_pool2d": Kernel(pooled, in_fp32(pooled), (((2, 2, 8, 8), BF16),), policy="bf16"),
    "tf32 linear": Kernel(F.linear, F.linear, MATRICES, refuses=(None, "Batching rule"), policy="tf32"),
    "emulated linear": Kernel(F.linear, in_fp32(F.linear), LOW_AND_FP32, policy="fp16"),
    "emulated conv2d": Kernel(F.conv2d, in_fp32(F.conv2d), IMAGES, policy="fp16"),
    "emulated attention": Kernel(attention, in_fp32(attention), HEADS, refuses=UNDONE, policy="fp16"),
    "fp8_linear": Kernel(
        lambda x, w, b: fp8_linear(x, w, b, scaling="rowwise"),
        F.linear,
        (((32, 64), FP32), ((48, 64), FP32), ((48,), FP32)),
        saved=1,
        refuses=(r"second derivatives are not supported.*module\.NAME=bf16", "is_grads_batched"),
    ),
    "linear_cross_entropy": Kernel(
        loss_rows,
        lambda x, w: F.cross_entropy(F.linear(x, w), TARGET, reduction="none"),
        MATRICES,
        refuses=(r"F\.cross_entropy", r"F\.cross_entropy"),
        policy="bf16",
    ),
}
REFUSED = (UsageError, RuntimeError)  # Mezzo's error, and PyTorch's of an op that has no such derivative
EACH = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(autouse=True)
def kernels_for_small_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cross_entropy, "SMALL", 0)
    monkeypatch.setattr(emulated, "SMALL", -1)
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16")
    yield
    torch._dynamo.reset()


def weighed(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The output times fixed numbers, summed: a loss whose gradient with respect to the output does not round."""

    def loss(*tensors: Tensor) -> Tensor:
        out = call(*tensors).float()
        # No Python number meets an op here: see torch.func in docs/policies.md.
        weights = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5]).repeat(out.numel() // 5 + 1)
        return (out * weights[: out.numel()].view(out.shape)).sum()

    return loss


def assert_near(found: Tensor, expected: Tensor, eps: float) -> None:
    assert found.shape == expected.shape
    assert found.isfinite().all()
    wide, exact = found.detach().double(), expected.detach().double()
    assert float((wide - exact).norm()) <= eps * float(exact.norm()) + 1e-6


@EACH
def test_function_transforms(name: str) -> None:
    if name in ("tf32 linear", "fp8_linear"):
        before_torch(2, 13, "torch.func.vmap has no rule for Tensor.view(dtype)")
    kernel = KERNELS[name]
    leaves, others = kernel.leaves(), kernel.leaves(seed=1)
    loss, given = weighed(kernel.call), [leaf.detach() for leaf in leaves]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    every = tuple(range(len(given)))
    inside = torch.func.grad(loss, every)(*given)
    with kernel.region():
        outside = torch.func.grad(weighed(kernel.op), every)(*given)
    for found, plain in zip([*inside, *outside], [*expected, *expected]):
        assert found.dtype is plain.dtype
        assert_near(found, plain, kernel.eps)
    both = torch.stack([given[0], others[0].detach()])
    dims = (0, *[None] * (len(given) - 1))
    outs, grads = (torch.func.vmap(f, dims)(both, *given[1:]) for f in (kernel.call, torch.func.grad(loss)))
    for index, leaf in enumerate((leaves[0], others[0])):
        assert_near(outs[index], kernel.call(leaf, *leaves[1:]), kernel.eps)
        assert_near(grads[index], torch.autograd.grad(loss(leaf, *leaves[1:]), leaf)[0], kernel.eps)
    if name in ("layer_norm", "rms_norm"):
        ours, truth = (torch.func.jvp(f, tuple(given), tuple(given)) for f in (kernel.call, kernel.naive))
        for found, wide in zip(ours, truth):
            assert_near(found, wide, kernel.eps)


@EACH
def test_a_second_derivative(name: str) -> None:
    kernel = KERNELS[name]

    def twice(call: Callable[..., Tensor]) -> list[Tensor | None]:
        leaves = kernel.leaves()
        first = torch.autograd.grad(call(*leaves).float().square().sum(), leaves, create_graph=True)
        penalty = sum(gradient.float().square().sum() for gradient in first)
        return list(torch.autograd.grad(penalty, leaves, allow_unused=True))

    if kernel.refuses[0] is not None:
        with pytest.raises(REFUSED, match=kernel.refuses[0]):
            twice(kernel.call)
        return
    for found, expected in zip(twice(kernel.call), twice(kernel.naive), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert_near(found, expected, 4 * kernel.eps)


@EACH
def test_a_batch_of_gradients(name: str) -> None:
    kernel = KERNELS[name]
    leaves = kernel.leaves()
    out = kernel.call(*leaves)
    seeds = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    refused: AbstractContextManager[object] = nullcontext()
    if kernel.refuses[1] is not None:
        refused = pytest.raises(REFUSED, match=kernel.refuses[1])
    with refused:
        found = torch.autograd.grad(out, leaves, seeds, is_grads_batched=True, retain_graph=True)
        for index, seed in enumerate(seeds):
            alone = torch.autograd.grad(out, leaves, seed, retain_graph=True)
            for several, one in zip(found, alone):
                assert several.dtype is one.dtype
                assert_near(several[index], one, kernel.eps)


# Ops without a kernel: one in FP32 that keeps its 16-bit input, and one that is computed again.
KEPT: dict[str, Kernel] = {
    "softplus": Kernel(F.softplus, F.softplus, (((512, 256), BF16),), policy="bf16"),
    "gelu": Kernel(
        lambda x, w: F.linear(F.gelu(x), w),
        F.linear,
        (((4, 8), BF16), ((3, 8), FP32)),
        policy="bf16,recompute=gelu",
    ),
}


@pytest.mark.parametrize("name", [name for name, row in (KERNELS | KEPT).items() if row.saved is not None])
def test_a_tensor_that_changes_before_backward_is_noticed(name: str) -> None:
    kernel = (KERNELS | KEPT)[name]
    tensors = [leaf * 1 for leaf in kernel.leaves()]
    out = kernel.call(*tensors)
    tensors[kernel.saved].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


@EACH
def test_fake_and_meta_tensors_have_the_shape_and_the_format(name: str) -> None:
    kernel = KERNELS[name]
    leaves = kernel.leaves()
    out = kernel.call(*leaves)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = [kernel.call(*(mode.from_tensor(leaf.detach()) for leaf in leaves))]
    if name in ("layer_norm", "rms_norm"):
        made.append(kernel.call(*(leaf.to("meta") for leaf in leaves)))
    for fake in made:
        assert (fake.shape, fake.dtype) == (out.shape, out.dtype)


@pytest.mark.heavy
@pytest.mark.compiler
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "tf32 linear"])  # test_tf32.py
def test_compiled_whole(name: str) -> None:
    kernel = KERNELS[name]
    loss, leaves = weighed(kernel.call), kernel.leaves()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    plain, traced = (torch.autograd.grad(run(*leaves), leaves) for run in (loss, compiled))
    for found, expected in zip(traced, plain):
        assert found.dtype is expected.dtype
        assert_near(found, expected, kernel.eps)
