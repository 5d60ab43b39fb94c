"""A comparison's folder: locked, checked and resumed; every file in it appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mezzo.compare.request import BASELINE, FILE, Request, differences, read_request
from mezzo.compare.runs import ATTEMPT
from mezzo.core.commands import compare_command
from mezzo.core.comparison import FEWEST_FOR_TOST
from mezzo.core.errors import UsageError
from mezzo.core.whole_file import write_whole

OURS = (FILE, "verdict.json", "report.html", "runs")
LOCK = ".lock"


def prepare(folder: Path, request: Request, *, fresh: bool = False) -> bool:
    """Make the folder ready for the request's runs; return whether it holds runs that are kept."""
    declared, path, runs = request.declared(), folder / FILE, folder / "runs"
    if fresh:
        _clear(folder)
    if path.exists():
        before = read_request(path)
        changed = differences(declared, before)
        # Fewer than three pairs are never called equivalent, so the test is still made only once.
        may_grow = before.get("seeds", 0) < min(FEWEST_FOR_TOST, request.seeds)
        compared = any(not run.name.startswith(f"{BASELINE}-") for run in runs.glob("*.jsonl"))
        refused = {key: said for key, said in changed.items() if key != "seeds" or not may_grow}
        if compared and refused:
            raise UsageError(_refusal(folder, request, refused))
        kept = ("seeds", "margin", "metric", "precisions", "policies")
        if not all(key.startswith(kept) for key in changed):
            _clear(folder)  # FP32 runs of another script or version are of no use
    runs.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(declared, indent=2) + "\n")
    return any(runs.glob("*.jsonl"))


def _refusal(folder: Path, request: Request, changed: Mapping[str, str]) -> str:
    """Why a changed comparison cannot go on in this folder, and the commands that work."""
    said, name = "; ".join(changed.values()), f"{folder}-2"
    if changed.keys() == {"seeds"}:
        said += ". Choose the number of seeds first: adding runs until the result is good would prove nothing"
        name = f"{folder}-{request.seeds}-seeds"
    return (
        f"{folder}: holds a comparison with other settings: {said}.\n"
        f"In a new folder: {compare_command(request.asked(), name)}\n"
        f"Or start over: {compare_command(request.asked(), str(folder), '--fresh')}"
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and let no other process of Mezzo write into it, except on Windows: UsageError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path = folder / LOCK
    while True:
        file = path.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read() or "another process of Mezzo"
            raise UsageError(
                f"{folder}: in use by {holder}. Wait until it ends, or choose another folder with --out."
            ) from None
        except OSError:  # a file system without flock
            pass
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # its last holder has just deleted it
    with file:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} ({shlex.join(sys.argv)})")
            file.flush()
            for abandoned in (folder / "runs").glob(f"{ATTEMPT}*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked worker may still have the file open


def forget_run(folder: Path, name: str) -> None:
    """Delete what an unfinished run left."""
    for suffix in (".jsonl", ".log"):
        (folder / "runs" / f"{name}{suffix}").unlink(missing_ok=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Report an OSError of a folder that can't be written as a UsageError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(folder) from error
        why = error.strerror or error
        raise UsageError(f"{folder}: {why}. Choose a writable folder with --out DIR.") from error


def full(folder: Path) -> UsageError:
    """The error for a disk that has no space left."""
    return UsageError(
        f"{folder}: no space left on the disk. Free some space and give the same command again (mezzo compare keeps "
        "finished runs), or choose a folder on another disk with --out DIR."
    )


def check_ours(folder: Path, ours: Collection[str] = OURS, mark: str = FILE) -> None:
    """Raise UsageError unless the folder is new, holds nothing but `ours`, or holds `mark`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"--out {folder}: is a file. Choose a folder.")
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in ours and not p.name.startswith("."))
    if strangers and not (folder / mark).exists():
        raise UsageError(
            f"--out {folder}: holds other files ({', '.join(strangers[:5])}). Choose an empty or a new folder."
        )


def _clear(folder: Path) -> None:
    for name in OURS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def strict(value: Any) -> Any:
    """The value with every number that JSON lacks (NaN, infinities) as None."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
