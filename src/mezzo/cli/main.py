"""`mezzo COMMAND ...`: find the command's file, parse, call, and turn every error into one line and an exit status.

A command is a module of this package with `configure(parser)` and `run(arguments) -> int`, imported only when it is
called. If it has `PASSES_ON = True`, the words after `--` are a script's, received as `arguments.argv`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from mezzo import __version__
from mezzo.cli.arguments import Parser
from mezzo.core.errors import MezzoError, UsageError, unknown_name

VERBS = {
    "compare": "train a script in FP32 and in 16 bits, and say whether 16 bits are faster, smaller and as good",
    "run": "run a script in mixed precision, unchanged",
    "calibrate": "a format, a loss scale and a ranking of sensitive modules, from a few steps in FP32",
    "batch-size": "the largest batch size with which a script fits into memory, and the fastest",
    "report": "rebuild the report of a folder of run records",
    "doctor": "what this machine (or a GPU you name) can do in each format, and which precision to use",
    "formats": "the number formats, and any number's bits in each of them",
}
REMOVED = {
    "reproduce": "The experiments are scripts of the repository: `make reproduce` runs them all, "
    "`python experiments/NAME.py` one of them",
    "tune": "`mezzo calibrate` ranks the modules by what low precision does to the loss; write those that need FP32 "
    "into a policy (bf16,module.NAME=fp32), and `mezzo compare` judges it",
}
"""Verbs of earlier versions, and what to use instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the returned number is the process's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"mezzo {__version__}")
        return 0
    verb = words[0]
    try:
        if verb in REMOVED:
            raise UsageError(f"`mezzo {verb}` was removed. {REMOVED[verb]}.")
        if verb not in VERBS:
            raise unknown_name("command", verb, VERBS)
        status = _run(verb, words[1:])
        with contextlib.suppress(AttributeError, ValueError):  # a script may have replaced or closed it
            sys.stdout.flush()  # here, where a reader that has left is not an error
        return status
    except MezzoError as error:
        print(f"mezzo {verb}: {error}" if verb in VERBS else f"mezzo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mezzo {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if sys.stdout is sys.__stdout__ and sys.stdout is not None:  # discard what is still buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(verb: str, words: list[str]) -> int:
    module: ModuleType = importlib.import_module(f"mezzo.cli.{verb.replace('-', '_')}")
    passes_on = getattr(module, "PASSES_ON", False)
    parser = Parser(f"mezzo {verb}", module.__doc__, passes_on=passes_on)
    module.configure(parser)
    rest: list[str] = []
    if passes_on and "--" in words:  # argparse gives what follows to any positional
        cut = words.index("--")
        words, rest = words[:cut], words[cut + 1 :]
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # argparse has printed its usage or its help
        return int(stop.code or 0)
    if passes_on:
        arguments.argv = rest
    status: int = module.run(arguments)
    return status


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in VERBS.items())
    return (
        "mezzo: mixed precision training, measured and judged\n\n"
        f"usage: mezzo COMMAND [...]\n\n{verbs}\n\n"
        "Start with:\n"
        "  mezzo compare --demo digits              what Mezzo does, on real data, in a few minutes\n"
        "  mezzo compare train.py -- --epochs 3     the same for a script of yours, unchanged\n\n"
        "Exit status: 0 pass, 1 a finding, 2 wrong usage, or a script that fails or never trains; 130 after an\n"
        "interrupt. `mezzo run` ends as its script does.\n\n"
        "`mezzo COMMAND --help` explains a command."
    )


if __name__ == "__main__":
    sys.exit(main())
