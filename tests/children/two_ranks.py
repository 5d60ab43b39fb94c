"""Two gloo ranks agree on an overflow and on the norm, however the parameters are spread, and train alike."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import fsdp_cases
import provenance_cases
import pytest
import torch
import torch.distributed as dist
from cases import INF, MEETING, RANK, alike, data, gathered, run, step, whole
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.core import records
from mezzo.core.errors import UsageError
from mezzo.core.overflow import OUTSIDE
from mezzo.pytorch.auto import TimedTrial
from mezzo.pytorch.distributed import Ranks, local, named, own_squares, ranks_of, replica_groups
from mezzo.pytorch.run.weights import nudge

BOTH = (0, 1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def anything() -> Ranks:
    """Ranks whose parameters are whole on each."""
    return ranks_of([nn.Parameter(torch.zeros(1))], [None])


def agreed(ranks: Ranks, found: Tensor | None, squares: Tensor) -> tuple[float | None, float]:
    """Whether a rank found something, and the sum of squares, with the same bits on both ranks."""
    agreement = ranks.agreed(found, squares.reshape(1))
    assert agreement.squares.dtype is torch.float64
    both = None if agreement.found is None else float(agreement.found), agreement.squares.item()
    alike(both)
    return both


def total_of(params: list[Tensor]) -> float:
    ranks = ranks_of(params)
    return agreed(ranks, None, own_squares(params, ranks)[1])[1]


# What ranks agree on.


def norm(spread: str) -> None:
    """That of the whole model, by PyTorch in one process."""
    net = model()
    if spread == "replicated":
        net = DistributedDataParallel(net)
    elif spread == "sharded":
        fully_shard(net[0])
        fully_shard(net)
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    net(data(RANK)).square().mean().backward()
    params = list(net.parameters())
    ranks = ranks_of(params, replica_groups(net))
    own = own_squares(params, ranks)[1]
    found, total = agreed(ranks, torch.zeros(()) if spread == "replicated" else None, own)
    assert found == (0.0 if spread == "replicated" else None)
    one = model()
    for rank in BOTH:
        (one(data(rank)).square().mean() / 2).backward()
    assert total == pytest.approx(
        sum(float(p.grad.double().square().sum()) for p in one.parameters()), rel=1e-6
    )
    if spread == "sharded":
        parts = gathered(float(own))
        assert parts[0] != parts[1]
        assert sum(parts) == pytest.approx(total)


def mixed() -> None:
    """One parameter in shards, one whole, one without gradient."""
    mesh = init_device_mesh("cpu", (2,))
    cut = nn.Parameter(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    cut.grad = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([3.0, 4.0])
    assert total_of([plain, cut, nn.Parameter(torch.zeros(2))]) == 25 + 30


def parts_to_add() -> None:
    """A gradient that is still a sum over ranks; one that lies whole on each."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.full((3,), 1.0 + RANK), mesh, [Partial()])
    assert local(param.grad).tolist() == [3.0] * 3
    assert total_of([param]) == 27


