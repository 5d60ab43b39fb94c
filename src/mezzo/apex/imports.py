"""`provided`: while it is open, `from apex import amp` and its like import the modules of `mezzo.apex`."""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# With a name of a submodule that scripts import from.
_MODULES = dict(amp="amp", normalization="fused_layer_norm", optimizers="fused_adam", parallel="distributed")

replaced_by = ""
"""A precision of `mezzo run --apex --precision`, with which every call of `amp` does nothing."""


@contextmanager
def provided(instead: str = "") -> Iterator[None]:
    """Also where Apex is installed. `instead`: a precision with which all calls of `amp` do nothing."""
    global replaced_by
    finder, replaced_by = _Finder(), instead
    before = _forget_apex()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        replaced_by = ""
        sys.meta_path.remove(finder)
        _forget_apex()
        sys.modules.update(before)
        if amp := sys.modules.get("mezzo.apex.amp"):
            amp.reset()


def join(run: dict[str, Any]) -> None:
    """Provide the modules until this process ends, which the script of a run with `--apex` has started."""
    policy, until_exit = run["request"]["policy"], ExitStack()
    until_exit.enter_context(provided("" if policy == "auto" else policy))
    atexit.register(until_exit.close)


def _forget_apex() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "apex"}


class _Finder(MetaPathFinder, Loader):
    """`apex` is an empty package, and `apex.NAME` the module `mezzo.apex.NAME` itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "apex":
            return None
        if name not in ("", *_MODULES):
            # The error has no `name`, or else `from apex import NAME` would replace its message.
            raise ModuleNotFoundError(
                f"mezzo run --apex has no {fullname}. It has apex.{', apex.'.join(_MODULES)}."
            )
        return ModuleSpec(fullname, _Finder(), is_package=not name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == "apex":
            return None
        module = importlib.import_module(f"mezzo.{spec.name}")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        if name in _MODULES:
            module.__spec__ = self._spec  # the import system has replaced it
            sys.modules[f"apex.{name}.{_MODULES[name]}"] = module
