"""The error of one rank, in the errors of the others, to whom it is a connection that was closed.

A rank leaves its error in the process group's store: `reported` when a step raises it, which the script may still
catch, and `follow` when it ends the process. A rank whose connection is lost looks there. No collective is started.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mezzo.pytorch.distributed import is_distributed

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RAISED, _ENDED = "mezzo/raised", "mezzo/ended"
_CONNECTION = re.compile(r"\bgloo/|\bNCCL\b")  # in the RuntimeError of a collective
_SECONDS = 2.0  # for another rank to report its error after its connections are closed
_followed: list[
    tuple[Any, int]
] = []  # the latest store, and this rank, which a script may give up before it ends
_raised = False  # whether the store has an error of this rank


def follow() -> None:
    """From now on report the error that ends this process, and explain it by that of another rank."""
    if not is_distributed() or not (found := _store_and_rank()):
        return
    is_first, _followed[:] = not _followed, found
    if is_first:
        for key in (_RAISED, _ENDED):  # of ranks that were restarted since
            found[0][0].set(key, "")
        show = sys.excepthook  # PyTorch's, which writes the rank before each line

        def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
            other = _explained(error, _ENDED)
            if other is None:
                show(kind, error, trace)
            else:
                show(type(other), other, None)

        sys.excepthook = excepthook


def reported(function: _Function) -> _Function:
    """`function`, whose errors the other ranks can name; one that is a lost connection names theirs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if other := _explained(error, _RAISED):
                raise other from error
            raise
        if _raised:
            withdraw()
        return result

    return call  # type: ignore[return-value]


def report(error: BaseException, *, ends: bool) -> None:
    """Report an error that `ends` the process without `sys.excepthook`, or may be raised soon."""
    _explained(error, _ENDED if ends else _RAISED)


def withdraw() -> None:
    """An error that was reported was not raised, or the script has caught it and goes on."""
    global _raised
    _raised = False
    for store, _ in _store_and_rank():
        store.set(_RAISED, "")


def wait(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Whether all keys are in the store in time; RuntimeError if another rank has ended meanwhile."""
    begin = time.monotonic()
    while not store.check([*keys]):
        for reports, _ in _store_and_rank():
            if told := _read(reports, _ENDED):
                raise RuntimeError(_MESSAGE.format(told))
        waited = time.monotonic() - begin
        if waited > seconds:
            return False
        time.sleep(min(0.1, 0.01 + waited / 10))  # many ranks ask one store
    return True


_MESSAGE = "this rank cannot continue without the others: {}"


def _store_and_rank() -> list[tuple[Any, int]]:
    """The store of the default process group and this rank, if there are several; else those that it had."""
    if not is_distributed():
        return _followed
    import torch.distributed as dist

    from mezzo.pytorch.same_options import store_of_ranks

    store = store_of_ranks()
    return [] if store is None else [(store, dist.get_rank())]


def _explained(error: BaseException, key: str) -> RuntimeError | None:
    """The error with that of another rank, for a lost connection; None for any other, which is reported."""
    global _raised
    for store, rank in _store_and_rank() if isinstance(error, Exception) else ():
        try:
            if not _is_lost(error):
                store.set(key, f"rank {rank} raised {type(error).__name__}: {error}")
                _raised |= key == _RAISED
                return None
            end = time.monotonic() + _SECONDS
            while not (told := _read(store, _ENDED) or _read(store, _RAISED)) and time.monotonic() < end:
                time.sleep(0.02)
        except RuntimeError:
            told = "the process with the process group's store (rank 0 without torchrun) has ended; see its output"
        if told and told not in str(error):
            other = RuntimeError(_MESSAGE.format(told))
            other.__cause__ = error
            return other
    return None


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _is_lost(error: BaseException | None) -> bool:
    """Whether an error is a failed collective, or was raised after one."""
    import torch.distributed as dist

    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and _CONNECTION.search(str(error))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