def stages() -> None:
    """Each rank has shards on its own part of a mesh, such as a pipeline stage: own norms, and one flag."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("stages", "shards"))["shards"]
    ranks = ranks_of([nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))])
    agreement = ranks.agreed(torch.tensor(float(RANK)), torch.tensor([2.0 + RANK], dtype=torch.float64))
    assert (float(agreement.found), float(agreement.squares)) == (1.0, 2.0 + RANK)


# What each rank found and its sum -> what both know.
GIVEN: dict[str, tuple[list[Any], list[float], float | None, float]] = {
    "an ulp apart": ([0.0, 0.0], [1.0, 1.0 + 2.0**-52], 0.0, 2.0),
    "overflow on one": ([0.0, 1.0], [4.0, INF], 1.0, INF),
    "NaN on one": ([math.nan, 0.0], [math.nan, 4.0], 1.0, math.nan),
    "NaN beside infinity": ([1.0, 1.0], [INF, math.nan], 1.0, math.nan),
    "nobody looked": ([None, None], [4.0, 4.0], None, 8.0),
}


def given(found: list[Any], sums: list[float], both_found: float | None, total: float) -> None:
    flag = None if found[RANK] is None else torch.tensor(found[RANK])
    got = agreed(anything(), flag, torch.tensor(sums[RANK], dtype=torch.float64))
    assert got[0] == both_found
    assert got[1] == pytest.approx(total, rel=0, abs=0, nan_ok=True)


def said() -> None:
    """Which rank found something, and where it began."""
    ranks = anything()
    for found, began, words in (
        ([0, 1], None, "rank 1"),
        ([1, 0], None, "rank 0"),
        ([1, 1], [0, 1], "rank 1"),
        ([1, 1], None, "2 ranks"),
        ([0, 1], [1, 0], "rank 0"),
        ([1, 1], [0, 0], "2 ranks after the reduction"),
        ([0, 1], [0, 0], "rank 1 after the reduction"),
        ([1, 0], [0, 0], "rank 0 after the reduction"),
    ):
        source = None if began is None else torch.tensor([float(began[RANK]), 256.0])
        by = named(ranks.agreed(torch.tensor(float(found[RANK])), began=source).by)
        assert words in by if "after" in words else by == words
    assert (ranks.of_first(5.0 + RANK), ranks.largest(RANK, -RANK)) == ([5.0], [1.0, 0.0])


# Training under DistributedDataParallel.


def alone(*, release: bool) -> None:
    """No rank has parts of another's parameters: each decides alone, and starts no collective."""
    net = normed()
    how: dict[str, Any] = {"masters": "fp32", "clip_norm": 0.01, "loss_scale": 256}
    optimizer = torch.optim.AdamW(net.parameters())
    mp = mezzo.MixedPrecision(net, optimizer, "fp16", release_gradients=release, **how)
    stepped = []
    for number in range(3):
        x = data(10 * RANK + number) * (INF if (RANK, number) == (1, 1) else 1.0)
        stepped.append(step(mp, x).stepped)
    steps = float(mp.optimizer.state[net[0].weight]["step"])
    assert gathered((stepped, steps)) == [([True] * 3, 3.0), ([True, False, True], 2.0)]


def averaged(*, accumulate: int, every: bool = True, nested: bool = False) -> None:
    """bf16 weights, lowered before they are wrapped, and what both ranks' data give in one process.

    `every`: average the gradients of each loss, not only with the last of a window.
    """
    net, one = normed(), normed()
    mezzo.lower_weights(net, "bf16")
    wrapped = DistributedDataParallel(net)
    optimizer = mezzo.optim.AdamW(net.parameters(), lr=0.01, masters="split")
    model = nn.Sequential(wrapped) if nested else wrapped
    how: dict[str, Any] = {"accumulate": accumulate, "clip_norm": 1.0}
    mp = mezzo.MixedPrecision(model, optimizer, "bf16", **how)
    reference = mezzo.MixedPrecision(one, torch.optim.AdamW(one.parameters(), lr=0.01), "fp32", **how)
    for number in range(2 * accumulate):
        averages = every or (number + 1) % accumulate == 0
        with nullcontext() if averages else wrapped.no_sync():
            result = step(mp, data(10 * RANK + number))
        expected = step(reference, torch.cat([data(number), data(10 + number)]))
        if not result.updated:
            assert mp._gradients.of(net[0].weight).dtype is torch.float32
            assert net[0].weight.grad is None
    assert net[0].weight.grad_dtype is torch.bfloat16
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    alike((whole(net), result.grad_norm))


def accumulated(error: float, *, every: bool, low: bool = False, reduce: str = "fp32") -> None:
    """One large loss and 63 small ones: how far a weight moves, which is stored in bf16 if `low`."""
    net = nn.Linear(16, 16, bias=False)
    if low:
        mezzo.lower_weights(net)
    wrapped = DistributedDataParallel(net)
    optimizer = mezzo.optim.SGD(net.parameters(), 1.0)
    mp = mezzo.MixedPrecision(wrapped, optimizer, f"bf16,reduce={reduce}", accumulate=64)
    before = optimizer.master(net.weight)
    for number in range(64):
        with nullcontext() if every or number == 63 else wrapped.no_sync():
            with mp.autocast():
                loss = wrapped(torch.ones(1, 16)).sum() * (1.0 if number else 1024.0)
            mp.step(loss)
    moved = (before - optimizer.master(net.weight)).mean().item()
    assert moved == pytest.approx((1024 + 63) / 64, rel=error, abs=1e-6)
    alike(moved)


