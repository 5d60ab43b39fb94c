"""A child process that runs one request and ends as its script ended: `python -m mezzo.FRAMEWORK.launch FILE`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from mezzo.core.errors import MezzoError
from mezzo.scripts.request import RunRequest

PARENT = "MEZZO_PARENT"
"""Environment variable: the id of the process that waits for this one."""


def main(words: list[str], run: Callable[[RunRequest], int], module: str) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run.

    Args:
        words: of the command line.
        run: what runs a request of that framework.
        module: its name, for the usage line.
    """
    if len(words) != 1:
        print(f"usage: python -m {module} REQUEST.json", file=sys.stderr)
        return 2
    if int(os.environ.pop(PARENT, 0)) not in (0, os.getppid()):
        return 2  # the parent was killed while this process started
    try:
        return run(RunRequest.from_json(Path(words[0]).read_text(encoding="utf-8")))
    except (MezzoError, OSError) as error:
        print(f"mezzo: {error}", file=sys.stderr)
        return 2
