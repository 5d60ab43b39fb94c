"""How many bytes this machine could still give: what the kernel says, and what the control group allows.

Only Linux says it (`/proc/meminfo`). In a container the limit of the control group is what counts, of the process's
own or of any above it; pages of files that it could drop at once count as free, as they do in `MemAvailable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MARGIN = 0.10
LEAST_MARGIN = 512 * 1024**2

# Of a group, version 2 and version 1: the limit, what is used, and in `memory.stat` what could be dropped.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that a process could allocate now without swapping; None where the system doesn't say."""
    machine = _of_machine(root)
    return None if machine is None else max(0, min([machine, *_of_groups(root)]))


def spendable_bytes(root: Path = Path("/")) -> int | None:
    """What is available, less a margin of 10 % or 512 MiB (the larger) for all that are no tensors."""
    available = available_bytes(root)
    return None if available is None else max(0, available - max(int(MARGIN * available), LEAST_MARGIN))


def _of_machine(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_groups(root: Path) -> Iterator[int]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for controller, limit, used, droppable in _VERSIONS:
            if controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / controller
            folder = top / path.lstrip("/")
            for place in (folder, *folder.parents):
                try:
                    left = int((place / limit).read_text()) - int((place / used).read_text())
                    yield left + _stat(place / "memory.stat", droppable)
                except (OSError, ValueError):  # no such group, or "max": no limit here
                    pass
                if place == top:
                    break


def _stat(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
