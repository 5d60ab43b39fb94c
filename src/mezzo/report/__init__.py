"""Records in, one HTML file out. Imports core only."""

from __future__ import annotations

import os
from glob import escape
from pathlib import Path

from mezzo.core.errors import UsageError
from mezzo.core.whole_file import write_whole
from mezzo.report.page import render, render_runs
from mezzo.report.run import advice, read, read_run


def build(directory: str | os.PathLike[str]) -> Path:
    """Write ``DIR/report.html`` from ``DIR/verdict.json`` and ``DIR/runs/*.jsonl``, and return its path."""
    folder = Path(directory)
    return write_whole(folder / "report.html", render(read(folder)))


def build_run(records: str | os.PathLike[str]) -> Path:
    """Write a page about the runs in a folder (``DIR/report.html``) or a file (``NAME.html``), and return its path.

    The page of a file has those of the other ranks as well (``NAME-rank1.jsonl``).
    """
    place = Path(records)
    if place.is_dir():
        target, name = place / "report.html", place.resolve().name
        files = sorted((place / "runs").glob("*.jsonl")) or sorted(place.glob("*.jsonl"))
    else:
        target, name = place.with_suffix(".html"), place.stem
        of_ranks = place.parent.glob(f"{escape(place.stem)}-rank*{place.suffix}")
        files = [place, *sorted(of_ranks)] if place.is_file() else []
    runs = [read_run(file) for file in files]
    if not any(run.records for run in runs):
        for file in files:  # a file that cannot be read may hold records
            file.open("rb").close()
        what = "contains no run records" if place.exists() else "no such file or folder"
        raise UsageError(
            f"{place}: {what}. A report needs a folder with runs/*.jsonl, or a .jsonl file. These write one: "
            "`mezzo run --watch SCRIPT`, `mezzo run --records FILE SCRIPT`, "
            "MixedPrecision(..., records=FILE), mezzo.keras.PrecisionMonitor."
        )
    return write_whole(target, render_runs(runs, name, advice(place)))


def build_any(place: str | os.PathLike[str]) -> Path:
    """`build` for a folder that holds a `verdict.json`, else `build_run`; raises as they do."""
    return build(place) if (Path(place) / "verdict.json").exists() else build_run(place)
