"""The life cycle of a run: what is installed, run, removed and told, in which order, however the script ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mezzo.cli.main import main
from mezzo.core import records
from mezzo.core.errors import MezzoError, UsageError
from mezzo.keras import run as keras_runner
from mezzo.pytorch.run import session as pytorch_session
from mezzo.runner import lifecycle, script
from mezzo.runner.journal import Journal
from mezzo.runner.lifecycle import RunRequest
from run_scripts import Ran, launcher

# Scripts import these.
events: list[str] = []
mistake = UsageError("a mistake")


@pytest.fixture(autouse=True)
def _no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events.clear()
    # torch.distributed, once a test has started it in this process, writes the rank before each line.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


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
            self.request.records, lambda: lifecycle.started(self.request, "bf16", {"cpu": "x"})
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
    return lifecycle.run(
        session, target, parts, finish=finish, summary=lambda failed: f"the summary of {failed}"
    )


def end_of(session: Session) -> records.RunEnded:
    """The last record on disk."""
    assert session.request.records is not None
    last = list(records.read(session.request.records))[-1]
    assert isinstance(last, records.RunEnded)
    return last


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("", 0, "the summary of False"),
        ("raise SystemExit(3)", 3, "the summary of True"),
        ("raise SystemExit('no data')", 1, "no data"),
        ("raise ValueError('of the script')", 1, "ValueError: of the script"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_parts_are_removed_the_latest_first_and_then_comes_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, status: int, last: str
) -> None:
    session = session_of(tmp_path, f"events.append('script')\n{end}")
    assert live(session, [Part("a"), Part("b")]) == status
    assert events == ["install a", "install b", "script", "remove b", "remove a", f"finish {status}"]
    assert (end_of(session).status, end_of(session).notes) == (status, ["finished"])
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == last
    assert err.count("the summary of") == 1
    assert "lifecycle.py" not in err


def test_parts_are_removed_where_one_can_not_be_installed(tmp_path: Path) -> None:
    session = session_of(tmp_path, "events.append('script')")
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    with pytest.raises(UsageError, match="not here"):
        live(session, [Part("a"), Part("b", UsageError("not here")), Part("c")])
    assert events == ["install a", "install b", "remove c", "remove b", "remove a", "finish 1"]
    assert end_of(session).status == 1
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_the_users_mistake_is_raised_and_only_another_error_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, last_line in (
        ("raise mistake", []),
        ("raise ValueError('of the script')", ["ValueError: of the script"]),
    ):
        events.clear()
        session = session_of(tmp_path, source)
        session.fatal = mistake
        with pytest.raises(UsageError, match="a mistake"):
            live(session, [Part("a")])
        assert events == ["install a", "remove a", "finish 1"]
        assert end_of(session).status == 1
        assert capsys.readouterr().err.splitlines()[-1:] == last_line


def test_without_a_summary_and_the_first_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = session_of(
        tmp_path, "import sys; events += sys.argv[1:]; print('words')", argv=("--lr", "1"), summary=False
    )
    assert live(session, []) == 0
    assert tuple(capsys.readouterr()) == ("words\n", "")
    assert events == ["--lr", "1", "finish 0"]
    assert session.request.records is not None
    first = next(iter(records.read(session.request.records)))
    assert isinstance(first, records.RunStarted)
    assert first.script == session.request.target
    assert (first.argv, first.policy, first.machine) == (["--lr", "1"], "bf16", {"cpu": "x"})
    assert (first.seed_offset, first.nudged) == (0, False)
    record = lifecycle.started(RunRequest("train.py", seed_offset=2, nudge=True), "fp32", {})
    assert (record.seed_offset, record.nudged) == (2, True)


# A script that ends by an error: that is the last its user reads

TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(99):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().mul({factor}).backward()
    optimizer.step()
    if step == 2:
        {end}
"""
CAUSE = """
try:
    1 / 0
except ZeroDivisionError as error:
    raise RuntimeError("no data") from error
"""
# How a script ends: its source and the last line that its user reads.
IDLE = {
    "import error in line 1": ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
    "an error with a cause": (CAUSE, "RuntimeError: no data"),
}
TRAINING = {
    "an error": (TRAIN.format(factor=1.0, end="raise ValueError('odd')"), "ValueError: odd"),
    "collapse": (
        TRAIN.format(factor="float('nan')", end="pass"),
        "mezzo.core.errors.LossScaleCollapseError: ",
    ),
}


def assert_told(ran: Ran, last: str, *, said: str = "") -> None:
    """All that Mezzo says comes first, with `said` in it; it says nothing of a script that did no work."""
    lines = ran.err.splitlines()
    assert ran.status == 1
    assert lines[-1].startswith(last), ran.err
    told = [line for line in lines if line.startswith("mezzo: ")]
    assert lines[: len(told)] == told, ran.err
    assert bool(told) == bool(said)
    assert said in ran.err
    assert "never called" not in ran.err


@pytest.mark.parametrize("name", TRAINING)
def test_the_script_s_own_error_comes_last(name: str, launch: Any) -> None:
    source, last = TRAINING[name]
    policy = "fp16,loss_scale=16" if name == "collapse" else "fp16"
    assert_told(launch(source, policy=policy), last, said="mezzo: policy fp16")


@pytest.mark.parametrize("run", [pytorch_session.run, keras_runner.run], ids=["torch", "keras"])
def test_a_run_without_training_in_either_framework(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch: Callable[..., Ran] = launcher(tmp_path, capsys, run)
    for source, last in IDLE.values():
        assert_told(launch(source, policy="fp32"), last)
    ran = launch("import sys; sys.exit(3)", policy="fp32")  # a status without an error has the summary
    assert ran.status == 3
    assert "never called" in ran.err


@pytest.mark.parametrize("worked", [False, True])
def test_a_report_is_named_before_the_traceback(
    worked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, last = TRAINING["an error"] if worked else IDLE["import error in line 1"]
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(source)
    status = main(["run", "--out", "out", "--precision", "bf16", "script.py"])
    said = f"mezzo: report: {tmp_path / 'out'}" if worked else ""
    assert_told(Ran(status, "", capsys.readouterr().err, []), last, said=said)
    assert Path("out/report.html").exists()
