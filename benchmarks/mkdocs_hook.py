"""What the site changes: fences with two words and examples become plain code, and the API page has descriptions."""

from __future__ import annotations

import importlib
import re
from typing import Any

import griffe


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page without the second word of "```python keras", which tells the tests where to run the block.

    docs/api.md gets the description of each name in its table, except of modules.
    """
    markdown = re.sub(r"^```python [a-z ]+$", "```python", markdown, flags=re.MULTILINE)
    if page.file.src_uri == "api.md":
        names = re.findall(r"^\| `(mezzo\.\S+)` \|", markdown, re.MULTILINE)
        modules = {name.rpartition(".")[0] for name in names}
        markdown += "".join(f"\n\n::: {name}\n" for name in names if name not in modules)
    return markdown


def plain(text: str) -> str:
    """The docstring with its ``>>>`` examples in fences, and ``::`` before an indented block as a colon."""
    text = re.sub(
        r"(?m)^ *>>> (?:.*\n?)+?(?=\n|\Z)", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text
    )
    return re.sub(r"(?m)::$", ":", text)


class Docstrings(griffe.Extension):
    """Applies `plain` to each object that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give `mezzo.keras` and `mezzo.tensorflow` the public names that they import on first use."""
        for package in ("keras", "tensorflow"):
            for name, module in importlib.import_module(f"{pkg.name}.{package}")._PUBLIC.items():
                pkg[package].set_member(name, griffe.Alias(name, f"{module}.{name}"))
