"""Which writes inside a region are followed by a product with the new value; no copy outlives the region."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo

Write = Callable[[nn.Parameter], object]
SHAPE = (5, 4)


def _by(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    p.grad = torch.ones(SHAPE)
    optimizer.step()


WRITES: dict[str, Write] = {
    "copy_": torch.no_grad()(lambda p: p.copy_(torch.ones(SHAPE))),
    "_foreach_add_": torch.no_grad()(lambda p: torch._foreach_add_([p], 1.0)),
    "init": lambda p: nn.init.normal_(p),
    "set_": torch.no_grad()(lambda p: p.set_(torch.ones(SHAPE))),
    "load_state_dict": lambda p: nn.ParameterList([p]).load_state_dict({"0": torch.ones(SHAPE)}),
    "torch's optimizer": lambda p: _by(p, torch.optim.AdamW([p], lr=0.1, fused=True)),
    "Mezzo's optimizer": lambda p: _by(p, mezzo.optim.AdamW([p], lr=0.1)),
    "in inference mode": lambda p: torch.inference_mode()(lambda: p.data.add_(1))(),
}
ALIASED: dict[str, Write] = {
    "data = t": lambda p: setattr(p, "data", torch.ones(SHAPE)),
    "detach().mul_": lambda p: p.detach().mul_(2),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(20), [p]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_after_a_write_the_new_value_is_used(write: Write) -> None:
    torch.manual_seed(0)
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"):
        before = F.linear(x, p)
        write(p)
        after = F.linear(x, p)
    assert not torch.equal(before, after), "the write changed nothing, so this row shows nothing"
    assert torch.equal(after, F.linear(x.bfloat16(), p.detach().bfloat16()))


@pytest.mark.parametrize("write", ALIASED.values(), ids=ALIASED)
def test_a_write_through_an_alias_is_used_in_the_next_region(write: Write) -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"):
        before = F.linear(x, p)
        write(p)
        assert torch.equal(F.linear(x, p), before)  # as with torch.autocast
    with mezzo.autocast("bf16", "cpu"):
        assert torch.equal(F.linear(x, p), F.linear(x.bfloat16(), p.detach().bfloat16()))


def test_a_nested_region_and_a_plain_one_inside_see_writes_too() -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"), torch.autocast("cpu", torch.bfloat16):
        F.linear(x, p)
        with mezzo.autocast("bf16,op.softmax=lower", "cpu"), torch.no_grad():
            p.zero_()
        assert F.linear(x, p).abs().max() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.set_grad_enabled(False), torch.inference_mode])
def test_a_copy_that_was_made_without_gradients_is_not_used_with_them(mode: Callable[[], Any]) -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"):
        with mode():
            F.linear(x, p)
        F.linear(x, p).sum().backward()
    assert p.grad is not None


def test_a_context_without_gradients_keeps_no_copies_unless_asked() -> None:
    net, x = nn.Linear(4, 5, bias=False), torch.randn(3, 4)
    for kept, casts_made in ((None, 2), (True, 1)):  # as the user says: generation, say
        with Casts(SHAPE) as casts, torch.no_grad(), mezzo.autocast("bf16", "cpu", cache_enabled=kept):
            net(x), net(x)
        assert len(casts.made) == casts_made
    assert torch.is_autocast_cache_enabled()


class Casts(TorchDispatchMode):
    """Watches the 16-bit copies that are made of tensors of one shape, and which of them are still alive."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.shape == self.shape and out.itemsize == 2:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out

    @property
    def alive(self) -> int:
        return sum(not copy.expired() for copy in self.made)


def test_a_weight_used_twice_is_cast_once() -> None:
    net, x = nn.Linear(4, 5, bias=False), torch.randn(3, 4)
    with Casts(SHAPE) as casts, mezzo.autocast("bf16", "cpu"):
        net(x), net(x)
        assert len(casts.made) == 1
        with torch.no_grad():
            net.weight.add_(1)
        assert casts.alive == 0
        net(x)
    assert len(casts.made) == 2


@pytest.mark.parametrize("grad", [True, False])
def test_copies_live_in_the_outermost_region_and_no_longer(grad: bool) -> None:
    net, x = nn.Linear(4, 5, bias=False), torch.randn(1, 4)
    with Casts(SHAPE) as casts, torch.set_grad_enabled(grad):
        with mezzo.autocast("bf16", "cpu"):
            with mezzo.autocast("bf16", "cpu"):
                net(x)
            assert casts.alive == grad  # where none are recorded, a copy lives as long as its use
        assert casts.alive == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_copy_lives_between_the_losses_of_a_window_nor_after_it(precision: str) -> None:
    net = nn.Linear(4, 5, bias=False)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), precision, accumulate=2)
    with Casts(SHAPE) as casts:
        for _ in range(2):
            with mp.autocast():
                loss = net(torch.randn(1, 4)).square().mean()
            mp.step(loss)
            del loss
            assert casts.alive == 0
            with mp.autocast(), torch.no_grad():
                net(torch.randn(1, 4))
            assert casts.alive == 0
    assert len(casts.made) >= 4
    mp.close()
    gone = weakref.ref(net.weight)
    del mp, net
    gc.collect()
    assert gone() is None
