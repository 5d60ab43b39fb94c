"""`provided`: while it is open, `from apex import amp` and its like import the modules of `mezzo.apex`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULES = ("apex.amp", "apex.normalization", "apex.optimizers", "apex.parallel")
_SAME = {"apex.normalization": "fused_layer_norm", "apex.optimizers": "fused_adam"}  # submodules


@contextmanager
def provided(instead: str = "") -> Iterator[None]:
    """Also where Apex is installed. `instead`: a precision with which all calls of `amp` do nothing."""
    finder = _Finder(instead)
    before = _forget_apex()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget_apex()
        sys.modules.update(before)
        if amp := sys.modules.get("mezzo.apex.amp"):
            vars(amp).update(replaced_by="")
            amp.reset()


def _forget_apex() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "apex"]
    return {name: sys.modules.pop(name) for name in names}


class _Finder(MetaPathFinder, Loader):
    """`apex` is an empty package, and `apex.NAME` the module `mezzo.apex.NAME` itself."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "apex":
            return None
        if fullname not in ("apex", *_MODULES):
            # The error has no `name`, or else `from apex import NAME` would replace its message.
            raise ModuleNotFoundError(f"mezzo run --apex has no {fullname}. It has {', '.join(_MODULES)}.")
        return ModuleSpec(fullname, _Finder(self._instead), is_package=fullname == "apex")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == "apex":
            return None
        module = importlib.import_module(f"mezzo.{spec.name}")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "apex":
            return
        name = module.__name__.removeprefix("mezzo.")
        module.__spec__ = self._spec  # the import system has replaced it
        if name == "apex.amp":
            vars(module).update(replaced_by=self._instead)
        if name in _SAME:
            sys.modules[f"{name}.{_SAME[name]}"] = module
