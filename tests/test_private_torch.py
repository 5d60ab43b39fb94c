"""docs/dev/private-torch.md lists PyTorch's private names that the sources use; the installed PyTorch has them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401, whose names are looked up in sys.modules

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for pattern in ("*.py", "apex/*.py", "pytorch/**/*.py")
    for path in (ROOT / "src" / "mezzo").glob(pattern)
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Names in `torch` with a private part; and private attributes of other objects, as ``?._name``."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found = [name for name in node.names if name.asname and name.name.startswith("torch")]
            aliases |= {name.asname: name.name for name in found}
    yield from aliases.values()
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        parts, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            inner.add(value)
            parts.append(value.attr)
            value = value.value
        base = aliases.get(value.id) if isinstance(value, ast.Name) else None
        if base is not None:
            yield re.sub(r"\.__\w+__$", "", ".".join([base, *reversed(parts)]))
        elif not (isinstance(value, ast.Name) and value.id in ("self", "cls", "sys")):
            yield f"?.{node.attr}"


def used() -> set[str]:
    """Less what Mezzo defines itself: functions, classes, attributes and variables."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "mezzo").rglob("*.py")]
    defined = re.compile(
        r"(?:def|class) (\w+)|^ *(?:self\.|\w+\.)?(_\w+)(?:: [^=\n]+)? = |\b(_\w+), ", re.MULTILINE
    )
    own = {name for text in texts for names in defined.findall(text) for name in names if name}
    found = {name for path in SOURCES for name in private_names(ast.parse(path.read_text(encoding="utf-8")))}
    private = {name for name in found if any(map(is_private, name.split(".")))}
    return {name for name in private if not (name.startswith("?.") and name[2:] in own)}


def listed() -> set[str]:
    page = (ROOT / "docs" / "dev" / "private-torch.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def test_the_page_lists_what_the_sources_use() -> None:
    assert used() - listed() == set(), "not on the page"
    assert listed() - used() == set(), "no longer used"


@pytest.mark.parametrize("name", sorted(name for name in listed() if name.startswith("torch.")))
def test_the_installed_pytorch_has_it(name: str) -> None:
    modules = [name]
    while modules[-1] not in sys.modules:
        modules.append(modules[-1].rpartition(".")[0])
    found: Any = sys.modules[modules[-1]]
    for part in name.removeprefix(modules[-1]).split(".")[1:]:
        found = getattr(found, part)
