"""All ranks of a process group must run under one policy: rank 0 compares the options of all when the group is made.

A small message per rank goes through the group's store, because the group itself may not be usable yet.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mezzo.core.errors import UsageError
from mezzo.pytorch.same_options import difference, store_of_ranks

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session

PATIENCE = timedelta(seconds=60)
SECONDS_TO_FREE = 0.1


def make_init(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `init_process_group` of a run."""

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # If first imported when a group exists (by DDP or an optimizer, with Dynamo), it keeps that group as a default
        # argument, and so gloo's threads, into the end of Python: one that waits for the GIL then aborts the process.
        import torch.distributed.nn.functional  # noqa: F401

        result = original(*args, **kwargs)
        store = store_of_ranks()
        if store is not None:
            session.rank, session.world_size = dist.get_rank(), dist.get_world_size()
            session.begin()
            wrong = _difference(store, session.rank, session.world_size, _described(session))
            if wrong:
                dist.destroy_process_group()
                session.fatal = error = UsageError(wrong)
                raise error
            session.store = store
        return result

    return init_process_group


def make_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `destroy_process_group` of a run: gloo's threads get time for what they still have to do under the GIL.

    A thread of gloo takes the GIL to free a collective that has ended. If DDP frees the group meanwhile, it joins the
    thread without giving the GIL up, and both wait forever; if Python ends meanwhile, it aborts. So in PyTorch 2.13.
    """

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        time.sleep(SECONDS_TO_FREE)
        original(*args, **kwargs)

    return destroy_process_group


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
    wrong = difference(store, rank, range(ranks), mine, PATIENCE)
    if wrong is None:
        return (
            f"a rank of the process group did not answer in {PATIENCE.seconds} seconds: it runs without Mezzo, or has "
            "ended. Start every rank alike: torchrun --nproc-per-node 2 --no-python mezzo run train.py"
        )
    if not wrong:
        return ""
    return f"the ranks run under different policies: {wrong}. Start every rank with the same options of mezzo run"
