"""Cases of `sharded_optimizers.py`: a MixedPrecision's state in the middle of a window, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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


def whole(net: Any, mp: mezzo.MixedPrecision) -> dict[str, Any]:
    """All bits of a training, whole."""
    params, optimizer = list(net.parameters()), mp.optimizer
    grads: list[Any] = [mp._gradients.of(p) for p in params]
    masters = [optimizer.master(p) for p in params] if hasattr(optimizer, "master") else []
    return {
        "weights": [p.detach().full_tensor().clone() for p in [*params, *masters]],
        "grads": [None if grad is None else grad.full_tensor().clone() for grad in grads],
        "buffers": [buffer.clone() for buffer in net.buffers()],
        "scale": mp.loss_scale,
        "window": mp._window.seen,
    }


def same(mine: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        got = mine[name] if isinstance(value, list) else [mine[name]]
        for one, other in zip(got, value if isinstance(value, list) else [value], strict=True):
            equal = torch.equal(one, other) if isinstance(other, Tensor) else one == other
            assert equal, f"{name}: {one} instead of {other}"


def save(folder: Path, precision: str, losses: int, way: str) -> None:
    """All ranks have the same data, so that any number of ranks goes on with the same gradients."""
    make, how, factor = WAYS[way]
    net, optimizer, mp = training(0, precision, make, **how)
    train(net, mp, range(min(losses, 4)), factor)
    train(net, mp, range(4, losses))
    weights, state = get_state_dict(net, optimizer)
    held = {"model": weights, "optimizer": state, "mp": mp.state_dict(fixed_keys=True)}
    dcp.save(held, checkpoint_id=folder / f"window {precision} {losses} {way}")
    wanted = [whole(net, mp), goes_on(net, mp, precision, way)]
    if dist.get_rank() == 0:
        torch.save(wanted, folder / f"window {precision} {losses} {way}.pt")


def goes_on(net: Any, mp: mezzo.MixedPrecision, precision: str, way: str) -> dict[str, Any]:
    # In fp16 the window's end overflows: the step is skipped, and the buffers go back to the window's start.
    train(net, mp, range(10, 12), 1e30 if precision == "fp16" and way == "SGD" else 1.0)
    mp.flush()
    return whole(net, mp)


def load(folder: Path, precision: str, losses: int, way: str) -> None:
    make, how, _ = WAYS[way]
    net, optimizer, mp = training(1, precision, make, **how)
    weights, state = get_state_dict(net, optimizer)
    held = {"model": weights, "optimizer": state, "mp": mp.state_dict(fixed_keys=True)}
    dcp.load(held, checkpoint_id=folder / f"window {precision} {losses} {way}")
    set_state_dict(net, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    mp.load_state_dict(held["mp"])
    saved, after = torch.load(folder / f"window {precision} {losses} {way}.pt", weights_only=False)
    same(whole(net, mp), saved)
    same(goes_on(net, mp, precision, way), after)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (UsageError, UserWarning) as error:  # warnings are errors in tests
        return str(error)
    raise AssertionError("no error")


def unreduced() -> str:
    net, _, mp = training(0, "bf16")
    net.set_requires_gradient_sync(False)
    train(net, mp, range(1))
    return error_of(mp.state_dict)


def traced() -> str:
    return error_of(lambda: training(0, "fp16", trace=True))


def differ(rank: int, arguments: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Ranks with different arguments end with one sentence, before a collective that one of them lacks."""
    how = {"precision": "fp16" if "trace" in arguments[rank] else "bf16", **arguments[rank]}
    net = (fully_shard if "release_gradients" in how else DistributedDataParallel)(nn.Linear(6, 3))
    optimizer = mezzo.optim.AdamW(net.parameters(), lr=0.1, state=how.pop("optimizer's state", "fp32"))
    mp = mezzo.MixedPrecision(net, optimizer, **how)
    return error_of(lambda: train(net, mp, range(4)))


def scalers_differ(rank: int) -> str:
    net = fully_shard(nn.Linear(6, 3))
    scaler = mezzo.GradScaler(init_scale=1024.0 * (rank + 1))
    scaler.scale(net(data(rank)).square().mean()).backward()
    return error_of(lambda: scaler.step(torch.optim.SGD(net.parameters(), lr=0.1)))


def made_before(*, between: bool = False) -> str:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if between:
        fully_shard(net[0])
    optimizer = torch.optim.AdamW(net.parameters())
    fully_shard(net)
    return error_of(lambda: mezzo.MixedPrecision(net, optimizer, "bf16"))
