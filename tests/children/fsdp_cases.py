"""Cases of `two_ranks.py`: `fully_shard` under MixedPrecision and GradScaler; gradients that are reduced by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.core.errors import UsageError
from mezzo.pytorch.reduction import average_in

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded(net: nn.Sequential | None = None, **how: Any) -> Any:
    net = net or network()
    fully_shard(net[0], **how)
    fully_shard(net[2], **how)
    return fully_shard(net, **how)


def data(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def whole(net: nn.Module) -> list[float]:
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [x for p in full for x in p.detach().double().flatten().tolist()]


@contextmanager
def counting() -> Iterator[list[str]]:
    """The reductions that Mezzo starts itself: FSDP2 and DDP call others."""
    seen: list[str] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(f"{tensor.numel()} of {tensor.dtype}")
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield seen
    finally:
        dist.all_reduce = original


def trained(
    rank: int,
    precision: str,
    *,
    bad: tuple[int, int] | None = None,
    accumulate: int = 1,
    syncs: bool = True,
    policy: MixedPrecisionPolicy | None = None,
    kind: Any = torch.optim.SGD,
    **how: Any,
) -> dict[str, Any]:
    """Three updates of shards; as a reference, one process with the data of both ranks and without the bad step."""
    net = sharded(**({"mp_policy": policy} if policy else {}))
    mp = mezzo.MixedPrecision(
        net, kind(net.parameters(), lr=0.1, momentum=0.9), precision, accumulate=accumulate, **how
    )
    one = network()
    reference = mezzo.MixedPrecision(
        one, kind(one.parameters(), lr=0.1, momentum=0.9), precision, accumulate=accumulate, **how
    )
    told, norms, reductions = [], [], []
    for update in range(3):
        for part in range(accumulate):
            step, last = update * accumulate + part, part == accumulate - 1
            net.set_requires_gradient_sync(last or syncs)
            x = data(10 * rank + step)
            if (update, part) == bad and rank == 1:
                x = x * float("inf")
            with mp.autocast():
                loss = net(x).float().square().mean()
            with counting() as seen:
                result = mp.step(loss)
            if bad is None or update != bad[0]:
                with reference.autocast():
                    both = one(torch.cat([data(step), data(10 + step)])).float().square().mean()
                expected = reference.step(both)
        norms.append([str(result.grad_norm), str(expected.grad_norm)])
        reductions.append(len(seen))
        told.append([result.stepped, result.loss_scale, result.reason])
    return {
        "told": told,
        "norms": norms,
        "reductions": reductions,
        "weights": whole(net),
        "expected": whole(one),
    }


def dropped(rank: int, **how: Any) -> dict[str, Any]:
    """A loss that raises in backward takes the unreduced gradients of its window with it."""
    net = sharded(**how)
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16", accumulate=2)
    net.set_requires_gradient_sync(False)
    mp.step(net(data(rank)).float().square().mean())
    loss = net(data(rank)).float().square().mean()

    def fails(grad: Tensor) -> Tensor:
        raise RuntimeError("planted")

    loss.register_hook(fails)
    try:
        mp.step(loss)
    except RuntimeError as error:
        said = str(error)
    net.set_requires_gradient_sync(True)
    for step in (1, 2):
        mp.step(net(data(10 * rank + step)).float().square().mean())
    again = sharded(**how)
    other = mezzo.MixedPrecision(again, torch.optim.SGD(again.parameters(), lr=0.1), "bf16", accumulate=2)
    for step in (1, 2):
        other.step(again(data(10 * rank + step)).float().square().mean())
    return {"said": said, "same": whole(net) == whole(again)}


def adversaries(rank: int, *, release: bool = False) -> dict[str, Any]:
    """The discriminator's loss runs through the generator, whose next step must not see it."""
    nets = sharded(), sharded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    kind = mezzo.optim.SGD if release else torch.optim.SGD
    optimizers = [kind(net.parameters(), lr=0.1) for net in nets]
    mps = [
        mezzo.MixedPrecision(net, optimizer, "bf16", release_gradients=release)
        for net, optimizer in zip(nets, optimizers)
    ]
    before = whole(nets[0])
    mps[1].step(nets[1](nets[0](data(rank))).float().square().mean())
    return {"kept": whole(nets[0]) == before, "clean": all(p.grad is None for p in nets[0].parameters())}


