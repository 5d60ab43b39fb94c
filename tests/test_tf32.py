"""TF32 on a machine without it: rounding to the bit of `mezzo.formats`, and a region's products of rounded factors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.pytorch.autocast.modules
from alive import bytes_alive
from mezzo.core import formats
from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.core.policy import policy
from mezzo.pytorch.autocast.plan import own_table, plan
from mezzo.pytorch.kernels.tf32 import round_tf32


def patterns() -> Tensor:
    """FP32s of both signs: each exponent, with mantissas around a TF32, a tie, and both ends; and some at random."""
    exponents = np.arange(256)[:, None, None] << 23
    kept = np.array([0, 1, 2, 511, 512, 1022, 1023])[None, :, None] << 13
    ends = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])[None, None, :]
    edges = (exponents | kept | ends).ravel()
    chance = np.random.default_rng(3).integers(0, 1 << 31, 100_000)
    magnitudes = np.concatenate([edges, chance])
    both = np.concatenate([magnitudes, magnitudes | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(both.view(np.float32))


def same_patterns(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, and any NaN for NaN."""
    alike = (a.view(torch.int32) == b.view(torch.int32)) | a.isnan() & b.isnan()
    return a.dtype is b.dtype and a.shape == b.shape and bool(alike.all())


def test_it_is_the_format_to_the_bit() -> None:
    x = patterns()
    before = x.clone()
    assert same_patterns(round_tf32(x), formats.round(x, "tf32"))
    assert same_patterns(x, before)


def test_any_strides_and_shapes() -> None:
    x = torch.randn(7, 11, 256)
    for view in (
        x.permute(2, 0, 1),
        x[:, ::3],
        x[..., 1:],
        x[:1].expand(3, -1, -1),
        x[:0],
        x[:, :, :12].reshape(7, 11, 3, 4).to(memory_format=torch.channels_last),
    ):
        got = round_tf32(view)
        assert got.shape == view.shape
        assert torch.equal(got, formats.round(view, "tf32"))
        assert got.numel() == 0 or got.data_ptr() != view.data_ptr()


# The region.


def tf32(x: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, as the formats room does it."""
    return mezzo.formats.round(x.detach(), "tf32")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Name, the op, its factors, what is added (never rounded).
OPS: list[tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[int, ...] | None]] = [
    ("linear", lambda x, w, b: F.linear(x, w, b), ((5, 7), (3, 7)), (3,)),
    ("linear, 3-D", lambda x, w, b: F.linear(x, w, b), ((2, 5, 7), (3, 7)), None),
    ("matmul", lambda x, y, _: x @ y, ((4, 5, 6), (4, 6, 3)), None),
    ("addmm", lambda x, y, a: torch.addmm(a, x, y), ((5, 6), (6, 3)), (5, 3)),
    ("baddbmm", lambda x, y, a: torch.baddbmm(a, x, y), ((2, 5, 6), (2, 6, 3)), (2, 5, 3)),
    ("einsum", lambda x, y, _: torch.einsum("ij,kj->ik", x, y), ((5, 6), (3, 6)), None),
    ("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), ((2, 3, 6, 6), (4, 3, 3, 3)), (4,)),
]


@pytest.mark.parametrize(("name", "op", "factors", "addend"), OPS, ids=[row[0] for row in OPS])
def test_factors_are_rounded_and_addends_are_not(
    name: str,
    op: Callable[..., Tensor],
    factors: tuple[tuple[int, ...], ...],
    addend: tuple[int, ...] | None,
) -> None:
    factors = [values(*shape, seed=seed) for seed, shape in enumerate(factors)]
    addend = None if addend is None else values(*addend, seed=2)
    leaves = [x.clone().requires_grad_() for x in factors]
    extra = None if addend is None else addend.clone().requires_grad_()
    with mezzo.autocast("tf32", "cpu"):
        out = op(*leaves, extra)
    by_hand = [tf32(x).requires_grad_() for x in factors]
    extra_by_hand = None if addend is None else addend.clone().requires_grad_()
    expected = op(*by_hand, extra_by_hand)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert not torch.equal(out, op(*factors, addend)), "inputs that TF32 holds anyway show nothing"

    gradient = values(*out.shape, seed=9)
    out.backward(gradient)
    expected.backward(tf32(gradient))
    for leaf, other in zip(leaves, by_hand):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, other.grad)


def test_sixteen_bit_and_fp64_tensors() -> None:
    weight = values(3, 7)
    with mezzo.autocast("tf32", "cpu"):
        assert F.linear(values(2, 7).bfloat16(), weight).dtype == torch.float32
        assert F.linear(values(2, 7).double(), weight.double()).dtype == torch.float64


def test_every_op_that_pytorch_would_lower_is_ours() -> None:
    """The region's autocast is on, so an op left to PyTorch's table would be cast: to FP32, and unrounded."""
    ours = {
        name
        for row in plan(policy("tf32"), "cpu").values()
        if row.kernel and row.kernel.kind == "tf32"
        for name in row.overloads
    }
    theirs = {name for name, category in own_table("cpu").items() if category == "lower"}
    # Overloads that another one of ours is made of: they say which output they write, or are called by it.
    assert theirs - ours <= {name for name in theirs if "out" in name.partition(".")[2]}, theirs - ours
    assert "linear" in ours
    assert "lstm.input" in ours


def test_rounded_factors_are_not_kept() -> None:
    def alive_after_forward(precision: str) -> int:
        x = values(64, 256)
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        before = bytes_alive()
        with mezzo.autocast(precision, "cpu"):
            out = layers(x)
        alive = bytes_alive() - before
        del out
        return alive

    assert alive_after_forward("tf32") == alive_after_forward("fp32")


def test_a_function_s_gradient() -> None:
    x, weight = values(4, 8), values(3, 8)

    def loss(w: Tensor) -> Tensor:
        with mezzo.autocast("tf32", "cpu"):
            return F.linear(x, w).square().sum()

    y = tf32(x) @ tf32(weight).t()
    expected = tf32(2.0 * y).t() @ tf32(x)
    assert torch.equal(torch.func.grad(loss)(weight), expected)


def test_in_a_bf16_policy_one_module_can_be_tf32() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = values(4, 16)
    with (
        mezzo.pytorch.autocast.modules.apply_module_overrides(model, policy("bf16,module.1=tf32"), "cpu"),
        mezzo.autocast("bf16,module.1=tf32", "cpu"),
    ):
        out = model(x)
        inner = model[0](x)
    assert inner.dtype == torch.bfloat16
    assert out.dtype == torch.float32
    expected = F.linear(tf32(inner.float()), tf32(model[1].weight), model[1].bias)
    assert torch.equal(out, expected)


def test_checkpointing_is_refused_and_says_why() -> None:
    layer, x = nn.Linear(8, 8), values(4, 8).requires_grad_()
    with (
        pytest.raises(UnsupportedPrecisionError, match=r"cpu has no TF32.*without"),
        mezzo.autocast("tf32", "cpu"),
    ):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def test_a_compiled_function_runs_such_a_region_as_it_is() -> None:
    layer, x = nn.Linear(8, 8), values(4, 8)

    def step(inputs: Tensor) -> Tensor:
        with mezzo.autocast("tf32", "cpu"):
            return layer(inputs).relu()

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(x), step(x))
    assert torch.equal(step(x), F.linear(tf32(x), tf32(layer.weight), layer.bias).relu())
