"""Commands that messages and reports offer for pasting, quoted for a POSIX shell; and how text is printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

DEFAULT_MARGIN = 0.005
_PASTED = re.compile(
    # A command is an indented line, or follows a colon, up to the sentence's end, a column or a parenthesis.
    r"`[^`]*`|\bmezzo[.\w]*\([^()]*\)|(?m:^ +|(?<=: ))(?:mezzo|torchrun|import|pip|jupyter|--[\w-]+)(?=[ =])"
    r"(?:'[^']*'|\S|(?<![,;])(?<!\w\.) (?! |\())*"
)


def say(text: str, *, out: bool = False) -> None:
    """Print a text on stderr, or with `out` on stdout: on a terminal folded to its width."""
    stream = sys.stdout if out else sys.stderr
    print(folded(text, columns(stream)), file=stream, flush=True)


def columns(stream: Any) -> int | None:
    """The width of the terminal that a stream writes to; None for a pipe or a file."""
    if not getattr(stream, "isatty", bool)():  # a script may have replaced it
        return None
    size = os.terminal_size((80, 24))
    with suppress(AttributeError, OSError, ValueError):  # shutil only asks stdout, which may be a pipe
        size = os.get_terminal_size(stream.fileno())
    return max(30, shutil.get_terminal_size(size).columns or 80)


def folded(text: str, width: int | None, indent: int = 2) -> str:
    """The lines of a text folded to a width, those of a table below their second column. Commands stay whole."""
    if width is None:
        return text

    def fill(line: re.Match[str]) -> str:
        hang = len(line[1]) + (len(line[2] or "") or indent)
        wrap = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
        wrap.subsequent_indent = " " * min(hang, width // 2)
        return wrap.fill(line[0])

    whole = _PASTED.sub(lambda found: found[0].replace(" ", "\0"), text)
    return re.sub(r"(?m)^( *)(\S+(?: \S+)*  +)?.*$", fill, whole).replace("\0", " ")


def command(verb: str, request: Mapping[str, Any], *options: str) -> str:
    """``mezzo VERB TARGET options -- args`` for the target and the arguments of a request."""
    demo, arguments = request.get("demo"), request.get("argv")
    words = ["mezzo", verb, *(["--demo", str(demo)] if demo else _target(request)), *options]
    if isinstance(arguments, (list, tuple)) and arguments:
        words += ["--", *map(str, arguments)]
    return shlex.join(words)


def run_command(request: Mapping[str, Any], *options: str) -> str:
    """``mezzo run options TARGET args`` for the target and the arguments of a request."""
    apex = ["--apex"] * bool(request.get("apex"))
    script = [*_target(request), *map(str, request.get("argv") or ())]
    return run_words(request.get("nproc"), *apex, *options, *script)


def run_words(ranks: int | str | None, *words: str) -> str:
    """``mezzo run words``, on so many ranks of torchrun if there are any."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"] if ranks else []
    return shlex.join([*torchrun, "mezzo", "run", *words])


def _target(request: Mapping[str, Any]) -> list[str]:
    words = ["-m"] * bool(request.get("is_module")) + [str(request["target"])]
    return [*words, str(request["source"])] if request.get("source") and words == ["-c"] else words


def compare_command(request: Mapping[str, Any], out: str = "", *options: str) -> str:
    """The ``mezzo compare ...`` that makes this comparison, in the folder `out` if one is given."""
    words = []
    if not request.get("demo") and request.get("framework", "pytorch") != "pytorch":
        words += ["--framework", str(request["framework"])]
    precisions = request["precisions"]
    names = list(map(str, precisions)) if isinstance(precisions, (list, tuple)) else [str(precisions)]
    # One option for each policy: "params=fp32,compute=bf16" contains a comma.
    for one in names if "=" in "".join(names) else [",".join(names)]:
        words += ["--precision", one]
    for key in ("nproc", "seeds", "margin", "metric", "metric_better", "metric_margin"):
        if request.get(key) not in (None, "", "auto", DEFAULT_MARGIN):
            words += [f"--{key.replace('_', '-')}", str(request[key])]
    return command("compare", request, *words, *(["--out", out] if out else []), *options)
