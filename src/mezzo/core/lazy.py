"""Packages whose public names are imported on first use, so that importing one imports no framework."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from mezzo.core.errors import did_you_mean


def lazy(
    package: str,
    modules: Mapping[str, str],
    missing: Mapping[str, str] = {},
    removed: Mapping[str, str] = {},
    moved: Mapping[str, tuple[str, str]] = {},
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`; `dir` shows the names in the package's `__all__`.

    `modules`: public name -> the module that it is in, or that it is. `missing`: a module that may not be installed ->
    how to install it. `removed`: a former name -> what to use now. `moved`: a deprecated name -> its module, and so.
    """

    def get(name: str) -> Any:
        if name in moved:
            module_name, instead = moved[name]
            warnings.warn(f"{package}.{name} is deprecated. Use {instead}.", DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(module_name), name)
        if name not in modules:
            if name in removed:
                raise AttributeError(f"{package}.{name} {removed[name]}")
            fix = "" if name.startswith("_") else did_you_mean(name, modules, cutoff=0.6)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{fix}")
        try:
            if modules[name].startswith("mezzo.pytorch."):
                importlib.import_module("torch")  # first: then `mezzo run` imports whole modules of it
            module = importlib.import_module(modules[name])
        except ModuleNotFoundError as error:
            absent = error.name or ""
            if absent not in missing:
                raise
            raise ImportError(f"{package}.{name}: {absent} is not installed. {missing[absent]}") from error
        value = getattr(module, name, module)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)
