"""Execute the notebooks and write their outputs: `python notebooks/execute.py`."""

from __future__ import annotations

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
        NotebookClient(
            book, timeout=120, kernel_name="python3", resources=where, coalesce_streams=True
        ).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
    return book


def outputs(book: nbformat.NotebookNode) -> list[str]:
    """The outputs of each code cell, without those of cells tagged `varies`: times and figures of this machine."""
    cells = (cell for cell in book.cells if cell.cell_type == "code")
    return [str(cell.outputs) for cell in cells if "varies" not in cell.metadata.get("tags", [])]


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
