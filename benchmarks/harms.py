"""Find the size from which a planted harm is called divergent: five harms of growing size under `mezzo compare`.

    python benchmarks/harms.py                 # writes benchmarks/results/harms.json
    python benchmarks/harms.py --harm frozen-copy --seeds 1

Each harm affects only the candidate (`planted.py`), so the FP32 runs of a demo are the same for every harm and size,
and run once. Each size is judged as for a user, with the default margin.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mezzo.compare.comparison import compare
from mezzo.compare.folder import prepare
from mezzo.compare.request import Request
from mezzo.demos import DEMOS
from mezzo.pytorch.hardware import describe

PLANTED = Path(__file__).parent / "planted.py"
SMALL = {
    "digits": ("--epochs", "4", "--width", "32"),
    "text-gpt": (
        "--steps",
        "80",
        "--width",
        "128",
        "--layers",
        "2",
        "--context",
        "64",
        "--characters",
        "400000",
    ),
}


@dataclass(frozen=True)
class Row:
    """A harm, the demo on which it is planted, the candidate's precision, its sizes, and what a size means."""

    harm: str
    demo: str
    precision: str
    sizes: tuple[float, ...]
    unit: str


ROWS = (
    Row("coarse-gradients", "digits", "bf16", (8, 11, 12, 13, 14), "of 16 bits of the gradient cut off"),
    Row(
        "frozen-copy", "digits", "bf16", (1, 2, 4, 8, 16), "steps between two refreshes of the weights' copy"
    ),
    Row("fp16-norm", "digits", "bf16", (1, 16, 64, 256, 1024), "times the inputs before fp16 statistics"),
    Row("wrong-unscale", "text-gpt", "bf16", (1, 2, 8, 64, 1024), "times the gradients at every fourth step"),
)
# The fifth harm needs no planting: fp16 with a loss scale under which the gradients vanish.
SCALES = tuple(2.0**-power for power in (0, 6, 12, 18, 24))


def planted(row: Row, size: float, seeds: int, folder: Path, baseline: Path) -> dict[str, Any]:
    """The candidate's part of the verdict on one size of one harm."""
    demo = DEMOS[row.demo]
    request = Request(
        str(PLANTED),
        (row.harm, f"{size:g}", str(demo.path), *SMALL[row.demo]),
        precisions=(row.precision,),
        seeds=seeds,
        metric=demo.metric,
    )
    prepare(folder, request)
    for run in baseline.glob("fp32*"):
        shutil.copy(run, folder / "runs" / run.name)
    found: dict[str, Any] = compare(request, folder)["candidates"][row.precision]
    baseline.mkdir(exist_ok=True)
    for run in (folder / "runs").glob("fp32*"):
        shutil.copy(run, baseline / run.name)
    return found


def small_scales(seeds: int, folder: Path) -> dict[float, dict[str, Any]]:
    """The verdicts on fp16 under each constant loss scale, from the largest to the smallest."""
    demo = DEMOS["digits"]
    names = {scale: f"fp16,loss_scale={scale!r}" for scale in SCALES}
    request = Request(
        str(demo.path), SMALL["digits"], precisions=tuple(names.values()), seeds=seeds, metric=demo.metric
    )
    candidates = compare(request, folder)["candidates"]
    return {scale: candidates[name] for scale, name in names.items()}


def _line(size: float, found: dict[str, Any]) -> dict[str, Any]:
    kept = ("parity", "loss_gap_relative", "margin_relative", "final_metric", "seeds", "reason")
    return {"size": size, **{key: found.get(key) for key in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.harm for row in ROWS] + ["small-loss-scale"]
    parser.add_argument(
        "--harm", choices=names, action="append", help="test only this harm (may be repeated)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="pairs of runs per size (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "harms.json")
    arguments = parser.parse_args()
    chosen = arguments.harm or names
    console = Console()
    results: dict[str, Any] = {"machine": describe(), "sizes_of_demos": SMALL, "harms": {}}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for row in ROWS:
            if row.harm not in chosen:
                continue
            lines = []
            for size in row.sizes:
                folder = work / f"{row.harm}-{size:g}"
                found = planted(row, size, arguments.seeds, folder, work / f"fp32-{row.demo}")
                lines.append(_line(size, found))
                console.print(f"{row.harm} on {row.demo}, {size:g} {row.unit}: {found['parity']}")
            results["harms"][row.harm] = {"demo": row.demo, "unit": row.unit, "sizes": lines}
        if "small-loss-scale" in chosen:
            lines = [
                _line(scale, found) for scale, found in small_scales(arguments.seeds, work / "scale").items()
            ]
            for line in lines:
                console.print(f"fp16 with the constant loss scale {line['size']:g}: {line['parity']}")
            results["harms"]["small-loss-scale"] = {
                "demo": "digits",
                "unit": "constant loss scale",
                "sizes": lines,
            }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
