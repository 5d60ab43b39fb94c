"""Run a Keras script through the launcher inside this process, and collect what it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from launching import Ran
from mezzo.core import records
from mezzo.keras.launch.runner import run
from mezzo.scripts.request import RunRequest

__all__ = ["Ran", "launcher"]


def launcher(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """A function that writes a script, runs it with a request's keywords, and returns a `Ran`."""

    def launch(source: str, *argv: str, **keywords: Any) -> Ran:
        path = folder / "script.py"
        path.write_text(dedent(source))
        file = folder / "run.jsonl"
        capsys.readouterr()
        status = run(RunRequest(str(path), argv, records=file, **keywords))
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err, list(records.read(file)))

    return launch
