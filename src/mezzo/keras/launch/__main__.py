"""`python -m mezzo.keras.launch REQUEST.json`: a child process that runs one request and ends as its script ended."""

from __future__ import annotations

import sys

from mezzo.keras.launch.runner import run
from mezzo.scripts import child


def main(words: list[str]) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run."""
    return child.main(words, run, "mezzo.keras.launch")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
