"""How a run ends, whatever the script does: what is printed in which order, recorded and returned."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Command, in_the_folder  # noqa: F401
from mezzo.keras import run as keras_runner
from mezzo.pytorch.run import session as pytorch_session
from run_scripts import Ran, launcher


@pytest.fixture(autouse=True)
def _plain_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed, once a test has started it in this process, writes the rank before each line."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("", 0, "mezzo: the script never called backward()"),
        ("raise SystemExit('no data')", 1, "no data"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_summary_comes_once_and_before_the_scripts_own_last_words(
    end: str, status: int, last: str, launch: Any
) -> None:
    ran = launch(f"import torch\ntorch.nn.Linear(1, 1)(torch.ones(1))\n{end}", policy="bf16")
    assert (ran.status, ran.of("end")[0].status) == (status, status)
    assert ran.err.splitlines()[-1].startswith(last)
    assert ran.err.count("mezzo: policy bf16") == 1
    assert "lifecycle.py" not in ran.err
    quiet = launch(f"import torch\n{end}", policy="bf16", summary=False)
    assert "mezzo: " not in quiet.err


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
# How a script ends: its source and the last line that its user reads.
IDLE = ("import nothing_of_this_name", "ModuleNotFoundError: No module named")
COLLAPSE = "mezzo.core.errors.LossScaleCollapseError: "
TRAINING = {
    "an error": (TRAIN.format(factor=1.0, end="raise ValueError('odd')"), "ValueError: odd"),
    "collapse": (TRAIN.format(factor="float('nan')", end="pass"), COLLAPSE),
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
    assert_told(launch(IDLE[0], policy="fp32"), IDLE[1])
    ran = launch("import sys; sys.exit(3)", policy="fp32")  # it fails by itself: no advice
    assert (ran.status, ran.err) == (3, "")


@pytest.mark.parametrize("worked", [False, True])
def test_a_report_is_named_before_the_traceback(worked: bool, tmp_path: Path, command: Command) -> None:
    source, last = TRAINING["an error"] if worked else IDLE
    (tmp_path / "script.py").write_text(source)
    ran = command("run --out out --precision bf16 script.py")
    said = f"mezzo: report: {tmp_path / 'out'}" if worked else ""
    assert_told(Ran(ran.status, "", ran.err, []), last, said=said)
    assert (tmp_path / "out" / "report.html").exists()
