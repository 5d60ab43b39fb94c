"""Execute the notebooks and write their outputs: `python notebooks/execute.py`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs. It runs in an empty folder; an error in a cell is raised here."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(
            book, timeout=600, kernel_name="python3", resources=where, coalesce_streams=True
        )
        path_here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for `!python`
        client.execute(env={**os.environ, "PATH": path_here})
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
    return book


def outputs(book: nbformat.NotebookNode) -> list[str]:
    """What the code cells print, and their results as HTML; not of cells tagged `varies` (times, this machine)."""
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [cell.outputs for cell in cells if "varies" not in cell.metadata.get("tags", [])]
    return [one.text if "text" in one else one.data["text/html"] for outputs in shown for one in outputs]


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
