"""All ranks of a process group must run under one policy: rank 0 compares the options of all when the group is made.

A small message per rank goes through the group's store, because the group itself may not be usable yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
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
        # If first imported when a group exists (by DDP or an optimizer, with Dynamo), it keeps that group as a default
        # argument, and so gloo's threads, into the end of Python: one that waits for the GIL then aborts the process.
        import torch.distributed.nn.functional  # noqa: F401

        result = original(*args, **kwargs)
        store = None if dist.get_backend() in _SIMULATED else distributed_c10d._get_default_store()
        if store is not None:
            session.rank, session.world_size = dist.get_rank(), dist.get_world_size()
            session.begin()
            wrong = _difference(store, session.rank, session.world_size, _described(session))
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
    """What is wrong, in the same words on every rank; empty if all have the same options.

    A store may hold the messages of ranks that were killed and restarted, which are the same.
    """
    try:
        store.set(f"mezzo/options/{rank}", mine)
        if rank == 0:
            keys = [f"mezzo/options/{other}" for other in range(ranks)]
            store.wait(keys, PATIENCE)
            others = ((other, store.get(key).decode()) for other, key in enumerate(keys))
            found = next(
                (f"rank 0 has `{mine}`, rank {r} has `{its}`" for r, its in others if its != mine), _SAME
            )
            store.set("mezzo/answer", found)
        store.wait(["mezzo/answer"], PATIENCE)
        answer: str = store.get("mezzo/answer").decode()
        if answer != _SAME:  # rank 0 may hold the store, and ends last
            store.set(f"mezzo/read/{rank}", "")
            with suppress(RuntimeError):
                store.wait([f"mezzo/read/{other}" for other in range(ranks if rank == 0 else 0)], PATIENCE)
    except RuntimeError:
        return (
            f"a rank of the process group did not answer in {PATIENCE.seconds} seconds: it runs without Mezzo, or has "
            "ended. Start every rank alike: torchrun --nproc-per-node 2 --no-python mezzo run train.py"
        )
    if answer == _SAME:
        return ""
    return f"the ranks run under different policies: {answer}. Start every rank with the same options of mezzo run"
