"""Cases of `sharded_optimizers.py`: a MixedPrecision's state in the middle of a window, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import RANK, alike, compare, copied
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.core.errors import UsageError


def data(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.1)


def dampened(params: Any) -> torch.optim.Optimizer:
    """Counts no step; its first one, alone, takes the whole gradient."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.5, dampening=0.5)


# Name -> how the model is trained, and the factor of the losses of the first window, of 4.
WAYS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "SGD": (sgd, {}, 1.0),
    "split": (torch.optim.AdamW, {"params": "bf16", "masters": "split"}, 1.0),
    "masters": (torch.optim.NAdam, {"params": "bf16", "masters": "fp32"}, 1.0),
    "dampened": (dampened, {}, 1.0),
    "skipped": (torch.optim.NAdam, {}, 1e30),  # has no states, and gradients of a window
}


def training(seed: int, precision: str, make: Any = sgd, **how: Any) -> tuple[Any, Any, mezzo.MixedPrecision]:
    """Uneven shards, a buffer that moves, and a parameter that no loss reaches."""
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    net.unused = nn.Parameter(torch.ones(3))
    for p in net.parameters() if "params" in how else ():
        p.data = p.data.bfloat16()
    # The sum of three equal gradients has more digits than bf16; in FP32 their average is exact on any number of ranks.
    fully_shard(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = make(net.parameters())
    return net, optimizer, mezzo.MixedPrecision(net, optimizer, precision, accumulate=4, **how)


def train(net: Any, mp: mezzo.MixedPrecision, seeds: range, factor: float = 1.0) -> None:
    for seed in seeds:
        with mp.autocast():
            loss = net(data(seed)).float().square().mean() * factor
        mp.step(loss)


def snapshot(net: Any, mp: mezzo.MixedPrecision) -> dict[str, Any]:
    """All bits of a training, whole."""
    params, optimizer = list(net.parameters()), mp.optimizer
    masters = [optimizer.master(p) for p in params] if hasattr(optimizer, "master") else []
    state = {"scale": mp.loss_scale, "window": mp._window.seen, "buffers": list(net.buffers())}
    return copied({"weights": params + masters, "grads": [mp._gradients.of(p) for p in params], **state})


def save(folder: Path, precision: str, losses: int, way: str) -> None:
    """All ranks have the same data, so that any number of ranks goes on with the same gradients."""
    make, how, factor = WAYS[way]
    net, optimizer, mp = training(0, precision, make, **how)
    train(net, mp, range(min(losses, 4)), factor)
    train(net, mp, range(4, losses))
    weights, state = get_state_dict(net, optimizer)
    held = {"model": weights, "optimizer": state, "mp": mp.state_dict(fixed_keys=True)}
    dcp.save(held, checkpoint_id=folder / f"window {precision} {losses} {way}")
    wanted = [snapshot(net, mp), goes_on(net, mp, precision, way)]
    if RANK == 0:
        torch.save(wanted, folder / f"window {precision} {losses} {way}.pt")


def goes_on(net: Any, mp: mezzo.MixedPrecision, precision: str, way: str) -> dict[str, Any]:
    # In fp16 the window's end overflows: the step is skipped, and the buffers go back to the window's start.
    train(net, mp, range(10, 12), 1e30 if precision == "fp16" and way == "SGD" else 1.0)
    mp.flush()
    return snapshot(net, mp)


def load(folder: Path, precision: str, losses: int, way: str) -> None:
    make, how, _ = WAYS[way]
    net, optimizer, mp = training(1, precision, make, **how)
    weights, state = get_state_dict(net, optimizer)
    held = {"model": weights, "optimizer": state, "mp": mp.state_dict(fixed_keys=True)}
    dcp.load(held, checkpoint_id=folder / f"window {precision} {losses} {way}")
    set_state_dict(net, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    mp.load_state_dict(held["mp"])
    saved, after = torch.load(folder / f"window {precision} {losses} {way}.pt", weights_only=False)
    compare(snapshot(net, mp), saved)
    compare(goes_on(net, mp, precision, way), after)


def unreduced() -> None:
    """Gradients that are not reduced yet are no state."""
    net, _, mp = training(0, "bf16")
    net.set_requires_gradient_sync(False)
    train(net, mp, range(1))
    with pytest.raises(UsageError, match=r"result\.updated"):
        mp.state_dict()


def traced() -> None:
    with pytest.raises(UserWarning, match="on one process without fully_shard"):  # an error in tests
        training(0, "fp16", trace=True)


def differ(name: str, call: Callable[[], object], argument: str) -> None:
    """Ranks with different arguments end with one sentence, before a collective that one of them lacks."""
    with pytest.raises(UsageError) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(f"{name}: ")
    assert all(
        part in said for part in ("rank 0 has", "rank 1 has", argument, "the same arguments on every rank")
    )
    alike(said)


def trainings_differ(argument: str, *values: Any) -> None:
    how = {"precision": "fp16" if argument == "trace" else "bf16", argument: values[RANK]}
    net = (fully_shard if argument == "release_gradients" else DistributedDataParallel)(nn.Linear(6, 3))
    optimizer = mezzo.optim.AdamW(net.parameters(), lr=0.1, state=how.pop("optimizer's state", "fp32"))
    mp = mezzo.MixedPrecision(net, optimizer, **how)
    differ("MixedPrecision", lambda: train(net, mp, range(4)), argument)


def states_differ(*, window: bool) -> None:
    """A state that rank 0 alone has loaded, of another loss scale, or in the middle of a window."""
    net = DistributedDataParallel(nn.Linear(6, 3))
    mp = mezzo.MixedPrecision(net, sgd(net.parameters()), "bf16" if window else "fp16", accumulate=2)
    state = mp.state_dict(fixed_keys=True)
    if RANK == 0:
        state["window"]["seen" if window else "scale"] = 1
        if not window:
            state["loss_scale"]["scale"] = 1024.0
        mp.load_state_dict(state)
    mine = f"with {1 - RANK} accumulated" if window else f"scale is {(1024, 65536)[RANK]}"
    with pytest.raises(UsageError, match=rf"rank {RANK} .*{mine}.*on every rank"):
        train(net, mp, range(1))


def scalers_differ() -> None:
    net = fully_shard(nn.Linear(6, 3))
    scaler = mezzo.GradScaler(init_scale=1024.0 * (RANK + 1))
    scaler.scale(net(data(RANK)).square().mean()).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    differ("GradScaler", lambda: scaler.step(optimizer), "init=1024")


def made_before(name: str, *, between: bool) -> None:
    """An optimizer made before `fully_shard` says what to do. `between`: after one layer was sharded."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if between:
        fully_shard(net[0])
    if name == "with_masters":
        optimizer = mezzo.optim.with_masters(torch.optim.SGD(net.parameters()))
    else:
        optimizer = (mezzo.optim if name == "AdamW" else torch.optim).AdamW(net.parameters())
    fully_shard(net)
    net(torch.ones(1, 4)).sum().backward()
    trains = name == "MixedPrecision"
    act = (lambda: mezzo.MixedPrecision(net, optimizer, "bf16")) if trains else optimizer.step
    with pytest.raises(UsageError) as caught:
        act()
    for part in ("before fully_shard", "[4, 4]", "(model.parameters(), ...)"):
        assert part in str(caught.value)


CASES: dict[str, Callable[[], None]] = {
    **{
        f"made before: {name}{' between' * between}": lambda name=name, between=between: made_before(
            name, between=between
        )
        for name in ("AdamW", "with_masters", "MixedPrecision")
        for between in (False, True)
    },
    "unreduced": unreduced,
    "traced": traced,
    **{
        f"differ: {row[0]}": lambda row=row: trainings_differ(*row)
        for row in (
            ("precision", "bf16", "fp16"),
            ("accumulate", 1, 2),
            ("clip_norm", None, 1.0),
            ("trace", False, None),  # None: traced, on a CPU
            ("release_gradients", False, True),
            ("optimizer's state", "fp32", "bf16"),
        )
    },
    "differ: scalers": scalers_differ,
    "differ: states": lambda: states_differ(window=False),
    "differ: windows": lambda: states_differ(window=True),
}
