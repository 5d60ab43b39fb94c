"""The table of docs/api.md: every public name, with the first sentence of its docstring. Imports no framework."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("mezzo", "mezzo.optim", "mezzo.nn", "mezzo.keras", "mezzo.tensorflow")
FORMATS = ("Format", "round", "quantize", "bits", "decode", "ulp", "named")


def names() -> dict[str, str]:
    """Public name, such as ``mezzo.nn.LinearCrossEntropy`` -> the module that it is in, or that it is."""
    found = {f"mezzo.formats.{name}": "mezzo.core.formats" for name in FORMATS}
    for package in map(importlib.import_module, reversed(PACKAGES)):
        lazy = getattr(package, "_PUBLIC", {})
        own = [
            name for name in package.__all__ if name not in lazy
        ]  # from elsewhere, unless the others are lazy
        at = {name: package.__name__ if lazy else getattr(package, name).__module__ for name in own}
        found = {f"{package.__name__}.{name}": place for name, place in {**lazy, **at}.items()} | found
    found |= {module: module for module in sys.modules["mezzo"]._INTEGRATIONS.values()}
    return found


def table() -> str:
    """One row per name."""
    rows = [f"| `{name}` | {_sentence(name, module)} |" for name, module in names().items()]
    return "\n".join(("| name | what it is |", "|---|---|", *rows))


def _sentence(name: str, module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name.rpartition(".")[2]:
            found = node
    text = " ".join((ast.get_docstring(found) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:").replace("|", "\\|") + "."
