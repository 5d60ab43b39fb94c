"""Run a script through the launcher inside this process, and collect what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from mezzo.core import records
from mezzo.pytorch.run import session
from mezzo.runner.lifecycle import RunRequest


@dataclass
class Ran:
    """A finished run."""

    status: int
    out: str
    err: str
    records: list[records.Record]

    def of(self, kind: str) -> list[Any]:
        """Its records of one kind."""
        return [record for record in self.records if record.kind == kind]

    @property
    def ok(self) -> Ran:
        """The run, which must have ended well."""
        assert self.status == 0, self.err
        return self

    @property
    def lines(self) -> list[str]:
        """What the script printed."""
        return self.out.splitlines()

    @property
    def notes(self) -> str:
        """What the user should read."""
        return "\n".join(self.of("end")[-1].notes)


def launcher(
    folder: Path, capsys: pytest.CaptureFixture[str], run: Callable[[RunRequest], int] = session.run
) -> Callable[..., Ran]:
    """A function that writes a script, runs it with a request's keywords, and returns a `Ran`.

    Args:
        folder: for the script and its records.
        capsys: reads what the script prints.
        run: a framework's; PyTorch's unless another's is given.
    """

    def launch(source: str, *argv: str, **keywords: Any) -> Ran:
        path = folder / "script.py"
        path.write_text(dedent(source))
        file = folder / "run.jsonl"
        capsys.readouterr()
        status = run(RunRequest(str(path), argv, records=file, **keywords))
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err, list(records.read(file)))

    return launch