def scaled(rank: int, *, reduced: str) -> dict[str, Any]:
    """GradScaler over shards and a plain parameter, or over gradients that the script reduces itself.

    One overflows on rank 1 alone at the second step.
    """
    net, gain = network(), nn.Parameter(torch.ones(()))
    if reduced == "shards":
        net = sharded(net)
    elif reduced == "meshes":  # of which torch asks only that of the first gradient
        fully_shard(net[0], mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards")))
        fully_shard(net[2], mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD([*net.parameters(), gain], lr=0.1)
    scaler = mezzo.GradScaler(init_scale=2.0**10)
    told, scales, reductions, norms = [], [], [], []

    def reduce() -> None:
        for p in (*net.parameters(), gain):
            dist.all_reduce(p.grad)

    for step in range(3):
        factor = float("inf") if (step, rank) == (1, 1) else 1.0
        scaler.scale(net(data(10 * rank + step)).square().mean() + gain * factor).backward()
        if reduced == "before":
            reduce()
        with counting() as seen:
            norms.append(float(scaler.clip_grad_norm_(optimizer, 0.5)).hex())
            if reduced == "after":
                reduce()
            scaler.step(optimizer)
            scaler.update()
        reductions.append(len(seen))
        told.append(scaler.was_skipped(optimizer))
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    norms = [] if reduced == "after" else norms  # which are of each rank alone
    return {"told": told, "scales": scales, "reductions": reductions, "norms": norms, "weights": whole(net)}


def scaled_closure(rank: int) -> dict[str, Any]:
    """GradScaler runs a closure again, whose loss is not finite on rank 1 alone at the second step."""
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = mezzo.GradScaler(init_scale=2.0**10)
    told, scales = [], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(data(10 * rank + step)).square().mean() * factor
        scaler.scale(loss).backward()
        return loss

    for step in range(3):
        factor = float("inf") if (step, rank) == (1, 1) else 1.0
        scaler.step(optimizer, closure)
        scaler.update()
        told.append(scaler.was_skipped(optimizer))
        scales.append(scaler.get_scale())
    return {"told": told, "scales": scales, "weights": whole(net)}


def loss_of_parts(rank: int) -> dict[str, Any]:
    """Each rank has the logits of two classes, and the loss is a `DTensor`; one process is the reference."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 4)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(nets[0], init_device_mesh("cpu", (2,)), {"0": cut})
    told = []
    for net in nets:
        mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16")
        for step in range(3):
            with loss_parallel() if net is nets[0] else nullcontext():
                with mp.autocast():
                    x = data(step) * (1e30 if step == 1 else 1.0)
                    loss = nn.functional.cross_entropy(net(x), torch.arange(4))
                told.append(mp.step(loss).stepped)
    return {"told": told, "weights": whole(nets[0]), "expected": whole(nets[1])}


def decided(rank: int) -> dict[str, Any]:
    """`auto` on ranks whose own times disagree: the first rank's decide, at one step."""
    from mezzo.pytorch.auto import TimedTrial
    from mezzo.pytorch.distributed import ranks_of

    # Rank 0 finds bf16 twice as fast; rank 1 finds it twice as slow, and has timed two steps more.
    ranks = ranks_of([nn.Parameter(torch.zeros(1))], [None])
    now = 0.0
    trial = TimedTrial("bf16", "cpu", lambda: now)
    extra, at = 2 * rank, 0
    for at in itertools.count():
        trial.start()
        now += 1.0 if (trial.precision == "bf16") == (rank == 0) else 2.0
        trial.finish(counts=True)
        if at >= extra:
            trial.agree(ranks)
            if trial.decision is not None:
                break
    return {"precision": trial.decision.precision, "speedup": trial.decision.speedup, "at": at - extra}


def without_gradients(rank: int) -> dict[str, Any]:
    """On each rank alone, for the ranks' backward passes would wait for each other."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    net = DistributedDataParallel(network(), process_group=groups[rank])
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16")
    other = nn.Parameter(torch.ones(()))
    try:
        mp.step(other * 2)
    except UsageError as error:
        return {"said": str(error)}
    return {"said": ""}


def averaged_in(
    rank: int, format: str, *, accumulate: int, magnitude: float = 1.0, by_policy: bool = False
) -> dict[str, Any]:
    """Gradients of a DDP by 16 bits on the wire, by FP32, and the mean of the ranks' magnitudes."""
    found = []
    for how in (format, "fp32"):
        net = DistributedDataParallel(network())
        if by_policy:
            mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters()), f"bf16,reduce={how}").close()
        elif how != "fp32":
            average_in(net, how)
        for part in range(accumulate):
            last = part == accumulate - 1
            with nullcontext() if last else net.no_sync():
                (net(data(10 * rank + part)).sum() * magnitude).backward()
        found.append([p.grad for p in net.parameters()])
    own = network()
    for part in range(accumulate):
        (own(data(10 * rank + part)).sum() * magnitude).backward()
    sizes = [p.grad.abs() for p in own.parameters()]
    for size in sizes:
        dist.all_reduce(size)
    wrong = [((a - b).abs() / (size / 2 + 1e-30)).max().item() for a, b, size in zip(*found, sizes)]
    return {
        "bits": [x.hex() for grad in found[0] for x in grad.flatten().tolist()],
        "dtypes": sorted({str(grad.dtype) for grad in found[0]}),
        "error": max(wrong),
        "largest": max(grad.abs().max().item() for grad in found[1]),
        "finite": all(bool(grad.isfinite().all()) for grad in found[0]),
    }


