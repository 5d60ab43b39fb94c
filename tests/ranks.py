"""Ranks of a gloo process group, each a child process that prints its results as JSON in its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def processes(
    words: list[str], folder: Path, *, seconds: float, count: int = 2, status: int = 0
) -> list[tuple[str, str]]:
    """What the ranks of ``python WORDS`` print, on stdout and stderr; {rank} in a word stands for the rank."""
    running = [
        subprocess.Popen(
            [sys.executable, *(word.replace("{rank}", str(rank)) for word in words)],
            cwd=folder,
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [each.communicate(timeout=seconds) for each in running]
    finally:
        for each in running:
            each.kill()
    for each, (_, err) in zip(running, outputs):
        assert each.returncode == status, err
    return outputs


Results = list[dict[str, Any]]


def ranks_of(child: str, meeting: Path, *words: str, seconds: float, count: int = 2) -> Results:
    """Case -> result of each rank: what a file of tests/children printed, whose arguments are those of `cases.py`."""
    file = str(Path(__file__).parent / "children" / child)
    command = ["-W", "error", "-W", "ignore:MixedPrecision", file, "{rank}", str(meeting), str(count), *words]
    outputs = processes(command, meeting.parent, seconds=seconds, count=count)
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def assert_right(results: Results, subject: str, count: int) -> None:
    """No rank found anything wrong in the cases of this subject, of which there are so many."""
    found = {name for name in results[0] if name.partition(":")[0] == subject}
    assert len(found) == count
    wrong = {name: [rank[name] for rank in results] for name in found}
    assert {name: said for name, said in wrong.items() if any(each is not True for each in said)} == {}
