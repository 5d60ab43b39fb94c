"""recompute=gelu and its like: the same bits, and fewer of them saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from alive import bytes_alive
from mezzo.pytorch.autocast import recompute
from mezzo.pytorch.memory import PeakTensorBytes

WIDTH, ROWS = 64, 256


class Block(nn.Module):
    """Norm, product, activation, product, and the input added."""

    def __init__(self, activation: Callable[[Tensor], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation, self.checkpointed = activation, checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_same_bits(activation: str, checkpointed: bool) -> None:
    def gradients(policy: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(ACTIVATIONS[activation], checkpointed) for _ in range(2)))
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with mezzo.autocast(policy, "cpu"):
            loss = model(x).float().square().mean()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    op = activation.partition(" ")[0]
    saved, again = gradients("bf16"), gradients(f"bf16,recompute={op}+layer_norm")
    assert all(torch.equal(a, b) for a, b in zip(saved, again, strict=True))


def test_what_is_not_saved() -> None:
    saved: dict[str, int] = {}
    for policy in ("bf16", "bf16,recompute=gelu", "bf16,recompute=gelu+layer_norm"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(F.gelu) for _ in range(4)))
        mezzo.lower_weights(model, "bf16")
        x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
        peak = PeakTensorBytes()
        with mezzo.autocast(policy, "cpu"):
            model(x).sum().backward()  # what is made once is made
            others = bytes_alive()
            peak.start()
            loss = model(x).sum()
        saved[policy] = peak.stop().peak_bytes - others
        del loss
    hidden, narrow = 4 * WIDTH * ROWS * 2, WIDTH * ROWS * 2
    slack = 2 * hidden  # the last block's are still there at the forward's peak
    assert saved["bf16"] - saved["bf16,recompute=gelu"] >= 4 * hidden - slack
    assert saved["bf16,recompute=gelu"] - saved["bf16,recompute=gelu+layer_norm"] >= 3 * narrow


def gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu.default(x)


def strided(x: Tensor) -> Tensor:
    return gelu(x).t().contiguous().t()


def product(op: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Any:
    """A product's result and leaves, after an op that is remembered if `recompute` is on."""
    torch.manual_seed(0)
    leaf = torch.randn(4, 8, dtype=dtype).requires_grad_()
    weight = torch.randn(3, 8, dtype=dtype).requires_grad_()
    hidden = then(op(leaf * 1))
    return F.linear(hidden, weight), hidden, (leaf, weight)


@pytest.mark.parametrize(
    ("op", "then", "dtype", "remembered"),
    [
        (gelu, lambda x: x, torch.bfloat16, 1),
        (strided, lambda x: x, torch.bfloat16, 1),
        (gelu, lambda x: x.mul_(2), torch.bfloat16, 1),  # changed before it was saved: saved as it is
        (gelu, lambda x: x, torch.float32, 0),
    ],
)
def test_gradients_of_what_follows(op: Any, then: Any, dtype: torch.dtype, remembered: int) -> None:
    before = len(recompute._made)
    recompute.push()
    try:
        out, hidden, leaves = product(recompute.remembering(op), then, dtype)
    finally:
        recompute.pop()
    assert len(recompute._made) - before == remembered
    expected, _, theirs = product(op, then, dtype)
    mine = torch.autograd.grad(out.float().square().sum(), leaves)
    other = torch.autograd.grad(expected.float().square().sum(), theirs)
    assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
    del out, hidden
    assert len(recompute._made) == before  # what is remembered dies with the output


def test_hooks_end_with_the_context_also_by_an_exception_and_inside_a_transform() -> None:
    with pytest.raises(ZeroDivisionError), mezzo.autocast("bf16,recompute=gelu", "cpu"):
        raise ZeroDivisionError

    def loss(w: Tensor) -> Tensor:
        return F.gelu(F.linear(torch.ones(2, 8), w)).float().sum()

    inside = (mezzo.autocast(policy, "cpu")(loss) for policy in ("bf16,recompute=gelu", "bf16"))
    weight = torch.randn(8, 8)
    assert torch.equal(*(torch.func.grad(of)(weight) for of in inside))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
