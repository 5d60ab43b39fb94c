"""All ranks of a process group must run under one policy: each compares its own with rank 0's when the group is made.

Three small messages per rank go through the group's store, because the group itself may not be usable yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mezzo.core.errors import UsageError

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session

PATIENCE = timedelta(seconds=60)
_SIMULATED = ("fake", "threaded")  # backends of one process
_SAME = "the same"


def make_init(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `init_process_group` of a run."""

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        store = None if dist.get_backend() in _SIMULATED else distributed_c10d._get_default_store()
        if store is not None:
            session.rank, session.ranks = dist.get_rank(), dist.get_world_size()
            session.begin()
            wrong = _difference(store, session.rank, session.ranks, _described(session))
            if wrong:
                dist.destroy_process_group()
                session.fatal = error = UsageError(wrong)
                raise error
        return result

    return init_process_group


def _described(session: Session) -> str:
    """What decides the numbers, and which collectives Mezzo runs, as options of `mezzo run`."""
    request = session.request
    options = {
        f"--precision {session.policy}": True,
        f"--own {request.own}": request.own != "keep",
        f"--masters {request.masters}": bool(request.masters),
        f"--watch={request.watch}": bool(request.watch),
        "--no-trace": not request.trace,
    }
    return " ".join(option for option, given in options.items() if given)


def _difference(store: Any, rank: int, ranks: int, mine: str) -> str:
    """What is wrong, in the same words on every rank; empty if all have the same options."""
    try:
        if rank == 0:
            store.set("mezzo/first", mine)
        store.wait(["mezzo/first"], PATIENCE)
        first = store.get("mezzo/first").decode()
        if first != mine:
            store.set("mezzo/other", f"rank 0 has `{first}`, rank {rank} has `{mine}`")
            store.add("mezzo/others", 1)
        turn = store.add("mezzo/compared", 1)
        answer = f"mezzo/answer/{(turn - 1) // ranks}"  # a process may make its group more than once
        if turn % ranks == 0:
            store.set(answer, store.get("mezzo/other") if store.add("mezzo/others", 0) else _SAME)
        store.wait([answer], PATIENCE)
        found: str = store.get(answer).decode()
    except RuntimeError:
        return (
            f"a rank of the process group did not answer in {PATIENCE.seconds} seconds: it runs without Mezzo, or has "
            "ended. Start every rank alike: torchrun --nproc-per-node 2 --no-python mezzo run train.py"
        )
    if found == _SAME:
        return ""
    return f"the ranks run under different policies: {found}. Start every rank with the same options of mezzo run"
