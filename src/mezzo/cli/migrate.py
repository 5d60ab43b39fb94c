"""Change a script from torch.amp, torch.cuda.amp or apex.amp to Mezzo. Without --write, only print the diff.

  mezzo migrate train.py                  print the changes as a unified diff
  mezzo migrate train.py | patch -p0      the same as --write, after a look at the diff
  mezzo migrate --write train.py utils.py change the files
  mezzo migrate --json train.py           the diff and what was left alone, as JSON

Imports from torch.amp and torch.cuda.amp become imports from mezzo.amp, and those from apex imports from mezzo.apex.
Calls stay as they are, except that those of torch.cuda.amp get their device type: autocast() becomes autocast("cuda").
Comments, layout and line endings stay. The training loop stays, too: it keeps its GradScaler.

A use that may mean something else is left alone: a name that is bound twice, a star import, a name in a string. Each is
listed on stderr, with its line, the reason, and what to do by hand.

It needs libcst: pip install libcst. For a notebook, first run: jupyter nbconvert --to script NOTEBOOK.ipynb

Exit status: 0 nothing to change, or written; 1 changes were found and not written; 2 wrong usage, or a file that is
not Python (then no file is written). What is left alone does not change it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mezzo.core.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT", type=Path, help="a Python file")
    parser.add_argument("--write", action="store_true", help="change the files, instead of printing the diff")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: for each file its diff and what was left alone"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the changes, or make them."""
    try:
        from mezzo.migrate import migrate
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        raise UsageError("it needs libcst. Install it: pip install libcst") from error
    done = {path: migrate(_read(path), str(path)) for path in arguments.scripts}
    changed = {path: one for path, one in done.items() if one.after != one.before}
    for path, one in changed.items() if arguments.write else ():
        try:
            path.write_bytes(one.after)
        except OSError as error:
            raise UsageError(
                f"{str(path)!r} can't be written ({error.strerror}). Check its permissions."
            ) from error
    if arguments.json:
        files = [
            {
                "file": str(path),
                "changed": path in changed,
                "diff": one.diff(str(path)),
                "left": list(map(asdict, one.left)),
            }
            for path, one in done.items()
        ]
        print(json.dumps({"schema": 1, "written": bool(arguments.write), "files": files}, indent=2))
    else:
        for path, one in done.items():
            if not arguments.write:
                sys.stdout.buffer.write(one.diff(str(path)).encode("utf-8", "surrogateescape"))
            for left in one.left:
                print(
                    f"{path}:{left.line}: left alone: {left.code}: {left.reason}; {left.fix}", file=sys.stderr
                )
        print(_summary(changed, len(done), arguments.write), file=sys.stderr)
    return int(bool(changed) and not arguments.write)


def _read(path: Path) -> bytes:
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{str(path)!r} is a notebook. Convert it first: jupyter nbconvert --to script {path}"
        )
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a directory. Name its files: mezzo migrate {path}/*.py")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} can't be read ({error.strerror}). Give the path of a script."
        ) from error


def _summary(changed: Iterable[Path], files: int, written: bool) -> str:
    names = list(map(str, changed))
    if not names:
        return "mezzo: nothing to change"
    of = f"{len(names)} of {files} files" if files > 1 else "1 file"
    command = shlex.join(["mezzo", "migrate", "--write", *names])
    return f"mezzo: {of} {'changed' if written else f'would change. To change: {command}'}"
