"""What the cases of several gloo ranks share. A case runs on all ranks at once and raises where something is wrong.

Arguments of a process: its rank, a file for the ranks to meet at, their number, and whatever its cases need.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from leaving import leave
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

import mezzo

RANK, MEETING, WORLD = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
INF = float("inf")


def data(seed: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def gathered(mine: Any) -> list[Any]:
    """What each rank calls this with."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, mine)
    return found


def alike(mine: Any) -> None:
    """Check that every rank has the same, to the bit."""
    first, *others = map(repr, gathered(mine))
    assert all(other == first for other in others)


def step(mp: mezzo.MixedPrecision, x: Tensor) -> Any:
    """A training step with the mean square of the model's output as its loss."""
    with mp.autocast():
        loss = mp.model(x).float().square().mean()
    return mp.step(loss)


def whole(net: nn.Module) -> list[float]:
    """All weights, those in shards too."""
    return [x for p in net.parameters() for x in full(p).double().flatten().tolist()]


def full(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # gloo and NCCL can't gather int16.
    whole = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
    return whole.full_tensor().detach().to(tensor.dtype)


def same(mine: Any, wanted: Any, what: str) -> None:
    """Check that tensors are the same to the bit, in shards or whole; and other values."""
    if isinstance(wanted, Tensor):
        mine, wanted = full(mine), full(wanted)
        assert mine.dtype is wanted.dtype, f"{what}: {mine.dtype} instead of {wanted.dtype}"
        assert mine.shape == wanted.shape, f"{what}: {list(mine.shape)} instead of {list(wanted.shape)}"
        assert torch.equal(mine.nan_to_num(), wanted.nan_to_num()), f"{what} differs: {mine} {wanted}"
    else:
        assert mine == wanted, f"{what}: {mine} instead of {wanted}"


def copied(tree: Any) -> Any:
    """Every tensor whole."""
    return tree_map(lambda value: full(value).clone() if isinstance(value, Tensor) else value, tree)


def compare(mine: Any, wanted: Any) -> None:
    trees = (tree_flatten_with_path(tree)[0] for tree in (mine, wanted))
    got, expected = ({keystr(path): value for path, value in leaves} for leaves in trees)
    assert got.keys() == expected.keys()
    for name, other in expected.items():
        same(got[name], other, name)


def run(cases: dict[str, Callable[[], Any]]) -> NoReturn:
    """Print case -> true, or what it returned, or what was wrong, with the values of local variables."""
    patience = timedelta(seconds=120)  # a case that fails on one rank leaves the others in a collective
    store = dist.FileStore(MEETING, WORLD)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=patience)
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = case() or True
        except (
            Exception,
            CheckpointException,
            pytest.fail.Exception,
        ) as error:  # the last two are no Exception
            told = traceback.TracebackException.from_exception(error, limit=-2, capture_locals=True)
            results[name] = "".join(told.format())[-3000:]
        dist.barrier()
    leave(results)
