"""One of two gloo ranks: agrees with the other on each case, and prints what it got, as JSON, with every bit.

Arguments: rank, a file for the ranks to meet at.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsdp_cases
import provenance_cases
import torch
import torch.distributed as dist
from leaving import leave
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.core import records
from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import Ranks, local, named, own_squares, ranks_of, replica_groups


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def bits(found: Tensor | None, squares: Tensor, ranks: Ranks) -> dict[str, Any]:
    agreed = ranks.agreed(found, squares.reshape(1))
    assert agreed.squares.dtype is torch.float64
    return {
        "found": None if agreed.found is None else float(agreed.found).hex(),
        "total": agreed.squares.item().hex(),
    }


def counted(params: list[Tensor], ranks: Ranks) -> Tensor:
    return own_squares(params, ranks)[1]


def whole() -> float:
    """The sum of squares of the mean gradient, by PyTorch in one process."""
    net = model()
    for rank in (0, 1):
        (net(data(rank)).square().mean() / 2).backward()
    return float(sum(p.grad.double().square().sum() for p in net.parameters() if p.grad is not None))


def trained(net: nn.Module, rank: int) -> list[Tensor]:
    net(data(rank)).square().mean().backward()
    return list(net.parameters())


def replicated(rank: int) -> dict[str, Any]:
    net = DistributedDataParallel(model())
    params = trained(net, rank)
    ranks = ranks_of(params, replica_groups(net))
    return bits(torch.zeros(()), counted(params, ranks), ranks) | {"whole": whole()}


def sharded(rank: int) -> dict[str, Any]:
    net = model()
    fully_shard(net[0])
    fully_shard(net)
    params = trained(net, rank)
    ranks = ranks_of(params)
    own = counted(params, ranks)
    return bits(None, own, ranks) | {"whole": whole(), "own": float(own)}


def copies(rank: int) -> dict[str, Any]:
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    params = trained(net, rank)
    ranks = ranks_of(params)
    return bits(None, counted(params, ranks), ranks) | {"whole": whole()}


def mixed(rank: int) -> dict[str, Any]:
    """One parameter in shards, one whole, one without gradient."""
    mesh = init_device_mesh("cpu", (2,))
    cut = nn.Parameter(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    cut.grad = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([3.0, 4.0])
    still = nn.Parameter(torch.zeros(2))
    params = [plain, cut, still]
    return bits(None, counted(params, ranks_of(params)), ranks_of(params))


def parts_to_add(rank: int) -> dict[str, Any]:
    """A gradient that is still a sum over ranks; one that lies whole on each."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Partial()])
    got = local(param.grad)
    ranks = ranks_of([param])
    return bits(None, counted([param], ranks), ranks) | {"local": got.tolist()}


def stages(rank: int) -> dict[str, Any]:
    """Each rank has shards on its own part of a mesh, such as a pipeline stage: own norms, and one flag."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("stages", "shards"))["shards"]
    param = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    ranks = ranks_of([param])
    return bits(torch.tensor(float(rank)), torch.tensor(2.0 + rank, dtype=torch.float64), ranks)


def by(rank: int) -> dict[str, Any]:
    """Who found something, in words."""
    ranks = ranks_of([nn.Parameter(torch.zeros(1))], [None])
    said = []
    cases = (
        ([0, 1], None),
        ([1, 1], [0, 1]),
        ([1, 1], None),
        ([0, 1], [1, 0]),
        ([1, 1], [0, 0]),
        ([0, 1], [0, 0]),
    )
    for found, began in cases:
        source = None if began is None else torch.tensor(bool(began[rank]))
        agreement = ranks.agreed(torch.tensor(float(found[rank])), began=source)
        assert agreement.by is not None
        said.append(named(agreement.by))
    return {"said": said, "first": ranks.of_first(5.0 + rank), "largest": ranks.largest(rank, -rank)}


def given(found: list[float | None], sums: list[float]) -> Callable[[int], dict[str, Any]]:
    def case(rank: int) -> dict[str, Any]:
        mine = found[rank]
        flag = None if mine is None else torch.tensor(mine)
        ranks = ranks_of([nn.Parameter(torch.zeros(1))], [None])
        return bits(flag, torch.tensor(sums[rank], dtype=torch.float64), ranks)

    return case


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def hexed(net: nn.Module) -> list[str]:
    return [float(value).hex() for p in net.parameters() for value in p.detach().float().flatten()]


def alone(rank: int, *, release: bool) -> dict[str, Any]:
    """No rank has parts of another's parameters: each decides alone, and starts no collective."""
    net = normed()
    mp = mezzo.MixedPrecision(
        net,
        torch.optim.AdamW(net.parameters()),
        "fp16",
        masters="fp32",
        clip_norm=0.01,
        release_gradients=release,
        loss_scale=256,
    )
    told = []
    for step in range(3):
        x = data(10 * rank + step) * (float("inf") if (rank, step) == (1, 1) else 1.0)
        with mp.autocast():
            loss = net(x).float().square().mean()
        result = mp.step(loss)
        told.append([result.stepped, str(result.grad_norm)])
    return {"told": [moved for moved, _ in told], "steps": float(mp.optimizer.state[net[0].weight]["step"])}


