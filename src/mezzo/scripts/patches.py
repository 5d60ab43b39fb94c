"""Patches: attributes that were replaced, and how each is put back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A stack of replaced attributes; undoing it restores the latest first."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put `value` in the place of `owner.name`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before, value))

    def undo(self) -> None:
        """Put everything back. What someone else has replaced in the meantime is theirs, and stays."""
        while self._done:
            owner, name, before, value = self._done.pop()
            if vars(owner).get(name, _ABSENT) is not value and not isinstance(before, staticmethod):
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
