"""Emulated TF32: the region's products against factors rounded by hand, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.pytorch.region.modules
from alive import bytes_alive
from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.core.policy import policy
from mezzo.pytorch.region.plan import own_table, plan


def tf32(x: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, as the formats room does it."""
    return mezzo.formats.round(x.detach(), "tf32")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Name, the op, its factors, what is added (never rounded).
OPS: list[tuple[str, Callable[..., Tensor], tuple[Tensor, ...], Tensor | None]] = [
    ("linear", lambda x, w, b: F.linear(x, w, b), (values(5, 7), values(3, 7, seed=1)), values(3, seed=2)),
    ("linear, 3-D", lambda x, w, b: F.linear(x, w, b), (values(2, 5, 7), values(3, 7, seed=1)), None),
    ("matmul", lambda x, y, _: x @ y, (values(4, 5, 6), values(4, 6, 3, seed=1)), None),
    ("bmm", lambda x, y, _: torch.bmm(x, y), (values(4, 5, 6), values(4, 6, 3, seed=1)), None),
    (
        "addmm",
        lambda x, y, a: torch.addmm(a, x, y),
        (values(5, 6), values(6, 3, seed=1)),
        values(5, 3, seed=2),
    ),
    (
        "baddbmm",
        lambda x, y, a: torch.baddbmm(a, x, y),
        (values(2, 5, 6), values(2, 6, 3, seed=1)),
        values(2, 5, 3, seed=2),
    ),
    ("einsum", lambda x, y, _: torch.einsum("ij,kj->ik", x, y), (values(5, 6), values(3, 6, seed=1)), None),
    (
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (values(2, 3, 6, 6), values(4, 3, 3, 3, seed=1)),
        values(4, seed=2),
    ),
    (
        "conv_transpose1d",
        lambda x, w, b: F.conv_transpose1d(x, w, b),
        (values(2, 3, 6), values(3, 4, 3, seed=1)),
        values(4, seed=2),
    ),
]


@pytest.mark.parametrize(("name", "op", "factors", "addend"), OPS, ids=[row[0] for row in OPS])
def test_factors_are_rounded_and_addends_are_not(
    name: str, op: Callable[..., Tensor], factors: tuple[Tensor, ...], addend: Tensor | None
) -> None:
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


def test_special_values_pass() -> None:
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0], [3.4e38, 0.0], [-0.0, 0.0]])
    with mezzo.autocast("tf32", "cpu"):
        out = x @ torch.eye(2)
    plain = x @ torch.eye(2)
    assert out[0].tolist()[0] == float("inf")
    assert torch.equal(out.isnan(), plain.isnan())
    assert int(plain.isnan().sum()) == 3  # inf * 0, and the row of the NaN
    with mezzo.autocast("tf32", "cpu"):
        single = torch.mm(torch.tensor([[float("inf")], [3.4028e38]]), torch.ones(1, 1))
    assert single.flatten().tolist() == [float("inf"), float("inf")]  # 3.4028e38 rounds beyond the largest


def test_sixteen_bit_and_fp64_tensors() -> None:
    weight = values(3, 7)
    with mezzo.autocast("tf32", "cpu"):
        assert F.linear(values(2, 7).bfloat16(), weight).dtype == torch.float32
        assert F.linear(values(2, 7).double(), weight.double()).dtype == torch.float64


def test_every_op_that_pytorch_would_lower_is_ours() -> None:
    """The region's autocast is on, so an op left to PyTorch's table would be cast: to FP32, and unrounded."""
    ours = {
        name for row in plan(policy("tf32"), "cpu").values() if row.how == "tf32" for name in row.overloads
    }
    theirs = {name for name, category in own_table("cpu").items() if category == "lower"}
    # Overloads that another one of ours is made of: they say which output they write, or are called by it.
    assert theirs - ours <= {name for name in theirs if "out" in name.partition(".")[2]}, theirs - ours
    assert "linear" in ours
    assert "lstm.input" in ours


def test_nothing_but_products_is_touched() -> None:
    x = values(4, 8)
    layers = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1))
    with mezzo.autocast("tf32", "cpu"):
        inside = layers(x)
        loss = F.cross_entropy(x, torch.arange(4))
    assert torch.equal(inside, layers(x))
    assert torch.equal(loss, F.cross_entropy(x, torch.arange(4)))


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


def test_a_factor_changed_in_place_is_refused() -> None:
    x, weight = values(4, 8), values(3, 8).requires_grad_()
    with mezzo.autocast("tf32", "cpu"):
        out = F.linear(x, weight)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        out.sum().backward()


def test_func_and_second_derivatives() -> None:
    x, weight = values(4, 8), values(3, 8)

    def loss(w: Tensor) -> Tensor:
        with mezzo.autocast("tf32", "cpu"):
            return F.linear(x, w).square().sum()

    y = tf32(x) @ tf32(weight).t()
    expected = tf32(2.0 * y).t() @ tf32(x)
    assert torch.equal(torch.func.grad(loss)(weight), expected)
    leaf = weight.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.isfinite(second).all()
    assert second.abs().sum() > 0


def test_in_a_bf16_policy_one_module_can_be_tf32() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = values(4, 16)
    with (
        mezzo.pytorch.region.modules.apply_module_overrides(model, policy("bf16,module.1=tf32"), "cpu"),
        mezzo.autocast("bf16,module.1=tf32", "cpu"),
    ):
        out = model(x)
        inner = model[0](x)
    assert inner.dtype == torch.bfloat16
    assert out.dtype == torch.float32
    expected = F.linear(tf32(inner.float()), tf32(model[1].weight), model[1].bias)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_is_refused_and_says_why(use_reentrant: bool) -> None:
    layer, x = nn.Linear(8, 8), values(4, 8).requires_grad_()
    with (
        pytest.raises(UnsupportedPrecisionError, match=r"cpu has no TF32.*without"),
        mezzo.autocast("tf32", "cpu"),
    ):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)


def test_a_compiled_function_runs_such_a_region_as_it_is() -> None:
    layer, x = nn.Linear(8, 8), values(4, 8)

    def step(inputs: Tensor) -> Tensor:
        with mezzo.autocast("tf32", "cpu"):
            return layer(inputs).relu()

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(x), step(x))
    assert torch.equal(step(x), F.linear(tf32(x), tf32(layer.weight), layer.bias).relu())


def test_state_and_training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "tf32")
    losses = []
    for _ in range(20):
        with mp.autocast():
            loss = F.mse_loss(model(values(16, 8)), torch.ones(16, 4))
        mp.step(loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert str(mp.policy) == "tf32"
    assert torch.is_autocast_enabled("cpu") is False
