"""The command line's door: help, version, unknown verbs, and the exit status of every way a verb can end."""

from __future__ import annotations

import argparse
import importlib
import io
import subprocess
import sys
from types import ModuleType

import pytest

import mezzo
from mezzo.cli import main as door
from mezzo.cli.main import REMOVED, VERBS, main
from mezzo.core.errors import MezzoError, UsageError


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`formats`, with a `run` that a test replaces."""
    module = importlib.import_module("mezzo.cli.formats")
    monkeypatch.setattr(module, "run", lambda arguments: 0)
    return module


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for name, summary in VERBS.items():
        assert f"  {name} " in captured.out
        assert summary in captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mezzo {mezzo.__version__}\n"


@pytest.mark.parametrize(
    ("wrong", "near"), [("compair", "compare"), ("format", "formats"), ("docter", "doctor")]
)
def test_an_unknown_verb_names_the_nearest(wrong: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([wrong]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    names = ", ".join(sorted(VERBS))
    assert captured.err == f"mezzo: unknown command {wrong!r}. Use one of {names}. Did you mean {near!r}?\n"


@pytest.mark.parametrize(("name", "instead"), [("reproduce", "make reproduce")])
def test_a_removed_verb_says_what_replaced_it(
    name: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--quick"]) == 2
    said = capsys.readouterr().err
    assert f"`mezzo {name}` was removed" in said
    assert instead in said
    assert not set(REMOVED) & set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"mezzo.cli.{name.replace('-', '_')}"
    if importlib.util.find_spec(module) is None:
        pytest.fail(f"{module} is missing")
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: mezzo {name}" in printed
    assert printed.count("\n") > 8


ENDS = [
    (0, 0, ""),
    (1, 1, ""),
    (UsageError("mend it so"), 2, "mezzo formats: mend it so\n"),
    (MezzoError("it failed"), 2, "mezzo formats: it failed\n"),
    (KeyboardInterrupt(), 130, "mezzo formats: interrupted\n"),
    (BrokenPipeError(), 0, ""),
]


@pytest.mark.parametrize(("end", "status", "error"), ENDS, ids=lambda value: str(value).strip())
def test_exit_statuses(
    end: int | BaseException,
    status: int,
    error: str,
    verb: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(verb, "run", run)
    assert main(["formats"]) == status
    assert capsys.readouterr().err == error


def test_a_verb_may_close_standard_output(verb: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["formats"]) == 0


def test_a_bug_is_not_dressed_up_as_the_users_mistake(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(verb, "run", run)
    with pytest.raises(ZeroDivisionError):
        main(["formats"])


def test_wrong_options_exit_2_and_leave_the_process_alive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--no-such-option"]) == 2
    assert "usage: mezzo formats" in capsys.readouterr().err


def test_the_words_come_from_the_command_line_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mezzo", "--version"])
    assert door.main() == 0
    assert capsys.readouterr().out.startswith("mezzo ")


def test_python_dash_m_and_its_exit_status() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", "formatz"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Did you mean 'formats'?" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"mezzo {mezzo.__version__}\n")


def test_a_reader_that_leaves_early_is_no_error() -> None:
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
