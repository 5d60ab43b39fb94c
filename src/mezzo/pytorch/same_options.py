"""All ranks must train under the same options: the first one compares what all have left in the process group's store.

No collective is started: ranks with different options would run different ones, and wait for each other forever.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import Ranks
from mezzo.pytorch.rank_errors import wait

_SIMULATED = ("fake", "threaded")  # backends of one process
_SAME = "the same"
_SECONDS_TO_READ = timedelta(seconds=60)
_compared = Counter[str]()  # MixedPrecisions and GradScalers of this process, by their ranks


def store_of_ranks() -> Any:
    """The store of the default process group; None where one process simulates the others."""
    world: Any = dist.group.WORLD
    return None if dist.get_backend() in _SIMULATED else world.get_group_store()


def difference(store: Any, rank: int, ranks: Sequence[int], mine: str, patience: timedelta) -> str | None:
    """What differs, in the same words on every rank; empty if nothing does, None if a rank did not answer in time.

    A store may hold the messages of ranks that were killed and restarted, which are the same.
    """
    first = rank == ranks[0]
    try:
        store.set(f"mezzo/options/{rank}", mine)
        if first:
            keys = {other: f"mezzo/options/{other}" for other in ranks}
            if not wait(store, [*keys.values()], patience.total_seconds()):
                return None
            others = ((other, store.get(key).decode()) for other, key in keys.items())
            found = (f"rank {rank} has `{mine}`, rank {r} has `{its}`" for r, its in others if its != mine)
            store.set("mezzo/answer", next(found, _SAME))
        if not wait(store, ["mezzo/answer"], patience.total_seconds()):
            return None
        answer: str = store.get("mezzo/answer").decode()
        if answer != _SAME:  # the first rank may hold the store, and ends last
            store.set(f"mezzo/read/{rank}", "")
            with suppress(RuntimeError):
                store.wait([f"mezzo/read/{other}" for other in ranks if first], _SECONDS_TO_READ)
    except dist.DistError:  # the store has ended with the rank that held it
        return None
    return "" if answer == _SAME else answer


def compare_states(who: str, ranks: Ranks, scale: float, losses: int = 0) -> None:
    """Raise a UsageError on all these ranks if their loss scales, or numbers of accumulated losses, differ."""
    largest = ranks.largest(scale, losses, -scale, -losses, of_holders=True)
    if largest[:2] != [-least for least in largest[2:]]:
        raise different_states(who, scale, losses)


def different_states(who: str, scale: float, losses: int = 0) -> UsageError:
    """The error where they do."""
    return UsageError(
        f"{who}: the ranks have different states: on rank {dist.get_rank()} the loss scale is {scale:g}, with {losses} "
        "accumulated losses. Call load_state_dict with the same state on every rank."
    )


def compare_arguments(who: str, step: str, parts: dict[str, Any], ranks: Sequence[int]) -> None:
    """Raise a UsageError on all these ranks if their arguments of a `MixedPrecision` or `GradScaler` differ."""
    store = store_of_ranks() if len(ranks) > 1 else None
    if store is None:
        return
    mine = ", ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    group = f"{who}/{zlib.crc32(str(ranks).encode())}"
    own = distributed_c10d.PrefixStore(f"mezzo/training/{group}/{_compared[group]}", store)
    _compared[group] += 1
    wrong = difference(own, dist.get_rank(), ranks, mine, store.timeout)
    if wrong:
        raise UsageError(
            f"{who}: the ranks have different arguments: {wrong}. They would wait for each other forever, or train "
            "different weights. Pass the same arguments on every rank."
        )
    if wrong is None:
        raise UsageError(
            f"{who}: one of the {len(ranks)} ranks did not reach its first {step} in "
            f"{store.timeout.total_seconds():.0f} seconds. Create the {who} on every rank, and call step."
        )
