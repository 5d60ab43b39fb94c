"""The user's line behind an operation: the innermost frame that is neither PyTorch's nor Mezzo's."""

from __future__ import annotations

import linecache
import os
import sys
import textwrap
from types import CodeType, FrameType

import torch

import mezzo

_FOREIGN = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (torch, mezzo)
)
_cache: dict[CodeType, bool] = {}

Line = tuple[str, int]


def find(stop: CodeType | None = None) -> Line | None:
    """File and number of the innermost line of the user's that is running; None if there is none.

    Args:
        stop: code at whose frame the search ends: what called it is not what is asked for.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is stop:
            return None
        if _is_users(code):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _is_users(code: CodeType) -> bool:
    known = _cache.get(code)
    if known is None:
        name = code.co_filename
        known = not name.startswith((*_FOREIGN, "<")) and f"{os.sep}contextlib.py" not in name
        _cache[code] = known
    return known


def text(line: Line | None) -> str:
    """A line as ``file.py:12: code``; ``""`` for None."""
    if line is None:
        return ""
    name, number = line
    code = textwrap.shorten(linecache.getline(name, number), 100, placeholder=" ...")
    return f"{os.path.basename(name)}:{number}: {code}".rstrip(": ")