def reduction_refused(rank: int) -> dict[str, Any]:
    said = []
    twice = DistributedDataParallel(network())
    average_in(twice, "fp16")
    for model, format in ((network(), "bf16"), (DistributedDataParallel(network()), "fp8"), (twice, "bf16")):
        try:
            average_in(model, format)
        except UsageError as error:
            said.append(str(error))
    net = fully_shard(network())
    try:
        mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters()), "bf16,reduce=bf16")
    except UsageError as error:
        said.append(str(error))
    return {"said": said}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "fsdp bf16": lambda rank: trained(rank, "bf16", clip_norm=0.5),
    "fsdp fp16": lambda rank: trained(rank, "fp16", bad=(1, 0), clip_norm=0.5),
    "fsdp fp16, no norm": lambda rank: trained(rank, "fp16", bad=(1, 0)),
    "fsdp fp16, clip both": lambda rank: trained(rank, "fp16", clip_norm=0.05, clip_value=0.02),
    "fsdp accumulated": lambda rank: trained(rank, "fp16", bad=(1, 0), accumulate=2, clip_norm=0.5),
    "fsdp no_sync": lambda rank: trained(rank, "fp16", bad=(1, 0), accumulate=2, syncs=False, clip_norm=0.5),
    **{
        f"fsdp policy {name}": lambda rank, name=name, dtype=dtype: trained(
            rank,
            name,
            bad=None if name == "bf16" else (1, 0),
            clip_norm=0.5,
            policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        )
        for name, dtype in HALF.items()
    },
    "fsdp reduced in fp16": lambda rank: trained(
        rank, "fp16", clip_norm=0.5, policy=MixedPrecisionPolicy(torch.float16)
    ),
    "fsdp released": lambda rank: trained(
        rank, "fp16", bad=(1, 0), clip_norm=0.5, kind=mezzo.optim.SGD, release_gradients=True
    ),
    "dropped": dropped,
    "dropped, of two formats": lambda rank: dropped(
        rank, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "adversaries": adversaries,
    "adversaries, released": lambda rank: adversaries(rank, release=True),
    "scaled shards": lambda rank: scaled(rank, reduced="shards"),
    "scaled meshes": lambda rank: scaled(rank, reduced="meshes"),
    "scaled before": lambda rank: scaled(rank, reduced="before"),
    "scaled closure": scaled_closure,
    "scaled after": lambda rank: scaled(rank, reduced="after"),
    "loss of parts": loss_of_parts,
    "decided": decided,
    "without gradients": without_gradients,
    "reduced bf16": lambda rank: averaged_in(rank, "bf16", accumulate=1, by_policy=True),
    "reduced bf16, accumulated": lambda rank: averaged_in(rank, "bf16", accumulate=3),
    "reduced fp16": lambda rank: averaged_in(rank, "fp16", accumulate=1),
    "reduced fp16, large": lambda rank: averaged_in(rank, "fp16", accumulate=1, magnitude=10000.0),
    "reduction refused": reduction_refused,
}
