"""`python -m mezzo.reproduce.scripts.one_thread REQUEST.json`: `mezzo.pytorch.launch` with one OpenMP thread.

Several comparisons can then run beside one another without a fight for cores, and sums have the same order on a
machine of any size. The number must be in the environment before PyTorch is imported.
"""

from __future__ import annotations

import os
import sys


def main(words: list[str]) -> int:
    """Run one request on one thread; its status."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from mezzo.pytorch.launch.__main__ import main as launch

    return launch(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
