"""Commands that messages and reports offer for pasting, as words for `shlex.join`; and messages on stderr."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

DEFAULT_MARGIN = 0.005
_PASTED = re.compile(r"`[^`]*`|(?<=: )(?:mezzo|torchrun|import) (?:'[^']*'|[^\s'(]|\s(?!\())*")


def say(text: str) -> None:
    """Print a message on stderr, folded to the width of a terminal. Commands stay whole, and so does all in a pipe."""
    if getattr(sys.stderr, "isatty", bool)():  # a script may have replaced it
        wrap = textwrap.TextWrapper(subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        wrap.width = max(30, shutil.get_terminal_size().columns)
        whole = _PASTED.sub(lambda found: found[0].replace(" ", "\0"), text)
        text = "\n".join(map(wrap.fill, whole.splitlines())).replace("\0", " ")
    print(text, file=sys.stderr, flush=True)


def command(verb: str, request: Mapping[str, Any], *options: str) -> list[str]:
    """``mezzo VERB TARGET options -- args`` for the target and the arguments of a request."""
    demo, arguments = request.get("demo"), request.get("argv")
    words = ["mezzo", verb, *(["--demo", str(demo)] if demo else _target(request)), *options]
    if isinstance(arguments, (list, tuple)) and arguments:
        words += ["--", *map(str, arguments)]
    return words


def run_command(request: Mapping[str, Any], *options: str) -> list[str]:
    """``mezzo run options TARGET args`` for the target and the arguments of a request."""
    apex = ["--apex"] * bool(request.get("apex"))
    ranks = request.get("nproc")
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"] if ranks else []
    script = [*_target(request), *map(str, request.get("argv") or ())]
    return [*torchrun, "mezzo", "run", *apex, *options, *script]


def _target(request: Mapping[str, Any]) -> list[str]:
    words = ["-m"] * bool(request.get("is_module")) + [str(request["target"])]
    return [*words, str(request["source"])] if request.get("source") and words == ["-c"] else words


def compare_command(request: Mapping[str, Any], out: str = "", *options: str) -> list[str]:
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
