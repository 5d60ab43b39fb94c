"""`python -m mezzo.keras.launch REQUEST.json`: a child process that runs one request and ends as its script ended."""

from __future__ import annotations

import sys
from pathlib import Path

from mezzo.core.errors import MezzoError
from mezzo.keras.launch.runner import run
from mezzo.scripts.request import RunRequest


def main(words: list[str]) -> int:
    """Read the request, run it, return its status; 2 for a request that can't be run."""
    if len(words) != 1:
        print("usage: python -m mezzo.keras.launch REQUEST.json", file=sys.stderr)
        return 2
    try:
        return run(RunRequest.from_json(Path(words[0]).read_text(encoding="utf-8")))
    except (MezzoError, OSError) as error:
        print(f"mezzo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
