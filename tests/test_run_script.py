"""A script runs as Python runs it, by comparison of what can be seen from outside; and how a run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Command, in_the_folder  # noqa: F401
from mezzo.keras import run as keras_runner
from mezzo.pytorch.run import session as pytorch_session
from run_scripts import Ran, launcher

SURROUNDINGS = """
import os, sys
main = sys.modules["__main__"]
print(sys.argv, __name__, __file__, __package__, __doc__, __cached__, type(__loader__).__name__)
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent, type(__spec__.loader).__name__))
print(sys.path[0], os.getcwd(), main.__dict__ is globals(), sorted(k for k in globals() if k.startswith("__")))
print(sys.stdin.read(), "torch" in sys.modules)
"""

RAISES = """
def inner(x):
    try:
        return 1 / x
    except ZeroDivisionError as error:
        raise ValueError("no: " + str(x)) from error
inner(0)
"""

HOOK = """
import sys
def hook(kind, error, trace):
    print("hook", kind.__name__, error, trace.tb_frame.f_code.co_name, file=sys.stderr)
sys.excepthook = hook
raise KeyError("mine")
"""


THREADS = """
import atexit, concurrent.futures, threading, time
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(print, "pool", flush=True).result()
def late():
    time.sleep(0.1)
    print("thread done", flush=True)
atexit.register(print, "at exit")
threading.Thread(target=late).start()
print("main done", flush=True)
"""

SPAWN = """
import multiprocessing, sys
def work(n):
    return n + len(sys.argv), __name__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [3]))
"""

GROUP = """
import sys
if sys.version_info >= (3, 11):
    try:
        raise KeyError("one")
    except KeyError as error:
        found = [error]
    raise ExceptionGroup("several", found)
"""

INTERRUPTS = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"

ROWS = {
    "interrupt": (INTERRUPTS, []),
    "surroundings": (SURROUNDINGS, ["a", "--flag", "-m", "b c"]),
    "exit text": ("import sys; sys.exit('went wrong')", []),
    "exit number": ("import sys; sys.exit(259)", []),
    "raises": (RAISES, []),
    "syntax error": ("def f(:\n    pass\n", []),
    "hook": (HOOK, []),
    "threads": (THREADS, []),
    "spawn": (SPAWN, ["x"]),
    "group": (GROUP, []),
}


def both(*command: str, at: Path) -> tuple[subprocess.CompletedProcess[str], ...]:
    """The same words after `python` and after `mezzo run`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    how: Any = {"cwd": at, "env": env, "input": "some input\n", "text": True, "timeout": 60}
    starts: tuple[list[str], ...] = [], ["-m", "mezzo", "run"]
    return tuple(
        subprocess.run([sys.executable, *start, *command], capture_output=True, **how) for start in starts
    )


def assert_same(*command: str, at: Path) -> None:
    plain, ours = both(*command, at=at)
    assert ours.stdout == plain.stdout
    told = [line for line in ours.stderr.splitlines(keepends=True) if not line.startswith("mezzo: ")]
    assert "".join(told) == plain.stderr
    assert ours.returncode == (130 if plain.returncode == -2 else plain.returncode)
    assert (ours.stderr == plain.stderr) == (plain.returncode != 0)  # else the summary is there


@pytest.mark.parametrize("row", ROWS)
def test_script_runs_as_python_runs_it(row: str, tmp_path: Path) -> None:
    source, argv = ROWS[row]
    folder = tmp_path / "some folder"
    folder.mkdir()
    (folder / "script.py").write_text(source)
    assert_same("some folder/script.py", *argv, at=tmp_path)


def test_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package', __name__)\n")
    (package / "train.py").write_text(SURROUNDINGS + "from . import other\n")
    (package / "other.py").write_text("print('other', __name__)\n")
    (package / "__main__.py").write_text("import sys; print(sys.argv, __package__); sys.exit(4)\n")
    assert_same("-m", "package.train", "--epochs", "3", at=tmp_path)
    assert_same("-m", "package", at=tmp_path)


CODE = SURROUNDINGS.replace("__file__, ", "").replace("__cached__, ", "")


@pytest.mark.parametrize("source", [CODE, RAISES, "x = = 1", "import sys; sys.exit(3)"])
def test_code_runs_as_python_runs_it(source: str, tmp_path: Path) -> None:
    assert_same("-c", source, "a", "--flag", "-", at=tmp_path)


def test_directory_and_symbolic_link_run_as_python_runs_them(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "__main__.py").write_text(SURROUNDINGS)
    assert_same("real", "x", at=tmp_path)
    (tmp_path / "link.py").symlink_to(real / "__main__.py")
    assert_same("link.py", "x", at=tmp_path)


# How a run ends, whatever the script does: what is printed in which order, recorded and returned.


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
