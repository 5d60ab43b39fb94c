"""Max-pooling keeps short indices: the same numbers as PyTorch's, to the bit, and fewer bytes alive until backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mezzo
from alive import bytes_alive

Pool = Callable[[Tensor], Tensor]

# name -> input shape, op
POOLS: dict[str, tuple[tuple[int, ...], Pool]] = {
    "1d": ((4, 32, 512), lambda x: F.max_pool1d(x, 2)),
    "2d overlapping, padded, dilated": ((4, 32, 33, 31), lambda x: F.max_pool2d(x, 3, stride=2, padding=1,
     dilation=2)),
    "2d, a plane of more than 2^15": ((1, 2, 200, 300), lambda x: F.max_pool2d(x, 2)),
    "2d channels_last": ((4, 32, 32, 32), lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2)),
    "3d": ((2, 8, 16, 16, 16), lambda x: F.max_pool3d(x, 2)),
}  # fmt: skip


def _gradients(x: Tensor, pool: Pool, region: bool) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    with mezzo.autocast("bf16") if region else nullcontext():
        y = pool(leaf)
    (y.float() * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@pytest.mark.parametrize("special", [False, True], ids=["numbers", "NaN, infinities, ties"])
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_gradients_are_pytorchs(name: str, dtype: torch.dtype, special: bool) -> None:
    shape, pool = POOLS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if special:
        x = x.round()  # ties everywhere
        x.view(-1)[::97] = float("nan")
        x.view(-1)[::89] = float("inf")
        x.view(-1)[::83] = -float("inf")
    theirs, ours = _gradients(x, pool, region=False), _gradients(x, pool, region=True)
    for a, b in zip(theirs, ours):
        assert torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


@pytest.mark.parametrize(("name", "per_index"), [("1d", 2), ("2d, a plane of more than 2^15", 4)])
def test_what_is_kept(name: str, per_index: int) -> None:
    shape, pool = POOLS[name]
    x = torch.randn(shape).bfloat16().requires_grad_()
    before = bytes_alive()
    with mezzo.autocast("bf16"):
        y = pool(x)
    assert bytes_alive() - before == y.numel() * (y.element_size() + per_index)
