"""A forked child behaves as the interpreter does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forked import can_fork

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(not can_fork(), reason="children are not forked here"),
]

PYTHON = sys.executable

SHOWS = """
import os, sys
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("SOME"), globals().get("__file__"), sys.warnoptions)
print(input(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["shows.py", "a", "b c"],
        ["-W", "error", "-u", "folder/shows.py"],
        ["-m", "folder.shows", "x"],
        ["-c", SHOWS, "y"],
        ["-c", "import sys; sys.exit(3)"],
        ["-c", "import sys; sys.exit('a message')"],
        ["-c", "import atexit; atexit.register(print, 'last'); 1 / 0"],
        ["-W", "error", "-c", "import warnings; warnings.warn('told')"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
        ["-c", "raise KeyboardInterrupt"],
        ["fails.py"],
        ["missing.py"],
        ["-c", "def"],
        ["-V"],
    ],
    ids=" ".join,
)
def test_it_ends_as_the_interpreter_does(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("shows.py", "folder/shows.py"):
        (tmp_path / file).write_text(SHOWS)
    (tmp_path / "fails.py").write_text("def f():\n    raise ValueError('here')\n\nf()\n")
    how = {"cwd": tmp_path, "env": os.environ | {"SOME": "thing"}, "input": "given\n", "capture_output": True}
    plain = subprocess.run([PYTHON, *words], text=True, **how)
    forked = subprocess.run([sys.executable, *words], text=True, **how)
    assert (forked.returncode, forked.stdout, forked.stderr) == (plain.returncode, plain.stdout, plain.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_it_ends_the_process_that_was_forked(number: signal.Signals, tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **quiet) as started:
        process = int(started.stdout.readline())
        assert process != started.pid
        started.send_signal(number)
        assert started.wait() == -number
    while Path(f"/proc/{process}").exists():
        time.sleep(0.01)


HOOK = """
import importlib.util, sys
class Hook:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(cls)
            print("before torch:", [name for name in sys.modules if name.split(".")[0] in ("torch", "mezzo")])
            return importlib.util.find_spec(name)
sys.meta_path.insert(0, Hook)
"""


@pytest.mark.parametrize(
    ("changed", "is_there"),
    [({}, True), ({"OMP_NUM_THREADS": "3"}, False), ({"MEZZO_TEST_FORK": "0"}, False)],
)
def test_torch_is_imported_as_ever(changed: dict[str, str], is_there: bool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    code = "import sys, torch, torch.nn; print('torch._dynamo' in sys.modules, torch.__spec__.origin == torch.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)} | changed
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["before torch: []", f"{is_there} True"], done.stderr
