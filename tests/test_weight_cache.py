"""Which writes inside a region are followed by a product with the new value; no copy outlives the region."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo

Write = Callable[[nn.Parameter], object]
SHAPE = (5, 4)


def _held_alias(p: nn.Parameter) -> None:
    p.data.view(-1)[2:].mul_(3)


def _bits(p: nn.Parameter) -> None:
    p.data.view(torch.int32).add_(1 << 20)


def _unrecorded(act: Callable[[nn.Parameter], object]) -> Write:
    def write(p: nn.Parameter) -> None:
        with torch.no_grad():
            act(p)

    return write


def _assign(p: nn.Parameter) -> None:
    p.data = torch.ones(SHAPE)


def _adam(p: nn.Parameter) -> None:
    p.grad = torch.ones(SHAPE)
    torch.optim.AdamW([p], lr=0.1, fused=True).step()


def _mezzo_adam(p: nn.Parameter) -> None:
    p.grad = torch.ones(SHAPE)
    mezzo.optim.AdamW([p], lr=0.1).step()


def _load(p: nn.Parameter) -> None:
    holder = nn.Module()
    holder.p = p
    holder.load_state_dict({"p": torch.ones(SHAPE)})


def _set_items(p: nn.Parameter) -> None:
    p.data[0] = 1
    p.data[1, 1] = 2.0
    p.data[p.data > 0] = 0.5


WRITES: dict[str, Write] = {
    "add_ under no_grad": _unrecorded(lambda p: p.add_(1)),
    "add_ of a tensor": _unrecorded(lambda p: p.add_(torch.ones(SHAPE), alpha=2)),
    "copy_": _unrecorded(lambda p: p.copy_(torch.ones(SHAPE))),
    "_foreach_add_": _unrecorded(lambda p: torch._foreach_add_([p], 1.0)),
    "p[0] = 1": _unrecorded(lambda p: p.__setitem__(0, 1)),
    "index_put_": _unrecorded(lambda p: p.index_put_((torch.tensor([1]),), torch.tensor(3.0))),
    "relu_": _unrecorded(lambda p: p.relu_()),
    "mul_.Scalar": _unrecorded(lambda p: torch.ops.aten.mul_.Scalar(p, 2)),
    "add_.Scalar": _unrecorded(lambda p: torch.ops.aten.add_.Scalar(p, 2)),
    "sub_.Scalar": _unrecorded(lambda p: torch.ops.aten.sub_.Scalar(p, 2)),
    "div_.Scalar": _unrecorded(lambda p: torch.ops.aten.div_.Scalar(p, 2)),
    "init": lambda p: nn.init.normal_(p),
    "set_": _unrecorded(lambda p: p.set_(torch.ones(SHAPE))),
    "a view with a gradient": _unrecorded(lambda p: torch.enable_grad()(lambda: p.view(-1))().add_(1)),
    "load_state_dict": _load,
    "torch's optimizer": _adam,
    "Mezzo's optimizer": _mezzo_adam,
    "in inference mode": lambda p: torch.inference_mode()(lambda: p.add_(1))(),
    "data in inference mode": lambda p: torch.inference_mode()(lambda: p.data.add_(1))(),
}
ALIASED: dict[str, Write] = {
    "data.add_": lambda p: p.data.add_(1),
    "data.clamp_ (WGAN)": lambda p: p.data.clamp_(-0.01, 0.01),
    "data = t": _assign,
    "data: a part of a view": _held_alias,
    "data: its bits": _bits,
    "detach().mul_": lambda p: p.detach().mul_(2),
    "_foreach_ of data": lambda p: torch._foreach_mul_([torch.ones(2), p.data], 2.0),
    "data[...] = ": _set_items,
    "out=": lambda p: torch.add(torch.ones(SHAPE), 1, out=p.data),
    "transposed": lambda p: p.data.t().mul_(2),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(20), [p]),
}
READS: dict[str, Callable[[nn.Parameter, Tensor], Tensor]] = {
    "linear": lambda p, x: F.linear(x, p),
    "matmul": lambda p, x: x @ p.t(),
}


def _expected(read: Callable[[Any, Tensor], Tensor], p: nn.Parameter, x: Tensor) -> Tensor:
    return read(p.detach().bfloat16(), x.bfloat16())


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_after_a_write_the_new_value_is_used(write: Write) -> None:
    for name, read in READS.items():
        torch.manual_seed(0)
        p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
        with mezzo.autocast("bf16", "cpu"):
            before = read(p, x)
            write(p)
            after = read(p, x)
        assert not torch.equal(before, after), f"{name}: the write changed nothing, so this row shows nothing"
        assert torch.equal(after, _expected(read, p, x)), name


@pytest.mark.parametrize("write", ALIASED.values(), ids=ALIASED)
def test_a_write_through_an_alias_is_used_in_the_next_region(write: Write) -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"):
        before = F.linear(x, p)
        write(p)
        assert torch.equal(F.linear(x, p), before)  # as with torch.autocast
    with mezzo.autocast("bf16", "cpu"):
        assert torch.equal(F.linear(x, p), _expected(READS["linear"], p, x))


def test_a_nested_region_and_a_plain_one_inside_see_writes_too() -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"), torch.autocast("cpu", torch.bfloat16):
        F.linear(x, p)
        with mezzo.autocast("bf16,op.softmax=lower", "cpu"), torch.no_grad():
            p.zero_()
        assert F.linear(x, p).abs().max() == 0


def test_a_loop_in_one_region_equals_the_one_with_a_region_a_step() -> None:
    def train(one_region: bool) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        x, y = torch.randn(16, 4), torch.randn(16, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()

        if one_region:
            with mezzo.autocast("bf16", "cpu"):
                for _ in range(5):
                    step()
        else:
            for _ in range(5):
                with mezzo.autocast("bf16", "cpu"):
                    step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.set_grad_enabled(False), torch.inference_mode])
def test_a_copy_that_was_made_without_gradients_is_not_used_with_them(mode: Callable[[], Any]) -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("bf16", "cpu"):
        with mode():
            F.linear(x, p)
        F.linear(x, p).sum().backward()
    assert p.grad is not None


def test_a_region_without_gradients_keeps_no_copies_unless_asked() -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)

    def casts_of_two_reads() -> int:
        del casts.made[:]
        F.linear(x, p)
        F.linear(x, p)
        return len(casts.made)

    with Casts(SHAPE) as casts, torch.no_grad():
        with mezzo.autocast("bf16", "cpu"):
            assert casts_of_two_reads() == 2
        with mezzo.autocast("bf16", "cpu", cache_enabled=True):  # as the user says: generation, say
            assert casts_of_two_reads() == 1
    assert torch.is_autocast_cache_enabled()


def test_ops_that_write_have_no_kernel_of_ours() -> None:
    with mezzo.autocast("bf16", "cpu"):
        pass
    for op in (
        "add_.Tensor",
        "copy_",
        "mul_.Tensor",
        "sum.IntList_out",
        "mean.out",
        "relu_",
        "zero_",
        "detach",
    ):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCPU"), op


def test_an_activation_of_no_interest_costs_no_copies() -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with Casts(SHAPE) as casts, mezzo.autocast("bf16", "cpu"):
        h = F.linear(x, p)
        h.detach()
        h.data.mul_(2)
        x.detach()
        F.linear(x, p)
    assert len(casts.made) == 1


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
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with Casts(SHAPE) as casts, mezzo.autocast("bf16", "cpu"):
        F.linear(x, p)
        F.linear(x, p)
        assert len(casts.made) == 1
        with torch.no_grad():
            p.add_(1)
        assert casts.alive == 0
        F.linear(x, p)
    assert len(casts.made) == 2


NUMBERS: dict[str, Callable[[Tensor], object]] = {
    "x += 1": lambda x: x.add_(1),
    "x *= 0.1": lambda x: x.mul_(0.1),
    "x -= 2, alpha": lambda x: x.sub_(2, alpha=3),
    "x /= 3": lambda x: x.div_(3),
    "x **= 2": lambda x: x.pow_(2),
    "x[0] = 2.5": lambda x: x.__setitem__(0, 2.5),
    "x[mask] = 1": lambda x: x.__setitem__(x > 0, 1),
    "x[index] = number": lambda x: x.__setitem__((torch.tensor([0, 1]), torch.tensor([1, 0])), 7),
    "x[:, 1] = number": lambda x: x.__setitem__((slice(None), 1), -1.5),
    "fill_": lambda x: x.fill_(2),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, -1.0),
    "clamp_": lambda x: x.clamp_(min=0.25),
    "lerp_": lambda x: x.lerp_(torch.ones_like(x), 0.5),
    "addcmul_": lambda x: x.addcmul_(x, x, value=0.5),
    "normal_ with a generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(1)),
    "copy_ of another format": lambda x: x.copy_(torch.arange(20).view(SHAPE)),
    "_foreach_addcdiv_": lambda x: torch._foreach_addcdiv_([x], [x], [x + 4], value=0.5),
    "out=": lambda x: torch.mul(x, 2, out=x),
    "two outs": lambda x: torch.max(x.clone(), 0, out=(x[0], torch.empty(4, dtype=torch.int64))),
    "resize_": lambda x: x.resize_(2, 2),
    "a step": lambda x: x.logical_not_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("write", NUMBERS.values(), ids=NUMBERS)
def test_a_write_does_in_a_region_what_it_does_outside(
    write: Callable[[Tensor], object], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    outside = torch.randn(SHAPE).to(dtype)
    inside = outside.clone()
    write(outside)
    with mezzo.autocast("bf16", "cpu"):
        write(inside)
    assert torch.equal(outside, inside)
    assert outside.dtype is inside.dtype


def test_a_leaf_that_requires_a_gradient_is_still_refused() -> None:
    p = nn.Parameter(torch.randn(SHAPE))
    with mezzo.autocast("bf16", "cpu"), pytest.raises(RuntimeError, match="leaf Variable"):
        p.add_(1)


def test_data_is_what_it_was_outside_regions() -> None:
    with mezzo.autocast("bf16", "cpu"):
        pass
    p = nn.Parameter(torch.randn(SHAPE))
    assert p.data.data_ptr() == p.data_ptr()
    assert not p.data.requires_grad
    p.data = torch.zeros(2)
    assert p.shape == (2,)
    with pytest.raises(TypeError):
        p.data = 3  # type: ignore[assignment]
    assert torch.compile(lambda t: t.data * 2, backend="eager", fullgraph=True)(p).tolist() == [0, 0]
    assert torch.compile(lambda t: t.detach() * 2, backend="eager", fullgraph=True)(p).tolist() == [0, 0]


@pytest.mark.parametrize("grad", [True, False])
def test_copies_live_in_the_outermost_region_and_no_longer(grad: bool) -> None:
    net, x = nn.Linear(4, 5, bias=False), torch.randn(1, 4)
    with Casts(SHAPE) as casts, torch.set_grad_enabled(grad):
        with mezzo.autocast("bf16", "cpu"):
            with mezzo.autocast("bf16", "cpu"):
                net(x)
            assert casts.alive == grad  # where none are recorded, a copy lives as long as its use
        assert casts.alive == 0


def test_no_copy_lives_after_an_error_in_a_region() -> None:
    net = nn.Linear(4, 5, bias=False)
    with Casts(SHAPE) as casts:
        with contextlib.suppress(ZeroDivisionError), mezzo.autocast("bf16", "cpu"):
            net(torch.randn(1, 4))
            raise ZeroDivisionError
        assert len(casts.made) == 1
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_write_between_two_losses_of_a_window_is_seen(precision: str) -> None:
    net = nn.Linear(4, 3, bias=False)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), precision, accumulate=2)
    with mp.autocast():
        mp.step(net(torch.ones(1, 4)).sum())
    net.weight.data.zero_()
    with mp.autocast():
        assert net(torch.ones(1, 4)).abs().max() == 0
        mp.step(net(torch.ones(1, 4)).sum())
    mp.close()


def test_emulated_fp16_sees_writes() -> None:
    p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
    with mezzo.autocast("fp16", "cpu"):
        F.linear(x, p)
        p.data.zero_()
        assert F.linear(x, p).abs().max() == 0


def test_a_policys_first_region_sees_writes_too() -> None:
    """A policy's first entry is a genuine `torch.autocast`'s; later ones are not."""
    for _ in range(2):
        p, x = nn.Parameter(torch.randn(SHAPE)), torch.randn(3, 4)
        with torch.no_grad(), mezzo.autocast("bf16,op.tan=lower,op.sinh=lower", "cpu"):
            F.linear(x, p)
            p.zero_()
            assert F.linear(x, p).abs().max() == 0
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_leaves_the_cache_as_it_was(use_reentrant: bool) -> None:
    class Aliases(torch.autograd.Function):
        """Looks at its parameter through `detach` in backward, as kernels do."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
            ctx.parameter = p
            return x * p.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return grad * ctx.parameter.detach(), grad.sum(0)

    p, x = nn.Parameter(torch.ones(4)), torch.randn(3, 4, requires_grad=True)
    with mezzo.autocast("bf16", "cpu"):
        out = torch.utils.checkpoint.checkpoint(lambda y: Aliases.apply(y, p), x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert torch.is_autocast_cache_enabled()
    net = nn.Linear(4, 4)
    with mezzo.autocast("bf16", "cpu"):
        with torch.no_grad():
            net(x)
        assert torch.is_autocast_cache_enabled()
