"""The parser of a verb's words: argparse's, whose complaints end with what to write instead."""

from __future__ import annotations

import argparse
import difflib
import shlex
from typing import NoReturn

_UNKNOWN = "unrecognized arguments: "
_LACKS = "expected one argument"


class Parser(argparse.ArgumentParser):
    """argparse's parser, which shows a docstring as it is and takes no option that is cut short.

    Args:
        prog: as it stands in the usage, such as ``mezzo run``.
        description: what the verb is about.
        passes_on: whether what follows ``--`` belongs to a script.
    """

    def __init__(self, prog: str, description: str | None, *, passes_on: bool = False) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._passes_on = passes_on

    def error(self, message: str) -> NoReturn:
        """End with status 2, and with the mend where one is known."""
        super().error(message + self._mend(message))

    def _mend(self, message: str) -> str:
        if message.startswith(_UNKNOWN):
            return self._mend_unknown(shlex.split(message.removeprefix(_UNKNOWN)))
        if message.endswith(_LACKS):
            option = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
            return f". Write {option}=VALUE, all in one word where the value begins with a dash"
        return ""

    def _mend_unknown(self, words: list[str]) -> str:
        options = [option for action in self._actions for option in action.option_strings]
        for word in words:
            near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.7)
            if word.startswith("-") and near:
                return f". Did you mean {near[0]}?"
        if self._passes_on:
            return f". What belongs to the script goes after --: {self.prog} train.py -- {shlex.join(words)}"
        return f". `{self.prog} --help` has what it takes"
