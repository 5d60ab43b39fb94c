"""The tables of docs/commands.md: each command's arguments and options, as its parser has them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from mezzo.cli.arguments import Parser
from mezzo.cli.main import VERBS


def options(verb: str) -> Callable[[], str]:
    """A function that returns one command's table, with the texts of its ``--help``."""

    def table() -> str:
        parser = Parser(f"mezzo {verb}", "")
        importlib.import_module(f"mezzo.cli.{verb.replace('-', '_')}").configure(parser)
        lines = ["| option | what it does |", "|---|---|"]
        for action in parser._actions:
            if action.help and action.help != argparse.SUPPRESS and action.dest != "help":
                text = (action.help % vars(action)).replace("|", "\\|")
                lines.append(f"| {_spelled(action)} | {text} |")
        return "\n".join(lines)

    return table


def _spelled(action: argparse.Action) -> str:
    """An option as it is typed: ``--seeds N``."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ()))
    value = value.replace("|", "\\|") if isinstance(value, str) else ""
    optional = action.nargs == "?"
    return ", ".join(
        f"`{name}[={value}]`" if optional else f"`{name} {value}`".replace(" `", "`")
        for name in action.option_strings
    )


PARTS = {verb: options(verb) for verb in VERBS}
