"""What the commands' parsers share: error messages, the script that a command runs, and numbers in options."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from mezzo.core.errors import UsageError, unknown_name
from mezzo.demos import Demo

_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """argparse's parser, which prints docstrings unchanged, accepts no abbreviated option, and suggests fixes."""

    def __init__(self, prog: str, description: str | None, *, passes_on: bool = False) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._passes_on = passes_on

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; the message has the fix if one is known."""
        fix = ""
        if message.startswith(_UNKNOWN):
            fix = self._fix_unknown(shlex.split(message.removeprefix(_UNKNOWN)))
        elif message.endswith("expected one argument"):
            option = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
            fix = f". Write {option}=VALUE, all in one word where the value begins with a dash"
        super().error(message + fix)

    def _fix_unknown(self, words: list[str]) -> str:
        options = [option for action in self._actions for option in action.option_strings]
        for word in words:
            near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.7)
            if word.startswith("-") and near:
                return f". Did you mean {near[0]}?"
        if self._passes_on:
            return f". What belongs to the script goes after --: {self.prog} train.py -- {shlex.join(words)}"
        return f". `{self.prog} --help` has what it takes"


def add_target(parser: argparse.ArgumentParser, demos: Mapping[str, Demo]) -> None:
    """The words SCRIPT, --demo and -m."""
    parser.usage = parser.usage or (
        f"{parser.prog} (SCRIPT | --demo NAME | -m MODULE) [options] [-- SCRIPT'S OWN ARGUMENTS]"
    )
    parser.add_argument(
        "script", nargs="?", help="a training script: a path, or a directory with a __main__.py"
    )
    parser.add_argument(
        "--demo", metavar="NAME", help=f"an embedded demo in place of a script: {', '.join(sorted(demos))}"
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="a module in place of a script, as in python -m"
    )


def target_of(arguments: argparse.Namespace, demos: Mapping[str, Demo], example: str) -> str:
    """The script's path, or the module's name where `arguments.module` is given.

    `demos` are those that the verb can run; `example` is a right command, for the error.
    """
    given = [word for word in (arguments.script, arguments.demo, arguments.module) if word]
    if len(given) != 1:
        received = f"received {', '.join(given)}" if given else "received none"
        raise UsageError(
            f"give one of SCRIPT, --demo NAME and -m MODULE; {received}. For instance: {example}"
        )
    if not arguments.demo:
        return str(given[0])
    if arguments.demo not in demos:
        raise unknown_name("demo", arguments.demo, demos)
    return str(demos[arguments.demo].path)


def folder_of(arguments: argparse.Namespace, verb: str) -> Path:
    """The folder that --out names, or mezzo-VERB-SCRIPT."""
    stem = arguments.demo or arguments.module or Path(arguments.script).resolve().stem
    return Path(arguments.out or f"mezzo-{verb}-{stem}")


_Number = TypeVar("_Number", int, float)


def whole(what: str, example: int, least: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers, for `add_argument(type=...)`.

    `what` is counted, in the plural, or empty; `example` makes sense there; `least` is the smallest that is allowed.
    """
    read = _reader(int, f"whole number{what and f' of {what}'}: write one such as {example}")

    def read_at_least(text: str) -> int:
        if least is not None and read(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give {least} or more, such as {example}")
        return read(text)

    return read_at_least


def number(example: float) -> Callable[[str], float]:
    """A reader of numbers, for `add_argument(type=...)`; the example makes sense there."""
    return _reader(float, f"number: write one such as {example:g}")


def share() -> Callable[[str], float]:
    """A reader of shares: 0.005, or 0.5%."""

    def read(text: str) -> float:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)

    return _reader(read, "number: write 0.005 or 0.5%")


def _reader(read: Callable[[str], _Number], expected: str) -> Callable[[str], _Number]:
    def checked(text: str) -> _Number:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {expected}") from None

    return checked
