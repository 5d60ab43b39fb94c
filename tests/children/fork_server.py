"""Forks processes that continue as `python WORDS` where the imports of these modules have ended.

    python fork_server.py SOCKET MODULE ...

`forked.py` writes the program that asks for one. The server ends with the one that started it, when its stdin does.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import os
import runpy
import selectors
import signal
import site
import socket
import sys
import threading
import types
import warnings
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
LIBRARIES = [folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(":")]


def serve(path: str) -> dict[str, Any]:
    """Fork for each request; it returns in the processes that were forked, with the request."""
    selector = selectors.DefaultSelector()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    selector.register(listening, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    asking: dict[
        int, tuple[socket.socket, int]
    ] = {}  # by the process's descriptor: who asked for it, its number
    os.write(1, b"ready\n")
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                connection, _ = listening.accept()
                text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                if not (child := os.fork()):
                    os.setpgid(0, 0)
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    for used in (listening, connection, selector, *(each for each, _ in asking.values())):
                        used.close()
                    for process in asking:
                        os.close(process)
                    return ast.literal_eval(text.decode())
                for descriptor in descriptors:
                    os.close(descriptor)
                process = os.pidfd_open(child)
                asking[process] = connection, child
                connection.send(str(child).encode() + b"\n")
                selector.register(process, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, child)
            elif key.fd in asking:
                connection, child = asking.pop(key.fd)
                _, status = os.waitpid(child, 0)
                with suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode() + b"\n")
                for each in (key.fd, connection):
                    selector.unregister(each)
                connection.close()
                os.close(key.fd)
            elif key.data:  # who asked was killed
                with suppress(OSError):
                    os.killpg(key.data, signal.SIGKILL)
            else:  # so was who started the server
                for _, child in asking.values():
                    os.killpg(child, signal.SIGKILL)
                os._exit(0)


class Imported:
    """Import hook, the last before those of files: `import torch` finds what was imported before the fork."""

    def __init__(self) -> None:
        self.modules = {
            name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torch"
        }
        self.spec = self.modules["torch"].__spec__
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec("torch", self) if name == "torch" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        sys.meta_path.remove(self)
        return self.modules["torch"]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec
        sys.modules.update(self.modules)


def become(asked: dict[str, Any]) -> None:
    """Run the program as the interpreter would."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.getppid = lambda: asked["parent"]  # type: ignore[assignment, return-value]
    sys.executable = asked["python"]
    sys.excepthook = without_these_lines
    words, unbuffered = list(asked["words"]), bool(os.environ.get("PYTHONUNBUFFERED"))
    while words[0] in ("-W", "-u"):
        if words.pop(0) == "-W":
            sys.warnoptions.append(words.pop(0))
        else:
            unbuffered = True
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    warnings.resetwarnings()
    for category in (ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(":")), *LIBRARIES]
    if "torch" in sys.modules:
        Imported()
    site.execsitecustomize()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        main.__file__ = os.path.abspath(words[0])
        with open(words[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


def ended(asked: dict[str, Any]) -> int:
    """Run the program to its end; return its exit status, or minus the signal that it ends by."""
    try:
        become(asked)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def without_these_lines(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    sys.path.remove(HERE)
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    status = ended(serve(sys.argv[1]))
    # What Python does at its end, but for the destruction of all modules, which copies the memory of PyTorch's.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