def averaged(rank: int, *, accumulate: int, every: bool = True, nested: bool = False) -> dict[str, Any]:
    """bf16 weights under DDP, lowered before they are wrapped, and what both ranks' data give in one process.

    `every`: average the gradients of each loss, not only with the last of a window.
    """
    net, both = normed(), normed()
    mezzo.lower_weights(net, "bf16")
    wrapped = DistributedDataParallel(net)
    optimizer = mezzo.optim.AdamW(net.parameters(), lr=0.01, masters="split")
    model = nn.Sequential(wrapped) if nested else wrapped
    mp = mezzo.MixedPrecision(model, optimizer, "bf16", accumulate=accumulate, clip_norm=1.0)
    whole = mezzo.MixedPrecision(
        both, torch.optim.AdamW(both.parameters(), lr=0.01), "fp32", accumulate=accumulate, clip_norm=1.0
    )
    dtypes = set()
    for step in range(2 * accumulate):
        averages = every or (step + 1) % accumulate == 0
        with nullcontext() if averages else wrapped.no_sync():
            with mp.autocast():
                loss = model(data(10 * rank + step)).float().square().mean()
            result = mp.step(loss)
        expected = whole.step(both(torch.cat([data(step), data(10 + step)])).square().mean())
        if not result.updated:
            dtypes.add(str(mp._gradients.of(net[0].weight).dtype))
            assert net[0].weight.grad is None
    assert net[0].weight.grad_dtype is torch.bfloat16
    assert math.isclose(result.grad_norm or 0.0, expected.grad_norm or 1.0, rel_tol=0.02)
    return {"weights": hexed(net), "norm": str(result.grad_norm), "dtypes": sorted(dtypes)}


def accumulated(rank: int, *, every: bool, low: bool = False, reduce: str = "fp32") -> dict[str, Any]:
    """One large loss and 63 small ones: how far a weight moves, which is stored in bf16 if `low`."""
    net = nn.Linear(16, 16, bias=False)
    if low:
        mezzo.lower_weights(net)
    wrapped = DistributedDataParallel(net)
    optimizer = mezzo.optim.SGD(net.parameters(), 1.0)
    mp = mezzo.MixedPrecision(wrapped, optimizer, f"bf16,reduce={reduce}", accumulate=64)
    before = optimizer.master(net.weight)
    for step in range(64):
        with nullcontext() if every or step == 63 else wrapped.no_sync():
            with mp.autocast():
                loss = wrapped(torch.ones(1, 16)).sum() * (1.0 if step else 1024.0)
            mp.step(loss)
    return {"moved": (before - optimizer.master(net.weight)).mean().item()}


