"""`python comparing.py SCRIPT.json OUT`: `mezzo compare` over children that only pretend to train."""

from __future__ import annotations

import sys
from pathlib import Path

from mezzo.compare.comparison import compare
from mezzo.compare.request import Request

FAKE = (sys.executable, str(Path(__file__).with_name("fake_launch.py")))

if __name__ == "__main__":
    compare(Request(sys.argv[1], precisions=("bf16",), seeds=1), Path(sys.argv[2]), command=FAKE)
