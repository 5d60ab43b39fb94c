"""`python -m mezzo.pytorch.launch REQUEST.json`: a child process that runs one request and ends as its script ended."""

from __future__ import annotations

import sys

from mezzo.pytorch.launch.runner import run
from mezzo.scripts import runner


def main(words: list[str]) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run."""
    return runner.main(words, run, "mezzo.pytorch.launch")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
