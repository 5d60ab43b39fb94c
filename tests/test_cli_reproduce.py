"""`mezzo reproduce`: what it prints, on terminals and in pipes, and its exit status in every state."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mezzo.cli.reproduce as verb
from mezzo.cli.main import main
from mezzo.reproduce.expected import Expected
from mezzo.reproduce.experiment import Experiment
from mezzo.reproduce.run import run_all
from pretended_experiments import draw_plainly, experiment, finding

TABLE = {
    "good": Expected(("a", "b"), {"c": "the network is too small"}),
    "bad": Expected(("a",)),
    "silent": Expected(("a",)),
    "better": Expected((), {"a": "too small"}),
    "crash": Expected(("a",)),
    "stop": Expected(),
}
EXPERIMENTS = {
    one.name: one
    for one in (
        experiment("good", finding("a"), finding("b"), finding("c", holds=False)),
        experiment("bad", finding("a", holds=False)),
        experiment("silent"),
        experiment("better", finding("a")),
        experiment("crash", ends=RuntimeError("[no] data")),
        experiment("stop", ends=KeyboardInterrupt()),
    )
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and experiments that only pretend."""
    tables = {name: {"quick": one, "full": one} for name, one in TABLE.items()}
    pretended = functools.partial(run_all, find=EXPERIMENTS.__getitem__, table=tables)
    monkeypatch.setattr(verb, "run_all", pretended)
    monkeypatch.setattr(verb, "chosen", tuple)
    monkeypatch.setattr(verb.figures, "draw", draw_plainly)
    monkeypatch.setattr(verb, "load", EXPERIMENTS.__getitem__)
    monkeypatch.chdir(tmp_path)
    return tmp_path


STATES = [
    (["good"], 0, "3 findings: held 2, known negatives 1."),
    (["bad"], 1, "bad: a does not hold any more: a is 42."),
    (["silent"], 1, "silent: a does not hold any more: nothing was said of it"),
    (["better"], 0, "1 finding: gained 1."),
    (["crash"], 1, "crash crashed: RuntimeError: [no] data"),
    (["crash", "good"], 1, "3 findings: held 2, known negatives 1, crashed 1."),
    (["good", "bad"], 1, "4 findings: held 2, lost 1, known negatives 1."),
]


@pytest.mark.parametrize(("names", "status", "said"), STATES, ids=lambda value: str(value)[:24])
def test_exit_status(
    names: list[str], status: int, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *names, "--quick"]) == status
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.endswith("Page: mezzo-reproduce/index.html\n")
    assert (here / "mezzo-reproduce" / "index.html").exists()


def test_what_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "good", "--quick", "--out", "there"])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "good: About good"
    assert lines[1].startswith("nowhere, section 1; quick size, ")
    assert lines[2:5] == ["  a: holds", "    expected  a is so.", "    seen      a is 42."]
    assert lines[8:12] == [
        "  c: known not to show at this size",
        "    expected  c is so.",
        "    seen      c is 42.",
        "    why       the network is too small",
    ]
    assert lines[-1] == "Page: there/index.html"
    assert captured.err == "[1/1] good\n"


def test_long_sentences_are_whole_lines_in_a_pipe(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = experiment("good", finding("a " + "word " * 60))
    monkeypatch.setitem(EXPERIMENTS, "good", long)
    main(["reproduce", "good"])
    assert f"    expected  {'a ' + 'word ' * 60} is so." in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [30, 60, 120])
def test_a_terminal_of_any_width(
    width: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, told = io.StringIO(), io.StringIO()

    def terminal(*given: Any, stderr: bool = False, **named: Any) -> Console:
        return Console(
            file=told if stderr else printed,
            force_terminal=True,
            width=width,
            color_system=None,
            highlight=False,
        )

    monkeypatch.setattr(verb, "Console", terminal)
    assert main(["reproduce", "good", "bad"]) == 1
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert max(len(line) for line in lines if not line.startswith("Page: ")) <= width
    words = " ".join(" ".join(lines).split())
    assert "why the network is too small" in words
    assert "bad: a does not hold any more: a is 42." in words
    assert "[1/2] good" in told.getvalue()
    assert capsys.readouterr().err == ""  # the bar is all that is told on a terminal


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "good", "crash", "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    data = json.loads(captured.out)
    assert list(data["experiments"]) == ["good"]
    assert [one["fate"] for one in data["experiments"]["good"]["findings"]] == ["holds", "holds", "known"]
    assert data["crashed"] == {"crash": "RuntimeError: [no] data"}


def test_a_crash_is_told_with_its_trace(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "crash"])
    captured = capsys.readouterr()
    assert "crash: crashed: RuntimeError: [no] data\n" in captured.out
    assert "Traceback (most recent call last)" in captured.err
    assert "0 findings: crashed 1." in captured.out


def test_a_figure_that_fails_is_told(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(numbers: dict[str, Any], figure: Any) -> None:
        raise KeyError("curve")

    monkeypatch.setitem(EXPERIMENTS, "good", experiment("good", finding("a"), finding("b"), draw=draw))
    assert main(["reproduce", "good"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("its figure could not be drawn: KeyError: 'curve'") == 2
    assert "a is 42." in captured.out


def test_an_interrupt_keeps_what_is_finished(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "good", "stop", "bad"]) == 130
    captured = capsys.readouterr()
    assert "what was finished is in mezzo-reproduce" in captured.err
    assert "a is 42." in captured.out
    assert (here / "mezzo-reproduce" / "good" / "figure.svg").exists()
    assert not (here / "mezzo-reproduce" / "bad").exists()


def test_stages_are_told_in_a_pipe_when_they_last(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "PATIENCE", -1.0)
    main(["reproduce", "good"])
    assert capsys.readouterr().err.splitlines() == [
        "[1/1] good",
        "[1/1] good: training, fp16 (25% done)",
        "[1/1] good: training, bf16 (75% done)",
    ]


def test_the_list(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Experiment:
        if name == "crash":
            raise ImportError("no sklearn")
        return EXPERIMENTS[name]

    monkeypatch.setattr(verb, "load", find)
    assert main(["reproduce", "--list", "good", "crash"]) == 0
    assert capsys.readouterr().out == (
        "good: About good\n  nowhere, section 1\ncrash: can't be loaded: no sklearn\n"
    )
    assert main(["reproduce", "--list", "--json", "good"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["title"] == "About good"
    assert list(here.iterdir()) == []


def test_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "accumulatoin"]) == 2
    assert "Did you mean 'accumulation'?" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["reproduce", "--out", "file"]) == 2
    assert "is a file" in capsys.readouterr().err
    monkeypatch.setattr(verb.figures, "NEEDS", {"no_such_module_here": "matplotlib"})
    assert main(["reproduce", "accumulation"]) == 2
    assert "matplotlib not found" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
