"""MkDocs hook: "```python keras" is a plain Python block on the site; its second word tells the tests where to run it."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with plain fences."""
    return re.sub(r"^```python [a-z ]+$", "```python", markdown, flags=re.MULTILINE)
