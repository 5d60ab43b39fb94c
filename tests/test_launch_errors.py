"""A script that ends by an exception of its own: its traceback or message is the last that its user reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from launching import Ran, launcher
from mezzo.cli.main import main
from mezzo.keras import run as keras_runner
from mezzo.pytorch.launch import runner

TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 2:
        {end}
"""
FORWARD = """
import torch
with torch.no_grad():
    torch.nn.Linear(4, 1)(torch.ones(2, 4))
{end}
"""
CAUSE = """
try:
    1 / 0
except ZeroDivisionError as error:
    raise RuntimeError("no data") from error
"""
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(0.2,)).start()
raise RuntimeError("no data")
"""


class Row(NamedTuple):
    """A script, how it ends, and whether it did anything before."""

    source: str
    status: int
    last: str
    worked: bool = False


ROWS = {
    "import error in line 1": Row("import nothing_of_this_name", 1, "ModuleNotFoundError: No module named"),
    "syntax error": Row("def f(:\n    pass\n", 1, "SyntaxError: "),
    "before the model's call": Row("import torch\nopen('/nowhere/data')", 1, "FileNotFoundError: "),
    "an error with a cause": Row(CAUSE, 1, "RuntimeError: no data"),
    "while a thread works": Row(THREAD, 1, "RuntimeError: no data"),
    "exit with a message": Row("raise SystemExit('no data')", 1, "no data"),
    "interrupt": Row("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "after a forward pass": Row(
        FORWARD.format(end="raise ValueError('odd')"), 1, "ValueError: odd", worked=True
    ),
    "in the middle of training": Row(
        TRAIN.format(end="raise ValueError('odd')"), 1, "ValueError: odd", worked=True
    ),
    "training, exit with a message": Row(
        TRAIN.format(end="raise SystemExit('no disk')"), 1, "no disk", worked=True
    ),
    "training, interrupt": Row(
        TRAIN.format(end="raise KeyboardInterrupt"), 130, "KeyboardInterrupt", worked=True
    ),
    "training, collapse of the loss scale": Row(
        TRAIN.format(end="pass")
        .replace("range(4)", "range(99)")
        .replace(".sum()", ".sum().mul(float('nan'))"),
        1,
        "mezzo.core.errors.LossScaleCollapseError: ",
        worked=True,
    ),
}


@pytest.fixture(autouse=True)
def _python_s_own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.distributed, once a test has started it in this process, writes the rank before each line.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def assert_told(ran: Ran, row: Row, *, said: str) -> None:
    lines = ran.err.splitlines()
    assert ran.status == row.status
    assert lines[-1].startswith(row.last), ran.err
    told = [line for line in lines if line.startswith("mezzo: ")]
    assert lines[: len(told)] == told, ran.err  # all that Mezzo says comes first
    assert bool(told) == row.worked
    if row.worked:
        assert said in ran.err
    assert "never called" not in ran.err


@pytest.mark.parametrize("name", ROWS)
def test_the_script_s_own_error_comes_last(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[name]
    policy = "fp16,loss_scale=16" if "collapse" in name else "fp16"
    assert_told(launcher(tmp_path, capsys)(row.source, policy=policy), row, said="mezzo: policy fp16")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.worked])
def test_the_same_of_a_run_for_keras(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch: Callable[..., Ran] = launcher(tmp_path, capsys, keras_runner.run)
    assert_told(launch(ROWS[name].source, policy="fp32"), ROWS[name], said="")


@pytest.mark.parametrize("run", [runner.run, keras_runner.run], ids=["torch", "keras"])
def test_a_status_without_an_error_still_has_the_summary(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = launcher(tmp_path, capsys, run)("import sys; sys.exit(3)", policy="fp32")
    assert ran.status == 3
    assert "never called" in ran.err


@pytest.mark.parametrize("name", ["import error in line 1", "in the middle of training"])
def test_a_report_is_named_before_the_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[name]
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(row.source)
    status = main(["run", "--out", "out", "--precision", "bf16", "script.py"])
    assert_told(Ran(status, "", capsys.readouterr().err, []), row, said=f"mezzo: report: {tmp_path / 'out'}")
    assert Path("out/report.html").exists()
