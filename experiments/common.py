"""Shared by the experiments: the command line, the files they write, and paired differences.

Each experiment is a script of this folder, about one section of Micikevicius et al. 2017 (arXiv 1710.03740), at a size
for one small machine:

    python experiments/accumulation.py           # the quick size, which CI runs
    python experiments/accumulation.py --full    # the size of the figures in docs/dev/reproduce.md

It trains, prints each statement of the paper next to what this run saw, and writes `NAME/numbers.json` and
`NAME/figure.svg` into `--out`. The exit status is 1 if a finding that should show at this size does not. Every
experiment runs on one thread, so that two of them can run at the same time (`run_all.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

import figures
from mezzo.compare.folder import strict
from mezzo.core.equivalence import paired_interval
from mezzo.pytorch import hardware

WORDS = {
    "holds": "holds",
    "lost": "no longer holds",
    "known": "not visible at this size (known)",
    "gained": "holds, although it was not visible at this size before",
}


class Finding(NamedTuple):
    """One statement of the paper, compared with this run.

    Args:
        name: lower case, words joined by hyphens.
        expected: what the paper, or arithmetic, says.
        seen: this run's own numbers.
        holds: whether the run showed what was expected.
        known: why the finding is not visible at this size, if that is known. Such a finding does not fail the run.
    """

    name: str
    expected: str
    seen: str
    holds: bool
    known: str = ""

    @property
    def fate(self) -> str:
        """A key of `WORDS`."""
        if self.holds:
            return "gained" if self.known else "holds"
        return "known" if self.known else "lost"


Numbers = dict[str, Any]
Run = Callable[[bool], tuple[list[Finding], Numbers]]


def main(
    name: str,
    title: str,
    source: str,
    run: Run,
    draw: Callable[[Numbers, Figure], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one experiment from the command line; returns the exit status.

    Args:
        name: of its folder under `--out`.
        title: what it is about, in one line.
        source: section and figure of the paper.
        run: trains; called with whether the full size is asked for.
        draw: draws the numbers into an empty figure of 9 by 8 inches.
        argv: arguments instead of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=f"{title} ({source}).")
    parser.add_argument(
        "--full",
        action="store_true",
        help="train at the size of the published figures instead of the quick size",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mezzo-reproduce"), help="output folder (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    folder = arguments.out / name
    folder.mkdir(parents=True, exist_ok=True)  # before the training, which may take minutes
    (folder / "numbers.json").unlink(missing_ok=True)

    os.environ["OMP_NUM_THREADS"] = "1"  # of child processes
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.monotonic()
    findings, numbers = run(arguments.full)
    record = {
        "title": title,
        "source": source,
        "effort": "full" if arguments.full else "quick",
        "seconds": round(time.monotonic() - began, 1),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": hardware.describe(),
        "versions": {
            each: version(each) for each in ("torch", "numpy", "scikit-learn", "matplotlib", "mezzo")
        },
        "findings": [{**one._asdict(), "fate": one.fate} for one in findings],
        "numbers": numbers,
    }
    text = json.dumps(strict(record), indent=1, allow_nan=False)
    (folder / "numbers.json").write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {title}\n{source}; {record['effort']} size, {record['seconds']} s")
    for one in findings:
        print(f"  {one.name}: {WORDS[one.fate]}\n    expected  {one.expected}\n    seen      {one.seen}")
        if one.known:
            print(f"    why       {one.known}")
    figures.save(folder / "figure.svg", title, lambda figure: draw(numbers, figure))
    return int(any(one.fate == "lost" for one in findings))


def progress(text: str) -> None:
    """Print a progress line on standard error."""
    print(text, file=sys.stderr, flush=True)


class Gap(NamedTuple):
    """Paired differences from FP32: mean, 90 % interval, and what they establish with a margin."""

    mean: float
    low: float
    high: float
    behind: bool
    equivalent: bool


def gap(differences: Sequence[float], margin: float) -> Gap:
    """Judge differences (one per seed; larger is worse). A difference that is not finite establishes harm."""
    ends = np.asarray(differences, dtype=np.float64)
    low, high = map(float, paired_interval(ends))
    behind = not np.isfinite(ends).all() or low > margin
    return Gap(float(ends.mean()), low, high, bool(behind), low > -margin and high < margin)


def scaled(scale: float) -> str:
    """The policy of an fp16 run with a constant loss scale."""
    return f"fp16,loss_scale={scale!r}"


def power(scale: float) -> str:
    """A loss scale as text: from 1,024 on, and below 1, as a power of two."""
    return f"{scale:g}" if 1 <= scale < 1024 else f"2^{math.log2(scale):g}"


def tex(scale: float) -> str:
    """`power` with a raised exponent."""
    base, _, exponent = power(scale).partition("^")
    return f"{base}$^{{{exponent}}}$" if exponent else base


def in_words(precision: str) -> str:
    """A policy in words."""
    if precision == "fp32":
        return "FP32"
    scale = float(precision.rpartition("=")[2])
    return "no loss scale" if scale == 1 else f"scale {tex(scale)}"
