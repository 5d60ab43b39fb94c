"""The command line: help, version, unknown commands, and the exit status of every way a command can end."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import mezzo
from mezzo.cli.main import REMOVED, VERBS, main
from mezzo.core.errors import MezzoError, UsageError


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`formats`, with a `run` that a test replaces."""
    module = importlib.import_module("mezzo.cli.formats")
    monkeypatch.setattr(module, "run", lambda arguments: 0)
    return module


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for name, summary in VERBS.items():
        assert f"  {name} " in captured.out
        assert summary in captured.out


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--version"]) == 0
    monkeypatch.setattr(sys, "argv", ["mezzo", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"mezzo {mezzo.__version__}\n" * 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compair"], ["unknown command 'compair'", ", ".join(sorted(VERBS)), "Did you mean 'compare'?"]),
        (["formats", "--no-such-option"], ["usage: mezzo formats"]),
        *(([name, "--quick"], [f"`mezzo {name}` was removed", text]) for name, text in REMOVED.items()),
    ],
)
def test_wrong_usage(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(part in captured.err for part in expected)


@pytest.mark.parametrize("name", VERBS)
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: mezzo {name}" in printed
    assert printed.count("\n") > 8


ENDS = [
    (0, 0, ""),
    (1, 1, ""),
    (UsageError("write it so"), 2, "mezzo formats: write it so\n"),
    (MezzoError("it failed"), 2, "mezzo formats: it failed\n"),
    (KeyboardInterrupt(), 130, "mezzo formats: interrupted\n"),
    (BrokenPipeError(), 0, ""),
    (ZeroDivisionError(), None, ""),  # a bug is not the user's error
]


@pytest.mark.parametrize(("end", "status", "error"), ENDS, ids=repr)
def test_exit_statuses(
    end: Any,
    status: int | None,
    error: str,
    verb: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: Any) -> int:
        if isinstance(end, BaseException):
            raise end
        return int(end)

    monkeypatch.setattr(verb, "run", run)
    if status is None:
        with pytest.raises(type(end)):
            main(["formats"])
    else:
        assert main(["formats"]) == status
    assert capsys.readouterr().err == error


def test_a_command_may_close_standard_output(verb: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["formats"]) == 0


def test_python_dash_m_and_a_reader_that_leaves_early() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", "formatz"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Did you mean 'formats'?" in done.stderr
    words = [
        sys.executable,
        "-m",
        "mezzo",
        "formats",
        "--json",
        "show",
        *["1/3"] * 200,
    ]  # more than a pipe holds
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "{\n"
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait() == 0
