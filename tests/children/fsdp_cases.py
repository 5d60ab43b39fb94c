"""Cases of `two_ranks.py`: `fully_shard` under MixedPrecision and GradScaler; gradients that are reduced by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import INF, RANK, alike, data, step, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.core.errors import UsageError
from mezzo.pytorch.auto import TimedTrial
from mezzo.pytorch.distributed import ranks_of
from mezzo.pytorch.reduction import average_in


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded(net: nn.Sequential | None = None, **how: Any) -> Any:
    net = net or network()
    fully_shard(net[0], **how)
    fully_shard(net[2], **how)
    return fully_shard(net, **how)


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
    precision: str,
    *,
    bad: bool = False,
    accumulate: int = 1,
    syncs: bool = True,
    policy: MixedPrecisionPolicy | None = None,
    kind: Any = torch.optim.SGD,
    **how: Any,
) -> None:
    """Three updates of shards; as a reference, one process with the data of both ranks.

    `bad`: rank 1 overflows in the first loss of the second update, which the reference leaves out.
    """
    net, one = sharded(**({"mp_policy": policy} if policy else {})), network()
    mp, reference = (
        mezzo.MixedPrecision(
            each, kind(each.parameters(), lr=0.1, momentum=0.9), precision, accumulate=accumulate, **how
        )
        for each in (net, one)
    )
    told = []
    for update in range(3):
        skips = bad and update == 1
        for part in range(accumulate):
            number, last = update * accumulate + part, part == accumulate - 1
            net.set_requires_gradient_sync(last or syncs)
            with counting() as seen:
                overflows = skips and part == 0 and RANK == 1
                result = step(mp, data(10 * RANK + number) * (INF if overflows else 1.0))
            if not skips:
                expected = step(reference, torch.cat([data(number), data(10 + number)]))
        assert len(seen) == (
            2 if update == 0 and accumulate == 1 else 1
        )  # the first loss compares the ranks' states
        assert result.stepped is not skips
        if skips:
            assert "rank 1" in result.reason
        elif result.grad_norm is not None:
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
        told.append((result.stepped, result.loss_scale, result.reason, str(result.grad_norm)))
    if bad:
        assert told[2][1] == told[1][1] / 2
    weights = whole(net)
    assert weights == pytest.approx(whole(one), rel=0, abs=5e-3)
    alike((weights, told))


def dropped(**how: Any) -> None:
    """A loss that raises in backward takes the unreduced gradients of its window with it."""
    nets = sharded(**how), sharded(**how)
    mp, other = (
        mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16", accumulate=2)
        for net in nets
    )
    nets[0].set_requires_gradient_sync(False)
    step(mp, data(RANK))
    loss = nets[0](data(RANK)).float().square().mean()

    def fails(grad: Tensor) -> Tensor:
        raise RuntimeError("planted")

    loss.register_hook(fails)
    with pytest.raises(RuntimeError, match="planted"):
        mp.step(loss)
    nets[0].set_requires_gradient_sync(True)
    for training in (mp, other):
        for number in (1, 2):
            step(training, data(10 * RANK + number))
    assert whole(nets[0]) == whole(nets[1])


def adversaries(*, release: bool = False) -> None:
    """The discriminator's loss runs through the generator, whose next step must not see it."""
    nets = sharded(), sharded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    kind = mezzo.optim.SGD if release else torch.optim.SGD
    _, discriminator = (
        mezzo.MixedPrecision(net, kind(net.parameters(), lr=0.1), "bf16", release_gradients=release)
        for net in nets
    )
    before = whole(nets[0])
    discriminator.step(nets[1](nets[0](data(RANK))).float().square().mean())
    assert whole(nets[0]) == before
    assert all(p.grad is None for p in nets[0].parameters())


SKIPS = [False, True, False], [1024.0, 512.0, 512.0]


def scaled(reduced: str) -> None:
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
    skips, scales, norms = [], [], []

    def reduce() -> None:
        for p in (*net.parameters(), gain):
            dist.all_reduce(p.grad)

    for number in range(3):
        factor = INF if (number, RANK) == (1, 1) else 1.0
        scaler.scale(net(data(10 * RANK + number)).square().mean() + gain * factor).backward()
        if reduced == "before":
            reduce()
        with counting() as seen:
            norms.append(float(scaler.clip_grad_norm_(optimizer, 0.5)))
            if reduced == "after":
                reduce()
            scaler.step(optimizer)
            scaler.update()
        assert len(seen) == 1 or reduced in ("before", "after")  # found_inf and the norm
        skips.append(scaler.was_skipped(optimizer))
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert (skips, scales) == SKIPS
    alike((whole(net), [] if reduced == "after" else norms))  # those are of each rank alone


def scaled_closure() -> None:
    """GradScaler runs a closure again, whose loss is not finite on rank 1 alone at the second step."""
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = mezzo.GradScaler(init_scale=2.0**10)
    skips, scales = [], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(data(10 * RANK + number)).square().mean() * factor
        scaler.scale(loss).backward()
        return loss

    for number in range(3):
        factor = INF if (number, RANK) == (1, 1) else 1.0
        scaler.step(optimizer, closure)
        scaler.update()
        skips.append(scaler.was_skipped(optimizer))
        scales.append(scaler.get_scale())
    assert (skips, scales) == SKIPS
    alike(whole(net))


