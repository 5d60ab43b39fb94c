"""Run a Keras script through the launcher inside this process, and collect what it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import launching
from launching import Ran
from mezzo.keras.run import run

__all__ = ["Ran", "launcher"]


def launcher(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """A function that writes a script, runs it with a request's keywords, and returns a `Ran`."""
    return launching.launcher(folder, capsys, run)
