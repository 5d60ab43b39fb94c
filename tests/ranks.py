"""Ranks of a gloo process group, each a child process that prints its results as JSON in its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def two_ranks(child: str, meeting: Path, *, seconds: float) -> list[dict[str, Any]]:
    """Case -> result of each rank: what a file of tests/children printed, given its rank and where the two meet."""
    return ranks_of(child, meeting, seconds=seconds)


def ranks_of(child: str, meeting: Path, *words: str, seconds: float, count: int = 2) -> list[dict[str, Any]]:
    """As `two_ranks`, for `count` ranks; `words` are the child's further arguments."""
    file = Path(__file__).parent / "children" / child
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-W",
                "ignore:MixedPrecision",
                str(file),
                str(rank),
                str(meeting),
                *words,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(count)
    ]
    try:
        outputs = [each.communicate(timeout=seconds) for each in children]
    finally:
        for each in children:
            each.kill()
    for each, (_, err) in zip(children, outputs):
        assert each.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
