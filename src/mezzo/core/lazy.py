"""Packages whose public names are imported on first use, so that importing one imports no framework."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, modules: Mapping[str, str], missing: Mapping[str, str] = {}, removed: Mapping[str, str] = {}
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    `modules`: public name -> the module that it is in, or that it is. `missing`: a module that may not be installed ->
    what to do then. `removed`: name -> what to use instead.
    """

    def get(name: str) -> Any:
        if name not in modules:
            why = removed.get(name)
            raise AttributeError(
                f"{package}.{name} {why}" if why else f"module {package!r} has no attribute {name!r}"
            )
        try:
            module = importlib.import_module(modules[name])
        except ModuleNotFoundError as error:
            absent = error.name or ""
            if absent not in missing:
                raise
            raise ImportError(f"{package}.{name}: {absent} is not installed. {missing[absent]}") from error
        value = getattr(module, name, module)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