def loss_of_parts() -> None:
    """Each rank has the logits of two classes, and the loss is a `DTensor`; one process is the reference."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 4)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(nets[0], init_device_mesh("cpu", (2,)), {"0": cut})
    for net in nets:
        mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16")
        for number in range(3):
            with loss_parallel() if net is nets[0] else nullcontext():
                with mp.autocast():
                    x = data(number) * (1e30 if number == 1 else 1.0)
                    loss = nn.functional.cross_entropy(net(x), torch.arange(4))
                assert mp.step(loss).stepped is (number != 1)
    weights = whole(nets[0])
    assert weights == pytest.approx(whole(nets[1]), rel=0, abs=1e-3)
    alike(weights)


def decided() -> None:
    """`auto` on ranks whose own times disagree: the first rank's decide, at one step."""
    # Rank 0 finds bf16 twice as fast; rank 1 finds it twice as slow, and has timed two steps more.
    ranks = ranks_of([nn.Parameter(torch.zeros(1))], [None])
    now = 0.0
    trial = TimedTrial("bf16", "cpu", lambda: now)
    extra, at = 2 * RANK, 0
    for at in itertools.count():
        trial.start()
        now += 1.0 if (trial.precision == "bf16") == (RANK == 0) else 2.0
        trial.finish(counts=True)
        if at >= extra:
            trial.agree(ranks)
            if trial.decision is not None:
                break
    assert (trial.decision.precision, trial.decision.speedup, at - extra) == ("bf16", 2.0, 19)


def without_gradients() -> None:
    """On each rank alone, for the ranks' backward passes would wait for each other."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    net = DistributedDataParallel(network(), process_group=groups[RANK])
    mp = mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16")
    with pytest.raises(UsageError, match=rf"(?s)rank {RANK}.*0\.0 \* model\("):
        mp.step(nn.Parameter(torch.ones(())) * 2)


def averaged_in(format: str, *, accumulate: int = 1, magnitude: float = 1.0, by_policy: bool = False) -> None:
    """Gradients of a DDP by 16 bits on the wire, by FP32, and the mean of the ranks' magnitudes."""

    def backward(net: nn.Module) -> list[Tensor]:
        for part in range(accumulate):
            last = part == accumulate - 1 or not isinstance(net, DistributedDataParallel)
            with nullcontext() if last else net.no_sync():
                (net(data(10 * RANK + part)).sum() * magnitude).backward()
        return [p.grad for p in net.parameters()]

    found = []
    for how in (format, "fp32"):
        net = DistributedDataParallel(network())
        if by_policy:
            mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters()), f"bf16,reduce={how}").close()
        elif how != "fp32":
            average_in(net, how)
        found.append(backward(net))
    sizes = [grad.abs() for grad in backward(network())]
    for size in sizes:
        dist.all_reduce(size)
    bound = 2 * {"bf16": 2.0**-8, "fp16": 2.0**-11}[format]
    error = max(((a - b).abs() / (size / 2 + 1e-30)).max().item() for a, b, size in zip(*found, sizes))
    assert 0.0 < error <= bound * (1 + 2.0**-10)
    assert all(grad.dtype is torch.float32 and bool(grad.isfinite().all()) for grad in found[0])
    if magnitude > 1.0:
        assert 2.0**15 < max(grad.abs().max().item() for grad in found[1]) < 65504  # two would overflow
    alike([grad.tolist() for grad in found[0]])


def reduction_refused() -> None:
    twice = DistributedDataParallel(network())
    average_in(twice, "fp16")
    for model, format, words in (
        (network(), "bf16", "(?s)Sequential.*MixedPrecisionPolicy"),
        (DistributedDataParallel(network()), "fp8", "(?s)fp8.*bf16"),
        (twice, "bf16", "can have only one"),
    ):
        with pytest.raises(UsageError, match=words):
            average_in(model, format)
    net = fully_shard(network())
    with pytest.raises(UsageError, match=r"MixedPrecisionPolicy\(reduce_dtype=torch\.bfloat16\)"):
        mezzo.MixedPrecision(net, torch.optim.SGD(net.parameters()), "bf16,reduce=bf16")


# Precision and arguments of `trained`.
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {"bad": True}),
    "fp16, no norm": ("fp16", {"bad": True, "clip_norm": None}),
    "fp16, clip both": ("fp16", {"clip_norm": 0.05, "clip_value": 0.02}),
    "accumulated": ("fp16", {"bad": True, "accumulate": 2}),
    "no_sync": ("fp16", {"bad": True, "accumulate": 2, "syncs": False}),
    "policy bf16": ("bf16", {"policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "policy fp16": ("fp16", {"bad": True, "policy": MixedPrecisionPolicy(torch.float16, torch.float32)}),
    "reduced in fp16": ("fp16", {"policy": MixedPrecisionPolicy(torch.float16)}),
    "released": ("fp16", {"bad": True, "kind": mezzo.optim.SGD, "release_gradients": True}),
}

CASES: dict[str, Callable[[], None]] = {
    **{
        f"fsdp: {name}": lambda precision=precision, how=how: trained(precision, **{"clip_norm": 0.5, **how})
        for name, (precision, how) in TRAININGS.items()
    },
    "dropped": dropped,
    "dropped: of two formats": lambda: dropped(
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "adversaries": adversaries,
    "adversaries: released": lambda: adversaries(release=True),
    **{
        f"scaled: {reduced}": lambda reduced=reduced: scaled(reduced)
        for reduced in ("shards", "meshes", "before", "after")
    },
    "scaled: closure": scaled_closure,
    "loss of parts": loss_of_parts,
    "decided": decided,
    "without gradients": without_gradients,
    "reduced: bf16": lambda: averaged_in("bf16", by_policy=True),
    "reduced: bf16, accumulated": lambda: averaged_in("bf16", accumulate=3),
    "reduced: fp16": lambda: averaged_in("fp16"),
    "reduced: fp16, large": lambda: averaged_in("fp16", magnitude=10000.0),
    "reduced: refused": reduction_refused,
}
