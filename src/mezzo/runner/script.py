"""Run a script, or a module, in this process just as `python SCRIPT` or `python -m MODULE` would."""

from __future__ import annotations

import builtins
import io
import linecache
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from mezzo.core.errors import UsageError

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_DEMOS = _OURS + "demos" + os.sep
# A script's objects may outlive its run (atexit, threads), so its module is never let go.
_kept: list[ModuleType] = []


@dataclass(frozen=True)
class Target:
    """What is to be run: where its code is, and what Python would have put around it."""

    argv0: str
    path0: str
    file: str
    spec: ModuleSpec | None = None
    code: CodeType | None = None
    source: str | None = None  # of `-c` and of standard input, which have no file


def locate(target: str, *, is_module: bool, source: str | None = None) -> Target:
    """Find the script or the module; UsageError if it is missing or can't be read. With a source it is `-c` or `-`."""
    if source is not None:
        return Target(target, "", "<stdin>" if target == "-" else "<string>", source=source)
    if is_module:
        return _module(target)
    path = Path(target)
    folder = os.path.isdir(path)
    file = path / "__main__.py" if folder else path
    if not os.access(file, os.R_OK):
        near = sorted(p.name for p in path.parent.glob("*.py"))[:5] if os.path.isdir(path.parent) else []
        there = f" Scripts there: {', '.join(near)}." if near else ""
        if folder:
            raise UsageError(
                f"{target!r} is a directory without a __main__.py.{there} Give the path of a script."
            )
        if os.path.exists(file):
            raise UsageError(f"the script {str(file)!r} can't be read. Check its permissions.")
        raise UsageError(f"no script {str(file)!r} in {os.getcwd()}.{there} Give the path of a script.")
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{target!r} is a notebook. Convert it and run the script: jupyter nbconvert --to script {target}. In the "
            "notebook itself use mezzo.MixedPrecision."
        )
    full = os.path.abspath(file)
    if folder:
        path0 = os.path.abspath(path)
        return Target(target, path0, full, PathFinder.find_spec("__main__", [path0]))
    return Target(target, os.path.dirname(os.path.realpath(file)), full)


def _module(target: str) -> Target:
    sys.path.insert(0, os.getcwd())
    try:
        details: Any = runpy._get_module_details  # type: ignore[attr-defined]
        _, spec, code = details(target, UsageError)
    except UsageError as error:
        raise UsageError(
            f"-m {target}: {error}. Give the dotted name of a module that can be imported from {os.getcwd()}, as for "
            "python -m. Example: -m package.train"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    return Target(spec.origin, os.getcwd(), spec.origin, spec, code)


@contextmanager
def surroundings(target: Target, argv: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """`__main__`, `sys.argv` and `sys.path[0]` as Python makes them for this target; restored afterwards."""
    module, spec = ModuleType("__main__"), target.spec
    namespace: dict[str, Any] = module.__dict__
    namespace.update(
        __file__=target.file,
        __package__=spec and spec.parent,
        __spec__=spec,
        __builtins__=builtins,
        __cached__=spec and spec.cached,
        __loader__=spec.loader if spec else SourceFileLoader("__main__", target.file),
        __annotations__={},
    )
    if target.source is not None:
        namespace["__loader__"] = BuiltinImporter
    if target.argv0 == "-c":
        del namespace["__file__"], namespace["__cached__"]
    _kept.append(module)
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"] = module
    sys.argv = [target.argv0, *argv]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0:1] = [target.path0]
    try:
        yield namespace
    finally:
        sys.modules["__main__"], sys.argv = before[0], before[1]
        sys.path[:] = before[2]


def execute(target: Target, namespace: dict[str, Any], before_error: Callable[[BaseException], bool]) -> int:
    """Run the code, wait for its threads, return Python's exit status; no traceback where `before_error` is False."""
    failed: BaseException | None = None
    status = 0
    try:
        code = target.code
        if code is None:
            source: str | bytes | None = target.source
            if source is None:
                with io.open_code(target.file) as stream:
                    source = stream.read()
            code = compile(source, target.file, "exec", dont_inherit=True)
            # From Python 3.13 on tracebacks show the lines of `-c`.
            if target.file == "<string>" and sys.version_info >= (3, 13):
                lines = str(target.source).splitlines(keepends=True)
                linecache.cache[target.file] = len(source), None, lines, target.file
        exec(code, namespace)
    except SystemExit as stop:
        if not isinstance(stop.code, (int, type(None))):
            before_error(stop)
        status = exit_status(stop)
    except BaseException as error:
        failed = error
    if failed is not None:  # outside the handler, so that a failing hook has no context, as in Python
        status = 130 if isinstance(failed, KeyboardInterrupt) else 1
        if before_error(failed):
            show(failed)
    _wait_for_threads()
    return status


def _wait_for_threads() -> None:
    """Wait for the script's threads, as Python does; not for the workers of `concurrent.futures`, which end later."""
    futures = sys.modules.get("concurrent.futures.thread")
    workers = set(getattr(futures, "_threads_queues", ()))
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in workers:
            thread.join()


def exit_status(stop: SystemExit) -> int:
    """The status that `sys.exit(code)` gives a process: None is 0, a number is itself, others are printed and are 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """Send an exception to `sys.excepthook`, without Mezzo's frames in any of its tracebacks."""
    strip(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # the script's own hook fails: Python then shows both
        strip(second)
        traceback.print_exception(second)
        traceback.print_exception(error)


def strip(error: BaseException) -> None:
    """Take Mezzo's frames (and the import system's between them) out of an exception and its causes."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_ours(one.__traceback__)
        queue += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_OURS) or name.startswith(_DEMOS):
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for old in reversed(frames):
        kept = TracebackType(kept, old.tb_frame, old.tb_lasti, old.tb_lineno)
    return kept
