"""Change a script from torch.amp, torch.cuda.amp or apex.amp to Mezzo. Without --write, only print the diff.

  mezzo migrate train.py                  print the changes as a unified diff
  mezzo migrate train.py | patch -p0      apply that diff: the same as --write
  mezzo migrate --write train.py utils.py change the files

Imports from torch.amp and torch.cuda.amp become imports from mezzo.amp, and those from apex imports from mezzo.apex.
Calls, comments, layout and line endings stay. The training loop stays, too: it keeps its GradScaler.

A use that may mean something else is left alone: a name that is bound twice, a star import, isinstance(x, autocast).
Each is listed on stderr, with its line, the reason, and what to do by hand.

It needs libcst: pip install libcst. For a notebook, first run: jupyter nbconvert --to script NOTEBOOK.ipynb

Exit status: 0 nothing to change, or written; 1 changes were found and not written; 2 wrong usage, or a file that is
not Python (then no file is written). What is left alone does not change it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from mezzo.core.commands import say
from mezzo.core.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("scripts", nargs="+", metavar="SCRIPT", type=Path, help="a Python file")
    add("--write", action="store_true", help="change the files, instead of printing the diff")
    add("--json", action="store_true", help="print JSON: for each file its diff and what was left alone")


def run(arguments: argparse.Namespace) -> int:
    """Print the changes, or make them."""
    try:
        from mezzo.migrate import migrate
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        raise UsageError("it needs libcst. Install it: pip install libcst") from error
    for path in arguments.scripts:
        if path.suffix == ".ipynb":
            raise UsageError(f"{str(path)!r} is a notebook. Convert it: jupyter nbconvert --to script {path}")
    try:
        done = {str(path): migrate(path.read_bytes(), str(path)) for path in arguments.scripts}
        changed = [name for name, one in done.items() if one.after != one.before]
        for name in changed if arguments.write else ():
            Path(name).write_bytes(done[name].after)
    except OSError as error:
        raise UsageError(f"{error.filename!r}: {error.strerror}. Give the path of a script.") from error
    status = int(bool(changed) and not arguments.write)
    diffs = {name: one.diff(name) for name, one in done.items()}
    if arguments.json:
        files = []
        for it, one in done.items():
            rest = {"left": [use._asdict() for use in one.left], "on_cpu": one.on_cpu}
            files.append({"file": it, "changed": it in changed, "diff": diffs[it], **rest})
        print(json.dumps({"schema": 1, "written": bool(arguments.write), "files": files}, indent=2))
        return status
    if not arguments.write:
        sys.stdout.buffer.write("".join(diffs.values()).encode("utf-8", "surrogateescape"))
    off = "torch.cuda.amp.autocast is off on a computer without CUDA, Mezzo's is bf16. To keep it off there"
    off += ": autocast(enabled=torch.cuda.is_available())"
    for name, one in done.items():
        told = {off: [("", line) for line in one.on_cpu]} if one.on_cpu else {}
        for left in one.left:
            uses = told.setdefault(f"{left.reason}; {left.fix}", [])
            uses.append((f"left alone: {left.code}: ", left.line))
        for why, ((what, line), *more) in told.items():
            also = [*map(str, dict.fromkeys(other for _, other in more if other != line))]
            others = f" (also line{'s' * (len(also) > 1)} {', '.join(also)})" if also else ""
            say(f"{name}:{line}: {what}{why}{others}")
    of = f"{len(changed)} of {len(done)} files" if len(done) > 1 else "1 file"
    command = shlex.join(["mezzo", "migrate", "--write", *changed])
    says = f"{of} {'changed' if arguments.write else f'would change. To change: {command}'}"
    say(f"mezzo: {says if changed else 'nothing to change'}")
    return status
