"""`python -m mezzo.pytorch.run REQUEST.json`: a child process that runs one request and ends as its script ended."""

from __future__ import annotations

import sys

from mezzo.pytorch.run.session import run
from mezzo.runner import lifecycle


def main(words: list[str]) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run."""
    return lifecycle.main(words, run, "mezzo.pytorch.run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