def joined() -> None:
    """Uneven data: the second rank takes twice as many steps, and the scale grows after three."""
    net = normed()
    wrapped = DistributedDataParallel(net)
    dynamic = mezzo.DynamicLossScale(init=256, growth_interval=3)
    mp = mezzo.MixedPrecision(wrapped, torch.optim.SGD(net.parameters(), lr=0.01), "fp16", loss_scale=dynamic)
    scales, weights = [], []
    for epoch in range(3):
        with wrapped.join():
            for number in range(2 + 2 * RANK):
                step(mp, data(100 * epoch + 10 * RANK + number))
                if number == 0:
                    weights.append(whole(net))
        scales.append(mp.loss_scale)
    alike(weights)
    assert scales == [512.0, 1024.0, 4096.0]
    # After the last one ranks decide together again.
    assert "on rank 1" in step(mp, data(RANK) * (INF if RANK == 1 else 1.0)).reason


def joined_skips() -> None:
    """An overflow where the first rank has no more data is explained without it."""
    net = normed()
    wrapped = DistributedDataParallel(net)
    mp = mezzo.MixedPrecision(wrapped, torch.optim.SGD(net.parameters(), lr=0.01), "fp16", loss_scale=256)
    with wrapped.join():
        for number in range(1 + RANK):
            step(mp, data(number) * (1e30 if number else 1.0))
    assert [each.cause for each in mp.findings] == ["overflow"] * RANK
    alike(whole(net))


def joined_refused(precision: str, before: int, words: str) -> None:
    """A format that each rank would choose by its own times, or by its own number of updates."""
    net = model()
    wrapped = DistributedDataParallel(net)
    mp = mezzo.MixedPrecision(wrapped, torch.optim.SGD(net.parameters(), lr=0.01), precision)
    if precision == "auto":
        mp._resolved.trial = TimedTrial("bf16", "cpu")
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        for number in range(before + 1):
            with nullcontext() if number < before else wrapped.join():
                step(mp, data(RANK))


def trunk_and_head() -> None:
    """An optimizer of a part of what DDP averages, and what one process gets; a second one, which shares the graph."""
    net, one = model(), model()
    wrapped = DistributedDataParallel(net)
    mps = [
        mezzo.MixedPrecision(whole, torch.optim.SGD(part.parameters(), lr=0.1), "bf16")
        for whole, part in ((wrapped, net[2]), (one, one[2]))
    ]
    for number in range(3):
        step(mps[0], data(10 * RANK + number))
        step(mps[1], torch.cat([data(number), data(10 + number)]))
    assert all(p.grad is None for each in (net, one) for p in each.parameters())
    alike(whole(net))
    assert whole(net) == pytest.approx(whole(one), rel=0, abs=2e-3)
    with mps[0].autocast():
        loss = wrapped(data(RANK)).float().square().mean()
    with pytest.raises(UsageError, match=r"torch\.optim\.AdamW\(\[\{'params'"):
        mps[0].step(loss, retain_graph=True)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x).float().square().mean() for part in self.parts]


