"""Execute the notebooks and write their outputs: `python notebooks/execute.py`. A test compares them with a fresh execution."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs. It runs in an empty folder; a cell that raises raises here."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            book, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
    return book


def outputs(book: nbformat.NotebookNode) -> list[str]:
    """The output of each code cell as text, without the names that a kernel gives cells; not of cells tagged `varies`."""
    cells = [cell for cell in book.cells if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", [])]
    return [re.sub(r"\S*ipykernel_\d+\S*?\.py", "notebook.py", str(cell.outputs)) for cell in cells]


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(path.name, file=sys.stderr)