def joined(rank: int) -> dict[str, Any]:
    """Uneven data: the second rank takes twice as many steps, and the scale grows after three."""
    net = normed()
    wrapped = DistributedDataParallel(net)
    mp = mezzo.MixedPrecision(
        wrapped,
        torch.optim.SGD(net.parameters(), lr=0.01),
        "fp16",
        loss_scale=mezzo.DynamicLossScale(init=256, growth_interval=3),
    )
    scales, weights = [], []
    for epoch in range(3):
        with wrapped.join():
            for step in range(2 + 2 * rank):
                with mp.autocast():
                    loss = wrapped(data(100 * epoch + 10 * rank + step)).float().square().mean()
                mp.step(loss)
                if step == 0:
                    weights.append(hexed(net))
        scales.append(mp.loss_scale)
    with mp.autocast():  # after the last one ranks decide together again
        loss = wrapped(data(rank)).float().square().mean() * (math.inf if rank == 1 else 1.0)
    return {"scales": scales, "weights": weights, "names": "on rank 1" in mp.step(loss).reason}


def joined_skips(rank: int) -> dict[str, Any]:
    """Uneven data, with an overflow where the first rank has no more."""
    net = normed()
    wrapped = DistributedDataParallel(net)
    mp = mezzo.MixedPrecision(wrapped, torch.optim.SGD(net.parameters(), lr=0.01), "fp16", loss_scale=256)
    with wrapped.join():
        for step in range(1 + rank):
            with mp.autocast():
                loss = wrapped(data(step) * (1e30 if step else 1.0)).float().square().mean()
            mp.step(loss)
    return {"found": [each.cause for each in mp.findings], "weights": hexed(net)}


def joined_refused(rank: int) -> dict[str, Any]:
    """Formats that each rank would choose by its own times, or by its own number of updates."""
    from mezzo.pytorch.auto import TimedTrial

    told = []
    for precision, before in (("auto", 0), ("mxfp8,bf16_from=2", 1), ("mxfp8,bf16_from=2", 2)):
        net = model()
        wrapped = DistributedDataParallel(net)
        mp = mezzo.MixedPrecision(wrapped, torch.optim.SGD(net.parameters(), lr=0.01), precision)
        if precision == "auto":
            mp._resolved.trial = TimedTrial("bf16", "cpu")
        try:
            for step in range(before + 1):
                with nullcontext() if step < before else wrapped.join(), mp.autocast():
                    loss = wrapped(data(rank)).square().mean()
                    mp.step(loss)
            told.append("")
        except UsageError as error:
            told.append(str(error))
    return {"told": told}


def trunk_and_head(rank: int) -> dict[str, Any]:
    """An optimizer of a part of what DDP averages, and what one process gets; a second one, which shares the graph."""
    net, both = model(), model()
    wrapped = DistributedDataParallel(net)
    mps = [
        mezzo.MixedPrecision(one, torch.optim.SGD(part.parameters(), lr=0.1), "bf16")
        for one, part in ((wrapped, net[2]), (both, both[2]))
    ]
    for step in range(3):
        batches = data(10 * rank + step), torch.cat([data(step), data(10 + step)])
        for mp, x in zip(mps, batches):
            with mp.autocast():
                loss = mp.model(x).float().square().mean()
            mp.step(loss)
    clean = all(p.grad is None for one in (net, both) for p in one.parameters())
    weights = hexed(net)
    with mps[0].autocast():
        loss = wrapped(data(rank)).float().square().mean()
    try:
        mps[0].step(loss, retain_graph=True)
    except UsageError as error:
        said = str(error)
    return {"weights": weights, "expected": hexed(both), "clean": clean, "said": said}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x).float().square().mean() for part in self.parts]


