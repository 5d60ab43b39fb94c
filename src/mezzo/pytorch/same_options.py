"""What ranks tell each other by the process group's store: their options, and the error that ends one of them.

The first one compares the options, which must be the same. No collective is started: ranks with different options would
run different ones, and wait for each other forever.
"""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch.distributed as dist

from mezzo.core.errors import UsageError
from mezzo.pytorch.distributed import is_distributed

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SIMULATED = ("fake", "threaded")  # backends of one process
_SAME = "the same"
_SECONDS_TO_READ = timedelta(seconds=60)
_compared = Counter[str]()  # MixedPrecisions and GradScalers of this process, by their ranks
_ERROR, _HERE = "mezzo/error", "this rank cannot continue without the others: "
_LOST = re.compile(rf"\bgloo/|\bNCCL\b|{_HERE}")  # in the RuntimeError of a collective
_followed: list[Any] = []  # the latest store, and this rank: a script may give up its group before it ends


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
            store.wait([*keys.values()], patience)
            others = ((other, store.get(key).decode()) for other, key in keys.items())
            found = (f"rank {rank} has `{mine}`, rank {r} has `{its}`" for r, its in others if its != mine)
            store.set("mezzo/answer", next(found, _SAME))
        store.wait(["mezzo/answer"], patience)
        answer: str = store.get("mezzo/answer").decode()
        if answer != _SAME:  # the first rank may hold the store, and ends last
            store.set(f"mezzo/read/{rank}", "")
            with suppress(RuntimeError):
                store.wait([f"mezzo/read/{other}" for other in ranks if first], _SECONDS_TO_READ)
    except RuntimeError:
        return None
    return "" if answer == _SAME else answer


def compare_arguments(who: str, step: str, parts: dict[str, Any], ranks: Sequence[int]) -> None:
    """Raise a UsageError on all these ranks if their arguments of a `MixedPrecision` or `GradScaler` differ."""
    store = store_of_ranks() if len(ranks) > 1 else None
    if store is None:
        return
    mine = ", ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    group = f"{who}/{zlib.crc32(str(ranks).encode())}"
    own = dist.distributed_c10d.PrefixStore(f"mezzo/training/{group}/{_compared[group]}", store)
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


def follow() -> None:
    """From now on the error that ends this process is `explained`."""
    if is_distributed() and (store := store_of_ranks()) is not None:
        if not _followed:
            store.compare_set(_ERROR, "", "")  # so that `get` does not wait; another may have written
            sys.excepthook = partial(
                _show, sys.excepthook
            )  # PyTorch's, which writes the rank before each line
        _followed[:] = store, dist.get_rank()


def _show(show: Callable[..., Any], _: Any, error: BaseException, trace: Any) -> None:
    shown = explained(error)
    show(type(shown), shown, shown.__traceback__)


def reported(function: _Function) -> _Function:
    """`function`, whose error is `explained`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (shown := explained(error)) is error:
                raise
            raise shown from error

    return call  # type: ignore[return-value]


def explained(error: BaseException) -> BaseException:
    """The error itself, which the other ranks can read; for a closed connection one with what they have written."""
    with suppress(RuntimeError):  # the store may have ended with the rank that held it
        if not (isinstance(error, RuntimeError) and _LOST.search(str(error))):
            if _followed and isinstance(error, Exception):
                _followed[0].set(_ERROR, f"rank {_followed[1]} raised {type(error).__name__}: {error}")
        elif _followed and not str(error).startswith(_HERE):
            for patience in (0.0, 0.2):  # another may write after its connections are closed
                time.sleep(patience)
                if told := _followed[0].get(_ERROR).decode():
                    other = RuntimeError(_HERE + told)
                    other.__cause__ = error
                    return other
    return error
