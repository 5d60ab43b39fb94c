"""The life cycle of a run: what is installed, run, removed and told, in which order, however the script ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mezzo.core import records
from mezzo.core.errors import MezzoError, UsageError
from mezzo.scripts import runner, script
from mezzo.scripts.journal import Journal
from mezzo.scripts.runner import RunRequest

# Scripts import these.
events: list[str] = []
mistake = UsageError("a mistake")


@pytest.fixture(autouse=True)
def _no_events() -> None:
    events.clear()


@dataclass
class Part:
    """Says when it is installed and removed."""

    name: str
    fails: Exception | None = None

    def install(self) -> None:
        events.append(f"install {self.name}")
        if self.fails is not None:
            raise self.fails

    def remove(self) -> None:
        events.append(f"remove {self.name}")


@dataclass
class Session:
    """As little as a run has."""

    request: RunRequest
    fatal: MezzoError | None = None
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self.journal = Journal(
            self.request.records, lambda: runner.started(self.request, "bf16", {"cpu": "x"})
        )


def session_of(folder: Path, source: str, *, argv: tuple[str, ...] = (), summary: bool = True) -> Session:
    """A session of a script that may append to `events`, or raise `mistake`."""
    file = folder / "script.py"
    file.write_text(f"from {__name__} import events, mistake\n{source}\n")
    return Session(RunRequest(str(file), argv, records=folder / "run.jsonl", summary=summary))


def live(session: Session, parts: list[Part]) -> int:
    """Run it; the end says that it came, and with which status."""

    def finish(status: int) -> None:
        events.append(f"finish {status}")
        session.journal.note("finished")

    target = script.locate(session.request.target, is_module=False)
    return runner.run(
        session, target, parts, finish=finish, summary=lambda failed: f"the summary of {failed}"
    )


def end_of(session: Session) -> records.RunEnded:
    """The last record on disk."""
    assert session.request.records is not None
    last = list(records.read(session.request.records))[-1]
    assert isinstance(last, records.RunEnded)
    return last


@pytest.mark.parametrize(
    ("source", "status", "last"),
    [
        ("events.append('script')", 0, "the summary of False"),
        ("events.append('script'); raise SystemExit(3)", 3, "the summary of True"),
        ("events.append('script'); raise SystemExit('no data')", 1, "no data"),
        ("events.append('script'); raise ValueError('of the script')", 1, "ValueError: of the script"),
        ("events.append('script'); raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
    ids=["ends", "exits", "exits with a message", "raises", "interrupted"],
)
def test_parts_are_removed_the_latest_first_and_then_comes_the_end(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    status: int,
    last: str,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    session = session_of(tmp_path, source)
    assert live(session, [Part("a"), Part("b")]) == status
    assert events == ["install a", "install b", "script", "remove b", "remove a", f"finish {status}"]
    end = end_of(session)
    assert (end.status, end.notes) == (status, ["finished"])
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == last
    assert err.count("the summary of") == 1
    assert "runner.py" not in err


def test_parts_are_removed_where_one_can_not_be_installed(tmp_path: Path) -> None:
    session = session_of(tmp_path, "events.append('script')")
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    with pytest.raises(UsageError, match="not here"):
        live(session, [Part("a"), Part("b", UsageError("not here")), Part("c")])
    assert events == ["install a", "install b", "remove c", "remove b", "remove a", "finish 1"]
    assert end_of(session).status == 1
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize(
    ("source", "last_line"),
    [("raise mistake", []), ("raise ValueError('of the script')", ["ValueError: of the script"])],
    ids=["itself", "another error"],
)
def test_the_users_mistake_is_raised_and_only_another_error_is_printed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    last_line: list[str],
) -> None:
    # torch.distributed, once a test has started it in this process, writes the rank before each line.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    session = session_of(tmp_path, source)
    session.fatal = mistake
    with pytest.raises(UsageError, match="a mistake"):
        live(session, [Part("a")])
    assert events == ["install a", "remove a", "finish 1"]
    assert end_of(session).status == 1
    assert capsys.readouterr().err.splitlines()[-1:] == last_line


@pytest.mark.parametrize(("wanted", "err"), [(True, "the summary of False\n"), (False, "")])
def test_the_summary_is_printed_where_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: bool, err: str
) -> None:
    assert live(session_of(tmp_path, "print('words')", summary=wanted), []) == 0
    assert tuple(capsys.readouterr()) == ("words\n", err)


def test_the_first_record_says_what_was_asked_for(tmp_path: Path) -> None:
    session = session_of(tmp_path, "import sys; events += sys.argv[1:]", argv=("--lr", "1"))
    live(session, [])
    assert events == ["--lr", "1", "finish 0"]
    assert session.request.records is not None
    first = next(iter(records.read(session.request.records)))
    assert isinstance(first, records.RunStarted)
    assert first.script == session.request.target
    assert (first.argv, first.policy, first.machine) == (["--lr", "1"], "bf16", {"cpu": "x"})
    assert (first.seed_offset, first.nudged) == (0, False)
    paired = RunRequest("train.py", seed_offset=2, nudge=True)
    record = runner.started(paired, "fp32", {})
    assert (record.seed_offset, record.nudged) == (2, True)