def heads(rank: int) -> dict[str, Any]:
    """Losses of disjoint parameters: DDP averages after the last one, which must come before the step."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Heads())
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32", accumulate=2)
    for step in range(2):
        for loss in net(data(10 * rank + step)):
            mp.step(loss)
    mp.step(net(data(rank))[0])
    before = hexed(net)
    try:
        mp.flush()
    except UsageError as error:
        said = str(error)
    return {"weights": before, "kept": hexed(net) == before, "said": said}


def compressed(rank: int) -> dict[str, Any]:
    """PowerSGD adds its errors to later gradients: not those of a skipped step."""
    net = DistributedDataParallel(model())
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    net.register_comm_hook(state, powerSGD_hook)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=256)
    moved = []
    for step in range(6):
        x = data(10 * rank + step) * (float("inf") if (rank, step) == (1, 3) else 1.0)
        with mp.autocast():
            loss = net(x).float().square().mean()
        moved.append(mp.step(loss).stepped)
    return {"moved": moved, "weights": hexed(net)}


def refused(rank: int) -> dict[str, Any]:
    net = DistributedDataParallel(normed())
    before = hexed(net)
    told = []
    for arguments in ({"masters": "split"}, {"release_gradients": True}):
        try:
            mezzo.MixedPrecision(net, torch.optim.AdamW(net.parameters()), "bf16", **arguments)
        except UsageError as error:
            told.append(str(error))
    return {"told": told, "same": hexed(net) == before, "dtype": str(net.module[0].weight.dtype)}


def accelerated(rank: int) -> dict[str, Any]:
    """Accelerate's data parallelism under fp16, with an overflow in the batch of rank 1."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of no use: the group exists
    accelerator = mezzo.accelerate.Accelerator("fp16", cpu=True)
    net = normed()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True))
    skips = []
    for step in range(3):
        x = data(10 * rank + step) * (1e30 if step == rank == 1 else 1.0)
        accelerator.backward(model(x).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skips.append(accelerator.optimizer_step_was_skipped)
    scale, kind = accelerator.mezzo.loss_scale, type(model).__name__
    return {"skips": skips, "weights": hexed(model), "loss_scale": scale, "kind": kind}


def recorded(rank: int) -> dict[str, Any]:
    """Both ranks are given the same file."""
    net = DistributedDataParallel(nn.Linear(4, 2))
    file = Path(sys.argv[2]).with_name("run.jsonl")
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16", records=file)
    for _ in range(20):
        with mp.autocast():
            loss = net(torch.ones(2, 4)).square().mean()
        mp.step(loss)
    mp.close()
    dist.barrier()
    return {one.name: len(list(records.read(one))) for one in sorted(file.parent.glob("*.jsonl"))}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    **fsdp_cases.CASES,
    **provenance_cases.CASES,
    "replicated": replicated,
    "sharded": sharded,
    "copies": copies,
    "mixed": mixed,
    "parts to add": parts_to_add,
    "stages": stages,
    "by": by,
    "an ulp apart": given([0.0, 0.0], [1.0, 1.0 + 2.0**-52]),
    "overflow on one": given([0.0, 1.0], [4.0, math.inf]),
    "NaN on one": given([math.nan, 0.0], [math.nan, 4.0]),
    "NaN beside infinity": given([1.0, 1.0], [math.inf, math.nan]),
    "nobody looked": given([None, None], [4.0, 4.0]),
    "alone": lambda rank: alone(rank, release=False),
    "alone, released": lambda rank: alone(rank, release=True),
    "averaged": lambda rank: averaged(rank, accumulate=1),
    "averaged, accumulated": lambda rank: averaged(rank, accumulate=3),
    "averaged, nested": lambda rank: averaged(rank, accumulate=3, nested=True),
    "averaged, no_sync": lambda rank: averaged(rank, accumulate=3, every=False),
    "accumulated": lambda rank: accumulated(rank, every=True, low=True),
    "accumulated, no_sync": lambda rank: accumulated(rank, every=False, low=True),
    "accumulated, reduced in bf16": lambda rank: accumulated(rank, every=True, reduce="bf16"),
    "accumulated, reduced in bf16 once": lambda rank: accumulated(rank, every=False, reduce="bf16"),
    "joined": joined,
    "joined, skips": joined_skips,
    "joined, refused": joined_refused,
    "trunk and head": trunk_and_head,
    "heads": heads,
    "compressed": compressed,
    "refused": refused,
    "accelerated": accelerated,
    "recorded": recorded,
}


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    leave({name: case(rank) for name, case in CASES.items()})


if __name__ == "__main__":
    main()
