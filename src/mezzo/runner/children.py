"""Processes that a script starts: they inherit the run, report to its first process, and end with it.

`Children` exports the run in an environment variable, with a folder at the front of PYTHONPATH whose `sitecustomize`
applies it in each new Python process that imports torch. A child that trains leaves a mark: a file in a folder that
both know. Processes made by fork have the run of their parent anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.core.commands import run_command
from mezzo.core.errors import UsageError
from mezzo.core.whole_file import write_whole
from mezzo.runner.patches import ImportWatch, Patches

if TYPE_CHECKING:
    from mezzo.runner.lifecycle import RunRequest

VARIABLE = "MEZZO_RUN"
STARTUP = str(Path(__file__).parent / "startup")
POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?", re.IGNORECASE)
LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep
    for folder in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_TOOLS = {"mezzo", "pip", *sys.stdlib_module_names}
_LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}
# Words of a command that may stand before its program.
_BEFORE = re.compile(
    r"\w+=.*|-.*|\d+|(.*/)?((ba|da|k|z)?sh|env|export|exec|nohup|nice|time(out)?|srun|mpirun)", re.DOTALL
)
_REPLACED = re.compile(r"PYTHONPATH=(?!.*\$\{?PYTHONPATH)")
_WORKERS = ("from multiprocessing.spawn", "from multiprocessing.forkserver")


class Children:
    """Passes a run on to the Python processes that its script starts, and refuses to start one that it can't reach."""

    def __init__(
        self, request: RunRequest, module: str, imports: ImportWatch, fail: Callable[[UsageError], None]
    ) -> None:
        """`module` has the function `join` of a child; `fail` gets the error of a process that can't be reached."""
        self._request = request
        self._imports = imports
        self._fail = fail
        self._patches = Patches()
        self._before: dict[str, str | None] = {}
        self._home = Path(tempfile.gettempdir(), f"mezzo-run-{uuid.uuid4().hex}")  # made by the first mark
        self._module = module
        self._applies = False  # also where another library keeps a patch

    def install(self) -> None:
        """Export the run, unless this process is a child itself and has it from its parent."""
        if VARIABLE not in os.environ:
            request, code = self._request, self._request.source or ""
            # A script may change the working directory, and the system limits the length of a variable.
            file = request.records and request.records.absolute()
            request = replace(request, records=file, source=code[:1000] or None)
            run = {
                "module": self._module,
                "home": str(self._home),
                "process": os.getpid(),
                "host": socket.gethostname(),
                "request": json.loads(request.to_json()),
            }
            paths = filter(None, (STARTUP, os.environ.get("PYTHONPATH")))
            for name, value in ((VARIABLE, json.dumps(run)), ("PYTHONPATH", os.pathsep.join(paths))):
                self._before[name] = os.environ.get(name)
                os.environ[name] = value
        self._applies = True
        for name in ("execv", "execve", "system"):
            self._watch(os, name)
        self._imports.when("subprocess", lambda module: self._watch(module.Popen, "__init__"))
        self._imports.when("multiprocessing.util", lambda module: self._watch(module, "spawnv_passfds"))

    def remove(self) -> None:
        """Take the variables back. Children that still run go on by themselves."""
        self._applies = False
        self._patches.undo()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def marks(self) -> list[dict[str, Any]]:
        """What the children that trained have reported."""
        found = []
        for path in self._home.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
        return found

    @property
    def error(self) -> str:
        """The user's mistake that a child found; empty if none did."""
        return next((str(mark["error"]) for mark in self.marks() if mark["error"]), "")

    def dismiss(self, *, interrupted: bool) -> None:
        """The script is over: forget the children; after an interrupt end those that still run."""
        for mark in self.marks() if interrupted else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(mark["process"], signal.SIGTERM)
        if self._before:
            shutil.rmtree(self._home, ignore_errors=True)

    def _watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        parameters = signature(original)

        def start(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs)
            if self._applies:
                self._reach(given.arguments)
            return original(*given.args, **given.kwargs)

        self._patches.set(owner, name, start)

    def _reach(self, given: dict[str, Any]) -> None:
        """Put the startup folder first in a new process's PYTHONPATH; UsageError if it would not apply the policy."""
        command = given.get("args", given.get("argv", given.get("command")))
        environment = os.environ if given.get("env") is None else given["env"]
        is_shell = bool(given.get("shell", "command" in given))
        for flags, script in scripts_of(command, is_shell=is_shell):
            self._check(command, flags, script, environment)
        run, paths = os.environ.get(VARIABLE), environment.get("PYTHONPATH")
        if run is not None and (VARIABLE not in environment or STARTUP not in str(paths)):
            paths = os.pathsep.join(filter(None, (STARTUP, paths)))
            if environment is os.environ:
                os.environ["PYTHONPATH"] = paths  # multiprocessing and exec take it from there
            else:
                given["env"] = {VARIABLE: run, **environment, "PYTHONPATH": paths}

    def _check(self, command: Any, flags: str, script: Sequence[str], environment: Any) -> None:
        """Raise UsageError for a process that would not apply the policy."""
        ignoring = "".join(sorted(set(flags) & set("EIS")))
        if "=" in flags:
            why = f"with {flags}, which replaces the run's. Write {flags}:$PYTHONPATH"
        elif ignoring:
            why = f"with -{ignoring}, which ignores PYTHONPATH or sitecustomize. Leave -{ignoring} out"
        elif VARIABLE not in environment:
            why = f"without the environment variable {VARIABLE}. Pass env={{**os.environ, ...}}"
        else:
            return
        request = {"target": script[-1], "is_module": script[0] == "-m"} if script else vars(self._request)
        launch = run_command(request, "--precision", self._request.policy)
        text = command if isinstance(command, str) else shlex.join(_words(command))
        error = UsageError(
            f"the script starts `{text}` {why}, or start that process by "
            f"`{launch}`: the policy can't reach it otherwise, and it would train in FP32"
        )
        self._fail(error)
        raise error


