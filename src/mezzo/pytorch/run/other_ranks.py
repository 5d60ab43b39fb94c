"""What other ranks have to say at the end of a run: rank 0 prints it with their numbers.

Each rank leaves its lines in the store of the process group, which may be destroyed by then. No collective is started,
and rank 0 waits `PATIENCE` seconds at most, because another rank may have been killed or may go on for long.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PATIENCE = 5.0
_KEY = "mezzo/said/{}"


def leave(store: Any, rank: int, entries: Sequence[str]) -> None:
    """Leave this rank's entries for rank 0, if the store is still there."""
    with suppress(RuntimeError):
        if _answers(store):
            store.set(_KEY.format(rank), json.dumps(list(entries)))


def collected(store: Any, ranks: int, own: str, *, patience: float = PATIENCE) -> list[str]:
    """The entries that the other ranks have left and that `own`, the text of rank 0, lacks; each once."""
    keys, end = [_KEY.format(rank) for rank in range(1, ranks)], time.monotonic() + patience
    by: dict[str, list[int]] = {}
    with suppress(RuntimeError):
        if not _answers(store):
            return []
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(0.05)
        for rank, key in enumerate(keys, start=1):
            for entry in json.loads(store.get(key)) if store.check([key]) else ():
                by.setdefault(entry, []).append(rank)
    return [_numbered(entry, some) for entry, some in by.items() if entry not in own]


def _numbered(entry: str, ranks: list[int]) -> str:
    """The entry with its ranks' numbers at the end of the first line, unless it has the rank's number itself."""
    if len(ranks) == 1 and f"rank {ranks[0]}" in entry:
        return entry
    first, *rest = entry.splitlines()
    which = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return "\n".join([f"{first} (rank{'s' * (len(ranks) > 1)} {which})", *rest])


def _answers(store: Any) -> bool:
    """Whether the store is there: a call to one that has ended would print warnings of its own."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        with suppress(OSError):
            socket.create_connection((store.host, store.port), PATIENCE).close()
            return True
        return False
    return True
