"""The command that runs the comparison again."""

from __future__ import annotations

import shlex

from mezzo.report.markup import Markup, element
from mezzo.report.reading import Comparison


def rerun(comparison: Comparison) -> Markup:
    """The command that runs the comparison again, ready to copy."""
    command = command_line(comparison)
    copy = element("button", "Copy", type="button", class_="copy", hidden=True)
    return element("div", element("pre", element("code", command)), copy, class_="command")


def command_line(comparison: Comparison) -> str:
    """``mezzo compare ...`` as it was asked for, quoted for a POSIX shell."""
    request = comparison.request
    written = request.get("command") or comparison.verdict.get("command")
    if isinstance(written, str) and written:
        return written
    if isinstance(written, (list, tuple)) and written:
        return shlex.join(str(word) for word in written)
    words = ["mezzo", "compare"]
    started = next((run.started for run in comparison.runs if run.started), None)
    script = request.get("target") or request.get("script") or (started.script if started else "SCRIPT")
    if request.get("demo"):
        words += ["--demo", str(request["demo"])]
    elif request.get("is_module"):
        words += ["-m", str(script)]
    else:
        words.append(str(script))
    if request.get("framework", "pytorch") != "pytorch" and not request.get("demo"):
        words += ["--framework", str(request["framework"])]
    precisions = request.get("precisions") or request.get("precision") or list(comparison.candidates)
    # A flag for each: "params=fp32,compute=bf16" holds a comma of its own.
    for one in precisions if isinstance(precisions, (list, tuple)) else [precisions]:
        words += ["--precision", str(one)]
    for key in ("seeds", "margin", "metric", "metric_better", "metric_margin"):
        if request.get(key) not in (None, "", "auto"):
            words += [f"--{key.replace('_', '-')}", str(request[key])]
    # In the same folder the finished runs would be kept, and nothing run again.
    words += ["--out", comparison.directory.resolve().name, "--fresh"]
    arguments = request.get("argv", started.argv if started else [])
    if isinstance(arguments, (list, tuple)) and arguments:
        words += ["--", *(str(word) for word in arguments)]
    return shlex.join(words)
