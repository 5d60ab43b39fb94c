"""Replaced attributes that are put back, and calls right after a module's import.

PyTorch is not imported before the script does so: it may set `OMP_NUM_THREADS` or `CUDA_VISIBLE_DEVICES` first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = object()


class Patches:
    """A stack of replaced attributes; undoing it restores the latest first."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before, value))

    def undo(self) -> None:
        """Put everything back, except what others have replaced in the meantime."""
        while self._done:
            owner, name, before, value = self._done.pop()
            if vars(owner).get(name, _ABSENT) is not value and not isinstance(before, staticmethod):
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


Callback = Callable[[ModuleType], None]


class ImportWatch(MetaPathFinder):
    """Import hook: calls back once for each watched module, after its code has run (at once if it is imported)."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}
        self._finding: set[str] = set()

    def install(self) -> None:
        """Begin to watch."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop; what was not imported by now never calls back."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def when(self, name: str, callback: Callback) -> None:
        """Call `callback(module)` when the module called `name` has been imported."""
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
        else:
            self._waiting.setdefault(name, []).append(callback)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The other finders' spec, with a loader that calls back after it has run the module."""
        if fullname not in self._waiting or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                del loader.exec_module  # the loader is as it was
                for callback in self._waiting.pop(fullname, ()):
                    callback(module)

            loader.exec_module = exec_module
        return spec
