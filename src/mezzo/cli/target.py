"""What a verb runs: a script, an embedded demo, or a module. The words for it, and what they name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from mezzo.core.errors import UsageError, unknown_name
from mezzo.demos import Demo


def add_target(parser: argparse.ArgumentParser, demos: Mapping[str, Demo]) -> None:
    """The words SCRIPT, --demo and -m."""
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

    Args:
        arguments: with the words of `add_target`.
        demos: those that the verb can run.
        example: a command that would be right, for the error.

    Raises:
        UsageError: none or several of the three. UnknownNameError: no such demo.
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
