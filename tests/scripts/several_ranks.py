"""A training script on gloo ranks: each case trains a model, plants an overflow, and prints what its weights became.

Arguments: a file for the ranks to meet at, their number, and the cases. The environment has RANK. Run it under
``mezzo run``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

RANK = int(os.environ["RANK"])
Losses = Callable[[int], Iterable[Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + RANK))
    return x * 1e30 if bad else x


def sharded() -> Any:
    net = network()
    fully_shard(net[0])
    fully_shard(net[2])
    return fully_shard(net)


def weights(params: Iterable[Tensor]) -> list[str]:
    """Every bit of the whole parameters."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return [x.hex() for p in whole for x in p.detach().double().flatten().tolist()]


def squared(net: nn.Module, *, bad: int = 2) -> Losses:
    """One loss per step, which overflows on rank 1 at one step."""
    return lambda step: [net(batch(step, bad=(step, RANK) == (bad, 1))).square().mean()]


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def train(
    net: nn.Module,
    losses: Losses,
    before_step: Callable[[], Any] = lambda: None,
    *,
    steps: int = 4,
    params: Iterable[Tensor] = (),
    make: Callable[[list[Tensor]], torch.optim.Optimizer] = sgd,
    in_closure: bool = False,
) -> list[str]:
    """Train with the optimizer that `make` makes, which computes its gradients itself `in_closure`."""
    params = list(params) or list(net.parameters())
    optimizer = make(params)

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        for loss in losses(step):
            loss.backward()
        before_step()
        return loss

    for step in range(steps):
        if in_closure:
            optimizer.step(partial(closure, step))
        else:
            closure(step)
            optimizer.step()
    return weights(params)


def fsdp() -> Any:
    net = sharded()
    return train(net, squared(net), lambda: clip_grad_norm_(net.parameters(), 1.0))


def fsdp_input() -> Any:
    """The input requires a gradient: a leaf of the graph that no optimizer owns."""
    net = sharded()
    return train(
        net, lambda step: [net(batch(step, bad=(step, RANK) == (2, 1)).requires_grad_()).square().mean()]
    )


def fsdp_penalty() -> Any:
    """`autograd.grad` through gathered parameters, which overflows on one rank."""
    net = sharded()

    def losses(step: int) -> Iterable[Tensor]:
        x = batch(step).requires_grad_()
        out = net(x).square().mean() * (2000.0 if (step, RANK) == (1, 1) else 1.0)
        assert torch.autograd.grad(out, x)[0].isfinite().all()
        yield net(batch(step)).square().mean()

    return train(net, losses, steps=3)


def fsdp_accumulated() -> Any:
    """The overflow is in the first of two losses, whose gradients stay unsharded until the second."""
    net = sharded()

    def losses(step: int) -> Iterable[Tensor]:
        for part in range(2):
            net.set_requires_gradient_sync(part == 1)
            yield net(batch(2 * step + part, bad=(step, part, RANK) == (1, 0, 1))).square().mean()

    return train(net, losses, steps=3)


def fsdp_and_plain() -> Any:
    """A plain parameter beside the shards overflows on one rank alone."""
    net, gain = sharded(), nn.Parameter(torch.ones(()))

    def losses(step: int) -> Iterable[Tensor]:
        factor = 1e30 if (step, RANK) == (2, 1) else 1.0
        yield net(batch(step)).square().mean() + (gain * factor) ** 2 * factor

    return train(net, losses, params=[*net.parameters(), gain])[:-1]  # which is not reduced


def ddp_joined(*, in_closure: bool = False) -> Any:
    """Rank 1 has two batches, rank 0 four, and one of the last two overflows."""
    net = DistributedDataParallel(network())
    losses = squared(net) if in_closure else lambda step: [net(batch(step, bad=step == 2)).square().mean()]
    with net.join():
        train(net, losses, steps=2 if RANK else 4, in_closure=in_closure)
    return weights(net.parameters())  # which the rank that ends last has sent


def ddp_joined_closure() -> Any:
    """Steps that compute their gradients themselves, of which rank 1 takes fewer."""
    return ddp_joined(in_closure=True)


def reduce_each(net: nn.Module, *, hide: bool = False) -> None:
    """Reduce the gradients, after an overflow in them is hidden."""
    for p in net.parameters():
        if hide:
            p.grad.nan_to_num_()
        dist.all_reduce(p.grad)


def hand_cleaned() -> Any:
    """Gradients that the script reduces itself, after it has hidden the overflow."""
    net = network()
    return train(net, squared(net), lambda: reduce_each(net, hide=True))


