"""A `mezzo` command in this process, and what it printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mezzo.cli.main import main


@dataclass(frozen=True)
class Ended:
    """The exit status of a command, and what it printed."""

    status: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture(name="command")
def in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`command("run --quiet", "a b.py")` runs `mezzo` in the test's folder; only the first text is split."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, *more: str) -> Ended:
        monkeypatch.chdir(tmp_path)  # a script may have left it
        capsys.readouterr()
        return Ended(main([*line.split(), *more]), *capsys.readouterr())

    return run