def _words(command: Any) -> list[str]:
    words = command if isinstance(command, (list, tuple)) else [command]
    return [os.fsdecode(word) for word in words if isinstance(word, (str, bytes, os.PathLike))]


def scripts_of(command: Any, *, is_shell: bool = False) -> list[tuple[str, list[str]]]:
    """What `script_of` finds in a command, and in the text of a shell; `flags` may be a `PYTHONPATH=...` of the text.

    >>> scripts_of("export PYTHONPATH=src; python -I train.py", is_shell=True)
    [('PYTHONPATH=src', ['train.py'])]
    """
    words = _words(command)
    commands = [words]
    if is_shell or (words and _BEFORE.fullmatch(words[0])):
        texts = re.split(r"[;|&()\n]+", re.sub("['\"]", "", "\n".join(words)))
        commands += [text.split() for text in texts]
    found, path = [], ""
    for simple in commands:
        at = next((at for at, word in enumerate(simple) if not _BEFORE.fullmatch(word)), len(simple))
        path = next((word for word in simple[:at] if _REPLACED.match(word)), path)
        script = script_of(simple[at:])
        if script is not None:
            found.append((path or script[0], script[1]))
    return found


def script_of(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The flags and the script (or `-m`, MODULE) of a command that runs a user's Python script; None for any other.

    A process of `multiprocessing` has no script of its own.

    >>> script_of(["python3", "-u", "train.py", "-S"]), script_of(["python", "-IWerror", "-m", "train"])
    (('u', ['train.py']), ('I', ['-m', 'train']))
    >>> script_of(["python", "-I", "-c", "print()"]), script_of(["python", "-m", "pip", "list"]), script_of(["ls"])
    (None, None, None)
    """
    program, *others = words or [""]
    if launcher := _LAUNCHERS.get(os.path.basename(program)):
        return None if "mezzo" in others else ("", ["-m", launcher])
    if program != sys.executable and not _PYTHON.fullmatch(os.path.basename(program)):
        return None
    flags, rest = "", iter(others)
    for word in rest:
        if not word.startswith("-") or word == "-":
            path = os.path.realpath(word)
            return None if path.startswith(LIBRARIES) else (flags, [word])
        for at, letter in enumerate(word[1:], start=2):
            value = letter in "cmWX" and (word[at:] or next(rest, ""))
            if letter == "c":
                return (flags, []) if str(value).startswith(_WORKERS) else None
            if letter == "m":
                return None if str(value).partition(".")[0] in _TOOLS else (flags, ["-m", str(value)])
            if value is not False:
                break
            flags += letter
    return None


class Parent:
    """The first process of a run, as one of its children sees it."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._home = Path(run["home"])
        self._mark = self._home / f"{socket.gethostname()}-{os.getpid()}.json"
        self._process: int = run["process"]
        self._is_here = run["host"] == socket.gethostname() and os.name == "posix"
        self._is_child = self._is_here and os.getppid() == self._process

    def mark(self, **facts: Any) -> None:
        """Tell the first process that this one trains under the policy, or has stopped for an `error`."""
        if self._is_here and _is_gone(self._process):
            return  # a process that outlives the run
        with contextlib.suppress(OSError):
            self._home.mkdir(mode=0o700, exist_ok=True)
            write_whole(self._mark, json.dumps({"process": os.getpid(), "error": "", **facts}))

    def end_with(self) -> None:
        """End this process soon after the first one is killed, also where it waits for another rank."""
        if self._is_here:
            end_with(self._process, unless=self._ended_well)

    def leave(self) -> None:
        """This process ends, perhaps because the first one, its parent, was killed."""
        if self._is_child and os.getppid() != self._process:
            self._ended_well()

    def _ended_well(self) -> bool:
        """Whether the first process took the marks away at its end; else this one's is taken away here."""
        if not self._home.exists():
            return True
        self._mark.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other marks
            self._home.rmdir()
        return False


def end_with(process: int, unless: Callable[[], bool] = lambda: False) -> None:
    """End this process soon after another one, by its id, is gone, `unless` that was its regular end."""

    def watch() -> None:
        while not _is_gone(process):
            time.sleep(POLL_SECONDS)
        if not unless():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)

    if os.name == "posix":
        threading.Thread(target=watch, name="mezzo-parent", daemon=True).start()


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def leave() -> None:
    """This process runs a `mezzo` command of its own: forget the run that it would belong to."""
    os.environ.pop(VARIABLE, None)
    sys.meta_path[:] = [hook for hook in sys.meta_path if getattr(hook, "__name__", "") != "WaitsForTorch"]
