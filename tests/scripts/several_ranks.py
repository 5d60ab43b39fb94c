"""A training script on gloo ranks: each case trains a model, plants an overflow, and prints what its weights became.

Arguments: a file for the ranks to meet at, and the cases. The environment has RANK. Run it under ``mezzo run``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

RANK = int(os.environ["RANK"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + RANK))
    return x * 1e30 if bad else x


def sharded(**how: Any) -> nn.Sequential:
    net = network()
    fully_shard(net[0], **how)
    fully_shard(net[2], **how)
    return fully_shard(net, **how)


def weights(params: Iterable[Tensor]) -> list[str]:
    """Every bit of the whole parameters."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return [x.hex() for p in whole for x in p.detach().double().flatten().tolist()]


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    before_step: Callable[[], Any] = lambda: None,
    bad: int = 2,
) -> list[str]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(4):
        optimizer.zero_grad()
        net(batch(step, bad=(step, RANK) == (bad, 1))).square().mean().backward()
        before_step()
        optimizer.step()
    return weights(params)


def by_hand(params: list[Tensor], *changes: Callable[[Tensor], Any]) -> None:
    for p in params:
        assert p.grad is not None
        for change in changes:
            change(p.grad)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def fsdp() -> Any:
    net = sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return train(net, optimizer, lambda: clip_grad_norm_(net.parameters(), 1.0))


def fsdp_input() -> Any:
    """The input requires a gradient: a leaf of the graph that no optimizer owns."""
    net = sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        x = batch(step, bad=(step, RANK) == (2, 1)).requires_grad_()
        net(x).square().mean().backward()
        optimizer.step()
    return weights(net.parameters())


def fsdp_penalty() -> Any:
    """`autograd.grad` through gathered parameters, which overflows on one rank."""
    net = sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        x = batch(step).requires_grad_()
        out = net(x).square().mean() * (2000.0 if (step, RANK) == (1, 1) else 1.0)
        (grad,) = torch.autograd.grad(out, x)
        assert grad.isfinite().all()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return weights(net.parameters())


def fsdp_accumulated() -> Any:
    """The overflow is in the first of two losses, whose gradients stay unsharded until the second."""
    net = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            net.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            net(batch(2 * step + part, bad=(step, part, RANK) == (1, 0, 1))).square().mean().backward()
        optimizer.step()
    return weights(net.parameters())


def fsdp_and_plain() -> Any:
    """A plain parameter beside the shards overflows on one rank alone."""
    net, gain = sharded(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*net.parameters(), gain], lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        factor = 1e30 if (step, RANK) == (2, 1) else 1.0
        (net(batch(step)).square().mean() + (gain * factor) ** 2 * factor).backward()
        optimizer.step()
    return weights([*net.parameters()])


def ddp_clipped() -> Any:
    """What the averages hide again: gradients that are clipped by value after the reduction."""
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    return train(net, optimizer, lambda: clip_grad_value_(net.parameters(), 0.1))


def hand_reduced() -> Any:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    return train(net, optimizer, lambda: by_hand(list(net.parameters())))


def hand_cleaned() -> Any:
    """The script hides the overflow before it reduces."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    return train(net, optimizer, lambda: by_hand(list(net.parameters()), torch.nan_to_num_))


def only_here() -> Any:
    """An optimizer on rank 0 only, which overflows at one step, and a metric that all ranks reduce."""
    net, probe = DistributedDataParallel(network()), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    own = torch.optim.SGD(probe.parameters(), lr=1e-2) if RANK == 0 else None
    for step in range(4):
        optimizer.zero_grad()
        loss = net(batch(step)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
        if own is not None:
            own.zero_grad()
            probe(batch(step, bad=step == 1)).square().mean().backward()
            own.step()
    return weights(net.parameters())


def ddp_joined() -> Any:
    """Rank 1 has two batches, rank 0 four, and one of the last two overflows."""
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with net.join():
        for step in range(2 if RANK else 4):
            optimizer.zero_grad()
            net(batch(step, bad=step == 2)).square().mean().backward()
            optimizer.step()
    return weights(net.parameters())


def without_gradients() -> Any:
    """Rank 1 calls `step` once more, with no gradient."""
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        if (step, RANK) == (1, 1):
            optimizer.step()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return weights(net.parameters())


CASES = {
    name: case
    for name, case in list(globals().items())
    if callable(case) and getattr(case, "__annotations__", {}).get("return") == "Any" and name != "Any"
}


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=2)
    print(json.dumps({name: CASES[name]() for name in sys.argv[2:] or CASES}))
    sys.stdout.flush()
    dist.barrier()


if __name__ == "__main__":
    main()
