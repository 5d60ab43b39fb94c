"""Packages whose public names are fetched when they are first asked for, so that importing one imports no framework."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, modules: Mapping[str, str], missing: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        package: its name.
        modules: public name -> the module that it is in.
        missing: a module that may not be installed -> what to do then.

    The first raises `AttributeError` for other names, and `ImportError` with what to do for a module in `missing`.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            absent = error.name or ""
            if absent not in missing:
                raise
            raise ImportError(f"{package}.{name}: {absent} is not installed. {missing[absent]}") from error
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
