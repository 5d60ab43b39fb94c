"""Records in, one HTML file out. Imports core only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mezzo.report.page import render
from mezzo.report.reading import read

__all__ = ["build"]


def build(directory: str | os.PathLike[str]) -> Path:
    """Write ``DIR/report.html`` from ``DIR/verdict.json`` and ``DIR/runs/*.jsonl``, and return its path.

    Equals ``(directory / "report.html").write_text(render(read(directory)))``, except that the file appears
    whole or not at all. It is one file that asks the network for nothing, and the same folder gives the same
    bytes.

    Losses that are NaN or infinite are gaps in a curve and are told in words; runs that are missing, crashed
    or broken are listed with their fault.

    Raises:
        UsageError: there is no `verdict.json` in the folder, or it is not one that this version reads.
        OSError: the file cannot be written (a full disk); nothing is left behind.
    """
    folder = Path(directory)
    text = render(read(folder))
    target = folder / "report.html"
    handle, name = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's 0600 would keep a colleague or a web server out
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
