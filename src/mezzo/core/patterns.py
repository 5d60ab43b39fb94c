"""Module patterns: how a policy names the modules that it gives a format of their own."""

from __future__ import annotations

import re
from functools import lru_cache

_COMPONENT = r"""[^\s.,=()"'#\[\]]+"""
_PATTERN = re.compile(rf"{_COMPONENT}(?:\.{_COMPONENT})*")


def is_pattern(text: str) -> bool:
    """Whether the text is a dotted path, with `*` for a component or a part of one and `**` for any number of them."""
    return _PATTERN.fullmatch(text) is not None


def matches(pattern: str, path: str) -> bool:
    """Whether a module pattern matches a dotted path.

    >>> [matches("blocks.*.norm*", path) for path in ("blocks.0.norm1", "blocks.0.attn.norm", "norm")]
    [True, False, False]
    >>> matches("**.norm", "norm") and matches("**.norm", "blocks.0.norm")
    True
    """
    return _regex(pattern).fullmatch("." + path) is not None


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"*": r"\.[^.]+", "**": r"(?:\.[^.]+)*"}
    return re.compile(
        "".join(
            parts.get(part) or r"\." + re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")
        )
    )
