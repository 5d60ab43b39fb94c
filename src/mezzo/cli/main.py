"""`mezzo COMMAND ...`: find the command's file, parse, call, and turn every error into one line and an exit status.

A command is a module of this package with `configure(parser)` and `run(arguments) -> int`, imported only when it is
called. If it runs a script, `arguments.argv` has the script's arguments (`Parser.parse_with_script`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from mezzo import __version__
from mezzo.cli.arguments import Parser, help_text
from mezzo.core.commands import say
from mezzo.core.errors import MezzoError, UsageError, unknown_name

VERBS = {
    "compare": "train a script in FP32 and in 16 bits: is 16 bits as good, how much faster, how much smaller",
    "run": "run a script in mixed precision, unchanged",
    "calibrate": "choose a format and a loss scale, and find the sensitive modules, from a few steps in FP32",
    "batch-size": "find the largest batch size that fits into memory, and the fastest one",
    "migrate": "change a script from torch.amp, torch.cuda.amp or Apex to Mezzo: shows the diff first",
    "report": "build the HTML report of a folder of run records again",
    "doctor": "measure what this machine can do in each format, and say which precision to use",
    "formats": "show the number formats, and the bits of any number in each of them",
}
RUN_A_SCRIPT = {"compare", "run", "calibrate", "batch-size"}
REMOVED = {
    "reproduce": "Run `make reproduce` in the repository for all experiments, or `python experiments/NAME.py` for one",
    "tune": "Rank the modules with `mezzo calibrate train.py`, keep the sensitive ones in FP32 with a policy such as "
    "bf16,module.NAME=fp32, and check it with `mezzo compare --precision bf16,module.NAME=fp32 train.py`",
}
"""Commands of earlier versions, and what to use instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the returned number is the process's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:  # `mezzo help run` is `mezzo run --help`
        words = [*words[1:2], "--help"]
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
        if verb.endswith(".py") or (verb.startswith("-") and len(words) > 1):
            raise UsageError(f"the command is missing. Example: mezzo run {shlex.join(words)}")
        if verb not in VERBS:
            raise unknown_name("command", verb, VERBS)
        status = _run(verb, words[1:])
        with contextlib.suppress(AttributeError, ValueError):  # a script may have replaced or closed it
            sys.stdout.flush()  # here, where a reader that has left is not an error
        return status
    except MezzoError as error:
        say(f"mezzo {verb}: {error}" if verb in VERBS else f"mezzo: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"mezzo {verb}: interrupted")
        return 130
    except BrokenPipeError:
        if sys.stdout is sys.__stdout__ and sys.stdout is not None:  # discard what is still buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(verb: str, words: list[str]) -> int:
    module: ModuleType = importlib.import_module(f"mezzo.cli.{verb.replace('-', '_')}")
    parser = Parser(f"mezzo {verb}", module.__doc__ or "")
    module.configure(parser)
    parser.words = words
    try:
        if verb in RUN_A_SCRIPT:
            arguments = parser.parse_with_script(words, owns_rest=verb == "run")
        elif verb == "doctor":  # has a positional in an exclusive group, which argparse can't intermix
            arguments = parser.parse_args(words)
        else:
            arguments = parser.parse_intermixed_args(words)
    except SystemExit:  # argparse has printed its help
        return 0
    return int(module.run(arguments))


def _help() -> str:
    verbs = "\n".join(f"  {name:<12}{summary}" for name, summary in VERBS.items())
    return help_text(
        "mezzo: train in bf16 or fp16 instead of FP32, and check that it did no harm\n\n"
        f"usage: mezzo COMMAND [...]\n\n{verbs}\n\n"
        "Start here:\n"
        "  mezzo doctor                              which precision suits this machine\n"
        "  mezzo compare --demo digits --seeds 1     a first comparison, on small data\n"
        "  mezzo compare --precision bf16 train.py   the same for your script, unchanged\n"
        "  mezzo run --precision bf16 train.py       train your script in bf16\n\n"
        "Exit status: 0 success; 1 a finding (for example, a candidate is worse than FP32); 2 wrong usage, or a\n"
        "script that fails or never trains; 130 interrupted. `mezzo run` ends with the status of the script.\n\n"
        "`mezzo COMMAND --help` explains a command and has examples."
    )


if __name__ == "__main__":
    sys.exit(main())