def heads() -> None:
    """Losses of disjoint parameters: DDP averages after the last one, which must come before the step."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Heads())
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32", accumulate=2)
    for number in range(2):
        for loss in net(data(10 * RANK + number)):
            mp.step(loss)
    mp.step(net(data(RANK))[0])
    before = whole(net)
    with pytest.raises(UsageError, match=rf"(?s)rank {RANK}.*mp\.step\(loss_a \+ loss_b\)"):
        mp.flush()
    assert whole(net) == before
    alike(before)


def compressed() -> None:
    """PowerSGD adds its errors to later gradients: not those of a skipped step."""
    net = DistributedDataParallel(model())
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    net.register_comm_hook(state, powerSGD_hook)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=256)
    stepped = []
    for number in range(6):
        x = data(10 * RANK + number) * (INF if (RANK, number) == (1, 3) else 1.0)
        stepped.append(step(mp, x).stepped)
    assert stepped == [True, True, True, False, True, True]
    alike(whole(net))


def refused() -> None:
    net = DistributedDataParallel(normed())
    before = whole(net)
    for arguments, words in (
        ({"masters": "split"}, r"mezzo\.lower_weights\(model, 'bf16'\)"),
        ({"release_gradients": True}, "DistributedDataParallel"),
    ):
        with pytest.raises(UsageError, match=words):
            mezzo.MixedPrecision(net, torch.optim.AdamW(net.parameters()), "bf16", **arguments)
    assert whole(net) == before
    assert net.module[0].weight.dtype is torch.float32


def with_scale(kind: str) -> tuple[Any, Callable[[], Any]]:
    """What has a loss scale, and a step of it."""
    net: Any = nn.Linear(5, 3) if kind == "apart" else fully_shard(model()) if "fsdp" in kind else model()
    net = DistributedDataParallel(net) if "ddp" in kind else net
    fused = mezzo.optim.AdamW(net.parameters())
    optimizer = fused if "fused" in kind else torch.optim.SGD(net.parameters(), lr=0.1)
    if kind.startswith("mp"):
        mp = mezzo.MixedPrecision(net, optimizer, "fp16", release_gradients="release" in kind)
        return mp, lambda: step(mp, data(RANK))
    scaler = mezzo.GradScaler(growth_interval=100 + RANK * (kind == "other ddp"))

    def stepping() -> None:
        with mezzo.autocast("fp16"):
            loss = net(data(RANK)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return scaler, stepping


def states(kind: str, *, steps: int, words: str) -> None:
    """The second rank alone loads a state after some steps."""
    scaled, stepping = with_scale(kind)
    for _ in range(steps):
        stepping()
    if RANK == 1:
        scaled.load_state_dict(mezzo.GradScaler(init_scale=2.0**12).state_dict() | {"scale": 2.0**12})
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        stepping()


def fault(where: str, module: str, op: str) -> None:
    """Both ranks tell what rank 1 found, and the first one warns."""
    told = provenance_cases.found(RANK, where)
    assert (told["module"], told["op"], told["skips"]) == (module, op, [False, True, False])
    assert ("found by rank 1" in told["note"]) is (RANK == 0)
    assert len(told["warned"]) == 1 - RANK
    assert told["weights"] == told["untraced"]
    alike(told["weights"])


def counted() -> None:
    """Rank 1 finds the NaN of a loss whose gradients are finite: ranks still stop looking at the same step."""
    net = DistributedDataParallel(model())
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", loss_scale=256)
    for number in range(3):
        with mp.autocast():
            loss = net(data(RANK)).float().square().mean()
            if RANK == 1 and number:
                # The first one makes gradients NaN, so that the loss of the next step is traced.
                loss = loss * math.nan if number == 1 else loss + torch.tensor(-1.0).log()
        result = mp.step(loss)
        assert result.skipped is (number == 1)
    assert (result.finding is not None) is (RANK == 1)
    alike(list(mp._observing.tracer._left.values()))


def accelerated() -> None:
    """Accelerate's data parallelism under fp16, with an overflow in the batch of rank 1."""
    os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of no use: the group exists
    accelerator = mezzo.accelerate.Accelerator("fp16", cpu=True)
    net = normed()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True))
    assert type(model) is DistributedDataParallel
    skips = []
    for number in range(3):
        x = data(10 * RANK + number) * (1e30 if number == RANK == 1 else 1.0)
        accelerator.backward(model(x).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skips.append(accelerator.optimizer_step_was_skipped)
    assert (skips, accelerator.mezzo.loss_scale) == ([False, True, False], 2.0**15)
    alike(whole(model))


def recorded() -> None:
    """Both ranks are given the same file, and each writes to one of its own."""
    net = DistributedDataParallel(nn.Linear(4, 2))
    file = Path(MEETING).with_name("run.jsonl")
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16", records=file)
    for _ in range(20):
        step(mp, torch.ones(2, 4))
    mp.close()
    dist.barrier()
    found = {one.name: len(list(records.read(one))) for one in sorted(file.parent.glob("*.jsonl"))}
    assert found == {"run-rank1.jsonl": 40, "run.jsonl": 40}


def nudged() -> None:
    """Shards move as the whole weights do in one process; rank 1 has no element of four of the six."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 1), nn.Linear(1, 3))
    net, start = fully_shard(deepcopy(one)), whole(one)
    assert (nudge(net.parameters()), nudge(one.parameters())) == (6, 6)
    assert whole(net) == whole(one)
    assert all(moved != before for moved, before in zip(whole(one), start, strict=True))
    alike(whole(net))


# What is trained, after how many steps one rank loads another state, and what the error has on both.
DIFFER = f"different (loss scales|states): on rank {RANK} .*{4096 if RANK else 65536}.*load_state_dict"
STATES = [
    ("mp ddp", 0, DIFFER),
    ("mp ddp", 2, DIFFER),
    ("mp ddp fused", 2, DIFFER),
    ("mp fsdp", 2, DIFFER),
    ("mp fsdp fused release", 2, DIFFER),
    ("ddp", 0, DIFFER),
    ("other ddp", 0, "rank 0 has `.*growth_interval=100,.*`, rank 1 has `.*growth_interval=101,"),
    ("fsdp", 0, DIFFER),
    ("fsdp", 2, DIFFER),
    ("apart", 0, ""),
]

CASES: dict[str, Callable[[], None]] = {
    **fsdp_cases.CASES,
    **{
        f"norm: {spread}": lambda spread=spread: norm(spread)
        for spread in ("replicated", "sharded", "copies")
    },
    "norm: mixed": mixed,
    "norm: parts to add": parts_to_add,
    "norm: stages": stages,
    **{f"given: {name}": lambda row=row: given(*row) for name, row in GIVEN.items()},
    "said": said,
    "alone": lambda: alone(release=False),
    "alone: released": lambda: alone(release=True),
    "averaged": lambda: averaged(accumulate=1),
    "averaged: accumulated": lambda: averaged(accumulate=3),
    "averaged: nested": lambda: averaged(accumulate=3, nested=True),
    "averaged: no_sync": lambda: averaged(accumulate=3, every=False),
    "accumulated": lambda: accumulated(0.0, every=True, low=True),
    "accumulated: no_sync": lambda: accumulated(2.0**-8, every=False, low=True),  # ranks add in bf16, once
    # Each loss alone is reduced, which bf16 holds exactly; or their sum.
    "accumulated: reduced in bf16": lambda: accumulated(0.0, every=True, reduce="bf16"),
    "accumulated: reduced in bf16 once": lambda: accumulated(2.0**-8, every=False, reduce="bf16"),
    "joined": joined,
    "joined: skips": joined_skips,
    "joined: auto": lambda: joined_refused("auto", 0, "precision='bf16'"),
    "joined: before bf16_from": lambda: joined_refused("mxfp8,bf16_from=2", 1, "bf16_from=2"),
    "joined: after bf16_from": lambda: joined_refused("mxfp8,bf16_from=2", 2, ""),
    "trunk and head": trunk_and_head,
    "heads": heads,
    "compressed": compressed,
    "refused": refused,
    **{
        f"states: {row[0]} {row[1]}": lambda row=row: states(row[0], steps=row[1], words=row[2])
        for row in STATES
    },
    "fault: forward": lambda: fault("forward", "1", "mul"),
    "fault: backward": lambda: fault("backward", "1", "sqrt"),
    "fault: loss": lambda: fault("loss", OUTSIDE, ""),
    "fault: counted": counted,
    "accelerated": accelerated,
    "recorded": recorded,
    "nudged": nudged,
}

if __name__ == "__main__":
    run(CASES)
