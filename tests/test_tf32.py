"""TF32 on a machine without it: rounding to the bit of `mezzo.formats`, and a region's products of rounded factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from alive import bytes_alive
from mezzo.core import formats
from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.core.policy import policy
from mezzo.core.rules import Rule
from mezzo.pytorch.autocast.modules import apply_module_overrides
from mezzo.pytorch.autocast.plan import own_table, plan
from mezzo.pytorch.kernels.tf32 import round_tf32
from releases import before_torch


def patterns() -> Tensor:
    """FP32s of both signs: each exponent, with mantissas around a TF32, a tie, and both ends."""
    exponents = np.arange(256)[:, None, None] << 23
    kept = np.array([0, 1, 2, 511, 512, 1022, 1023])[None, :, None] << 13
    ends = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])[None, None, :]
    magnitudes = (exponents | kept | ends).ravel()
    both = np.concatenate([magnitudes, magnitudes | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(both.view(np.float32))


def test_it_is_the_format_to_the_bit_in_any_layout() -> None:
    x = patterns()
    before, got, wanted = x.clone(), round_tf32(x), formats.round(x, "tf32")
    same = (got.view(torch.int32) == wanted.view(torch.int32)) | got.isnan() & wanted.isnan()
    assert same.all()
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    x = torch.randn(7, 11, 256)
    channels_last = x[:, :, :12].reshape(7, 11, 3, 4).to(memory_format=torch.channels_last)
    for view in (x.permute(2, 0, 1), x[:, ::3], x[:1].expand(3, -1, -1), x[:0], channels_last):
        got = round_tf32(view)
        assert torch.equal(got, formats.round(view, "tf32"))
        assert got.numel() == 0 or got.data_ptr() != view.data_ptr()


def tf32(x: Tensor) -> Tensor:
    return formats.round(x.detach(), "tf32")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The op, its factors, what is added (never rounded).
OPS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], tuple[int, ...] | None]] = {
    "linear": (F.linear, [(5, 7), (3, 7)], (3,)),
    "matmul": (lambda x, y, _: x @ y, [(4, 5, 6), (4, 6, 3)], None),
    "baddbmm": (lambda x, y, a: torch.baddbmm(a, x, y), [(2, 5, 6), (2, 6, 3)], (2, 5, 3)),
    "einsum": (lambda x, y, _: torch.einsum("ij,kj->ik", x, y), [(5, 6), (3, 6)], None),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 3, 6, 6), (4, 3, 3, 3)], (4,)),
}


@pytest.mark.parametrize(("op", "shapes", "added"), OPS.values(), ids=OPS)
def test_factors_are_rounded_and_addends_are_not(op: Any, shapes: Any, added: Any) -> None:
    factors = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    addend = None if added is None else values(*added, seed=2)
    leaves = [x.clone().requires_grad_() for x in factors]
    by_hand = [tf32(x).requires_grad_() for x in factors]
    with mezzo.autocast("tf32", "cpu"):
        out = op(*leaves, addend)
    expected = op(*by_hand, addend)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert not torch.equal(out, op(*factors, addend)), "inputs that TF32 holds anyway show nothing"
    gradient = values(*out.shape, seed=9)
    out.backward(gradient)
    expected.backward(tf32(gradient))
    assert all(torch.equal(leaf.grad, other.grad) for leaf, other in zip(leaves, by_hand))


def test_sixteen_bit_and_fp64_tensors() -> None:
    weight = values(3, 7)
    with mezzo.autocast("tf32", "cpu"):
        assert F.linear(values(2, 7).bfloat16(), weight).dtype == torch.float32
        assert F.linear(values(2, 7).double(), weight.double()).dtype == torch.float64


def test_every_op_that_pytorch_would_lower_is_ours() -> None:
    """The context's autocast is on, so an op left to PyTorch's table would be cast: to FP32, and unrounded."""
    plans = plan(policy("tf32"), "cpu").values()
    ours = {name for row in plans if row.kernel and row.kernel.kind == "tf32" for name in row.overloads}
    theirs = {name for name, rule in own_table("cpu").items() if rule is Rule.LOWER}
    assert theirs
    assert theirs - ours == set()


def test_rounded_factors_are_not_kept() -> None:
    layers, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), values(64, 256)
    alive = []
    for precision in ("tf32", "fp32"):
        before = bytes_alive()
        with mezzo.autocast(precision, "cpu"):
            out = layers(x)
        alive.append(bytes_alive() - before)
        del out
    assert alive[0] == alive[1]


def test_in_a_bf16_policy_one_module_can_be_tf32() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = values(4, 16)
    spec = policy("bf16,module.1=tf32")
    with apply_module_overrides(model, spec, "cpu"), mezzo.autocast(spec, "cpu"):
        out = model(x)
        inner = model[0](x)
    assert (inner.dtype, out.dtype) == (torch.bfloat16, torch.float32)
    expected = F.linear(tf32(inner.float()), tf32(model[1].weight), model[1].bias)
    assert torch.equal(out, expected)


def test_checkpointing_is_refused_and_says_why() -> None:
    layer, x = nn.Linear(8, 8), values(4, 8).requires_grad_()
    with mezzo.autocast("tf32", "cpu"), pytest.raises(UnsupportedPrecisionError, match=r"cpu has no TF32"):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def test_a_compiled_function_runs_such_a_context_as_it_is() -> None:
    layer, x = nn.Linear(8, 8), values(4, 8)
    step = mezzo.autocast("tf32", "cpu")(lambda inputs: layer(inputs).relu())
    before_torch(2, 13, "Dynamo warns of a dictionary's method at the graph break")
    assert torch.equal(torch.compile(step, backend="eager")(x), step(x))
    assert torch.equal(step(x), F.linear(tf32(x), tf32(layer.weight), layer.bias).relu())