def hand_hooked() -> Any:
    """Gradients that a hook of the optimizer reduces, which runs in its step."""
    net = network()

    def hooked(params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = sgd(params)
        optimizer.register_step_pre_hook(lambda *_: reduce_each(net))
        return optimizer

    return train(net, squared(net), make=hooked)


def hand_twice() -> Any:
    """Two optimizers of the same gradients, whose overflow the script hides after the first one has stepped."""
    net = network()
    optimizers = [sgd(net.parameters()) for _ in range(2)]
    for step in range(4):
        net.zero_grad()
        next(iter(squared(net)(step))).backward()
        reduce_each(net)
        for optimizer in optimizers:
            optimizer.step()
            for p in net.parameters():
                p.grad.nan_to_num_()
    return weights(net.parameters())


def hand_local() -> Any:
    """Gradients are reduced in the first step only, in tensors that stay, and the weights at the end."""
    net = network()
    optimizer = sgd(net.parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        next(iter(squared(net)(step))).backward()
        if step == 0:
            reduce_each(net)
        before = weights(net.parameters())
        optimizer.step()
        assert (weights(net.parameters()) == before) == ((step, RANK) == (2, 1))
    for p in net.parameters():
        dist.all_reduce(p.data)
    return weights(net.parameters())


class TwoOutputs(nn.Module):
    """A loss, an output that the loss does not use, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = network(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.net[0](x)
        return {"loss": self.net[2](hidden).square().mean(), "hidden": hidden}


def ddp_unused() -> Any:
    net = DistributedDataParallel(TwoOutputs(), find_unused_parameters=True)
    return train(net, lambda step: [net(batch(step, bad=(step, RANK) == (1, 1)))["loss"]], steps=3)


def ddp_closure() -> Any:
    """A step that computes its gradients itself; on one rank the loss is not finite at any scale."""
    net = DistributedDataParallel(network())
    return train(net, squared(net), in_closure=True)


class Sharpness(torch.optim.Optimizer):
    """Moves the weights by gradients that it finds, and back by those of its closure; clears both itself."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        params = self.param_groups[0]["params"]
        moves = [p.grad * 0.1 for p in params]
        for p, move in zip(params, moves):
            p.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, move in zip(params, moves):
            p.sub_(move + 0.01 * p.grad)
        self.zero_grad()


def ddp_sharpness() -> Any:
    """The gradients that overflow are those that the step begins with."""
    net = DistributedDataParallel(network())
    optimizer = Sharpness(net.parameters(), {})
    losses = squared(net, bad=1)
    for step in range(4):
        next(iter(losses(step))).backward()
        optimizer.step(lambda: next(iter(losses(0))).backward())
    return weights(net.parameters())


def ddp_compressed() -> Any:
    """PowerSGD adds its errors to later gradients: not those of a skipped step."""
    net = DistributedDataParallel(network())
    net.register_comm_hook(
        PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook
    )
    return train(net, squared(net), steps=5)


def reduce_flat(net: nn.Module) -> None:
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for grad, total in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        grad.copy_(total / dist.get_world_size())


def hand_flat() -> Any:
    """Gradients that the script copies into a flat buffer, reduces, and copies back."""
    net = network()
    return train(net, squared(net), partial(reduce_flat, net))


def hand_flat_closure() -> Any:
    """The same in a closure, whose loss is not finite on one rank, at any scale."""
    net = network()
    lbfgs = partial(torch.optim.LBFGS, lr=1e-2, max_iter=2, tolerance_change=0.0)
    return train(net, squared(net), partial(reduce_flat, net), make=lbfgs, in_closure=True)


def zero() -> Any:
    """`ZeroRedundancyOptimizer` gives the parameters with gradients to one rank, and the unused one to the other."""
    net = DistributedDataParallel(TwoOutputs(), find_unused_parameters=True)
    net.module.net[0].requires_grad_(False)
    return train(
        net,
        lambda step: [net(batch(step, bad=(step, RANK) == (2, 1)))["loss"]],
        params=[net.module.net[2].weight, nn.Parameter(torch.ones(99))],
        make=lambda params: ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1e-2),
    )


class Branches(nn.Module):
    """The sum of two networks' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = network(), network()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.one(x).square().mean() + self.two(z).square().mean()


def shared() -> Any:
    """Two optimizers after one backward pass. The gradients of the second one overflow, after the first has stepped."""
    net = DistributedDataParallel(Branches())
    optimizers = [sgd(part.parameters()) for part in net.module.children()]
    for step in range(4):
        net.zero_grad()
        net(batch(step), batch(step, bad=(step, RANK) == (2, 1))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(net.parameters())


def slow() -> Any:
    """Rank 1 is late at each backward pass, and at each step."""
    net = DistributedDataParallel(network())

    def losses(step: int) -> Iterable[Tensor]:
        time.sleep(0.1 * RANK)
        yield from squared(net)(step)

    return train(net, losses, lambda: time.sleep(0.1 * RANK))


def only_here() -> Any:
    """An optimizer on rank 0 only, which overflows at one step, and a metric that all ranks reduce."""
    net, probe = DistributedDataParallel(network()), network()
    own = sgd(probe.parameters())

    def losses(step: int) -> Iterable[Tensor]:
        if RANK == 0 and step:
            own.zero_grad()
            probe(batch(step, bad=step == 2)).square().mean().backward()
            own.step()
        loss = net(batch(step)).square().mean()
        dist.all_reduce(loss.detach())
        yield loss

    steps = itertools.count()
    # One step is without gradients on all ranks, which wait for each other.
    return train(net, losses, lambda: net.zero_grad() if next(steps) == 1 else None)


def main() -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=int(sys.argv[2])
    )
    print(json.dumps({name: globals()[name]() for name in sys.argv[3:]}))
    sys.stdout.flush()
    dist.barrier()
    gc.collect()  # see ../children/leaving.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
