"""Child processes that do not import PyTorch anew, which takes five seconds with what `torch.optim` imports.

A server has imported it and forks (`children/fork_server.py`). All else happens in the child: the sitecustomize, and
the imports of Mezzo and of the script. Where the environment is MEZZO_TEST_FORK=0, a child starts as always.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

SERVER = Path(__file__).parent / "children" / "fork_server.py"
FAKE = SERVER.with_name("fake_launch.py")

# What `sys.executable` is in the test and in its children: it takes 10 ms, as it imports next to nothing.
PROGRAM = """#!{python} -SE
import os, sys
words, environment = sys.argv[1:], dict(os.environ)
at = 0
while at < len(words) and words[at] in ("-W", "-u"):
    at += 1 + (words[at] == "-W")
def read_at_start(names):
    return {{key: names[key] for key in names if key.startswith({prefixes!r}) and not key.startswith({other!r})}}
if (
    at == len(words) or words[at] not in ("-c", "-m") and not os.path.isfile(words[at])
    or read_at_start(environment) != {environment!r}
    or environment.get("MEZZO_TEST_FORK") == "0"
):
    os.execv({python!r}, [{python!r}, *words])

# Not json, signal and socket, whose imports take longer than all else here.
import _signal, _socket
server = _socket.socket(_socket.AF_UNIX)
server.connect({socket!r})
asked = dict(words=words, environment=environment, folder=os.getcwd(), parent=os.getppid(), python={program!r})
descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
server.sendmsg([ascii(asked).encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
def answer():
    line = b""
    while (byte := server.recv(1)) not in b"\\n":
        line += byte
    return int(line)
child = answer()
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGQUIT):
    _signal.signal(number, lambda number, frame: os.kill(child, number))
status = answer()
if status < 0:
    if -status != _signal.SIGKILL:
        _signal.signal(-status, _signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""

# Variables that the server's process has read: where one differs, the child starts as always.
PREFIXES = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "TRITON_", "PYTHON", "CUDA_", "LD_")
OTHER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC", "TORCH_NCCL")  # read later, or by `fork_server.py`


def can_fork() -> bool:
    """Whether this system has what the server needs, and the environment does not say otherwise."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, an old kernel, a container that forbids it
        return False
    return os.environ.get("MEZZO_TEST_FORK") != "0"


@contextmanager
def serving(folder: Path, *modules: str) -> Iterator[str]:
    """The program, with a server behind it that has imported these modules."""
    program, meeting = folder / "python", folder / "socket"
    same = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) and not name.startswith(OTHER)
    }
    paths = {"python": sys.executable, "socket": str(meeting), "program": str(program)}
    program.write_text(PROGRAM.format(**paths, environment=same, prefixes=PREFIXES, other=OTHER))
    program.chmod(0o755)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(SERVER), str(meeting), *modules], **pipes) as server:  # type: ignore[call-overload]
        assert server.stdout.readline() == b"ready\n"
        yield str(program)
        server.stdin.close()


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The program; the first optimizer of a process imports torch._dynamo."""
    with serving(tmp_path_factory.mktemp("fork"), "torch", "torch._dynamo") as program:
        yield program


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The command of children that only pretend to train, and start without the import of what they write with."""
    if not can_fork():
        yield sys.executable, str(FAKE)
        return
    with serving(tmp_path_factory.mktemp("fake"), "mezzo.core.records", "subprocess", "random") as program:
        yield program, str(FAKE)


@pytest.fixture(scope="module")
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets `sys.executable` be the program that forks, in a file's tests and for the children that Mezzo starts."""
    if not can_fork():
        yield
        return
    # Not at the top: TensorFlow's tests read this file, too.
    from mezzo.cli import batch_size, calibrate
    from mezzo.compare.request import FRAMEWORKS
    from mezzo.compare.runs import LAUNCH

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", request.getfixturevalue("forking"))
        launch = (sys.executable, *LAUNCH[1:])
        for module in (calibrate, batch_size):
            patch.setattr(module, "LAUNCH", launch)
        for name, found in FRAMEWORKS.items():
            patch.setitem(FRAMEWORKS, name, replace(found, launch=(sys.executable, *found.launch[1:])))
        yield
