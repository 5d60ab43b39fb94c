"""recompute=gelu and its like: the same bits, fewer of them kept, and no silence where an input has changed."""

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

    def __init__(self, activation: Callable[[Tensor], Tensor], *, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = activation
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
}


def gradients(policy: str, activation: str, **arguments: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(ACTIVATIONS[activation], **arguments) for _ in range(2)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with mezzo.autocast(policy, "cpu"):
        loss = model(x).float().square().mean()
    loss.backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_same_bits(activation: str, checkpointed: bool) -> None:
    op = activation.partition(" ")[0]
    kept = gradients("bf16", activation, checkpointed=checkpointed)
    again = gradients(f"bf16,recompute={op}+layer_norm", activation, checkpointed=checkpointed)
    assert len(kept) == 13
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_what_is_not_kept() -> None:
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
    without = saved["bf16,recompute=gelu"] - saved["bf16,recompute=gelu+layer_norm"]
    assert without >= 3 * narrow


def through(op: Callable[..., Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    recompute.push()
    try:
        hidden = recompute.remembering(op)(x)
        return hidden, F.linear(hidden, weight)
    finally:
        recompute.pop()


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    return x.requires_grad_(), torch.randn(3, 8, dtype=torch.bfloat16).requires_grad_()


def test_an_input_that_changed_since_is_an_error() -> None:
    leaf, weight = tensors()
    x = leaf * 1
    _, out = through(torch.ops.aten.gelu.default, x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_output_that_changed_before_it_was_saved_is_kept_as_it_is() -> None:
    leaf, weight = tensors()
    recompute.push()
    try:
        hidden = recompute.remembering(torch.ops.aten.gelu.default)(leaf).mul_(2)
        out = F.linear(hidden, weight)
    finally:
        recompute.pop()
    out.float().square().sum().backward()
    expected_x, expected_weight = tensors()
    F.linear(F.gelu(expected_x).mul_(2), expected_weight).float().square().sum().backward()
    assert leaf.grad is not None
    assert expected_x.grad is not None
    assert torch.equal(leaf.grad, expected_x.grad)
    assert weight.grad is not None
    assert expected_weight.grad is not None
    assert torch.equal(weight.grad, expected_weight.grad)


def test_a_part_of_an_output_is_recomputed_as_that_part() -> None:
    leaf, weight = tensors()
    hidden, out = through(lambda x: torch.ops.aten.gelu.default(x).t().contiguous().t(), leaf, weight)
    assert not hidden.is_contiguous()
    out.float().square().sum().backward()
    expected_x, expected_weight = tensors()
    F.linear(F.gelu(expected_x), expected_weight).float().square().sum().backward()
    assert leaf.grad is not None
    assert expected_x.grad is not None
    assert torch.equal(leaf.grad, expected_x.grad)


def test_notes_die_with_their_outputs() -> None:
    leaf, weight = tensors()
    before = len(recompute._made)
    hidden, out = through(torch.ops.aten.gelu.default, leaf, weight)
    assert len(recompute._made) == before + 1
    del hidden, out
    assert len(recompute._made) == before


def test_an_fp32_output_is_kept() -> None:
    leaf = torch.randn(4, 8).requires_grad_()
    before = len(recompute._made)
    hidden, _ = through(torch.ops.aten.gelu.default, leaf, torch.randn(3, 8).requires_grad_())
    assert len(recompute._made) == before
    del hidden


def test_hooks_end_with_the_region_also_by_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), mezzo.autocast("bf16,recompute=gelu", "cpu"):
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_inside_a_transform_all_is_kept() -> None:
    weight = torch.randn(8, 8)

    def loss(policy: str) -> Callable[[Tensor], Tensor]:
        def of(w: Tensor) -> Tensor:
            with mezzo.autocast(policy, "cpu"):
                return F.gelu(F.linear(torch.ones(2, 8), w)).float().sum()

        return of

    found = torch.func.grad(loss("bf16,recompute=gelu"))(weight)
    assert torch.equal(found, torch.func.grad(loss("bf16"))(weight))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
