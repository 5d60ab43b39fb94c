"""What the commands' parsers share: the order of words, error messages, the script to run, and numbers in options."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mezzo.core.commands import folded, run_words, say
from mezzo.core.errors import UsageError, unknown_name
from mezzo.demos import DEMOS

KERAS = "trains with Keras. mezzo {} is for PyTorch; for Keras there is mezzo compare --framework keras"
_Number = TypeVar("_Number", int, float)
_UNKNOWN = "unrecognized arguments: "
OF_COMPARE = ("--seeds", "--metric", "--metric-better", "--metric-margin", "--margin", "--framework")


def help_text(text: str) -> str:
    """A docstring, its paragraphs folded to the terminal's width, or in a pipe as argparse folds its options."""
    paragraphs = re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text.strip())
    return folded(paragraphs, min(shutil.get_terminal_size().columns, 100), indent=0)


class Parser(argparse.ArgumentParser):
    """argparse's parser, which folds the text of docstrings, accepts no abbreviated option, and suggests fixes."""

    def __init__(self, prog: str, description: str) -> None:
        text, raw = help_text(description), argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=text, formatter_class=raw, allow_abbrev=False)
        self.words: Sequence[str] = ()  # as they were given

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; the message has the fix if one is known."""
        fix = ""
        if message.startswith(_UNKNOWN):
            fix = f".{self._near(message.removeprefix(_UNKNOWN).split())} Every option: {self.prog} --help"
        elif message.endswith("expected one argument"):
            option = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
            before, _, after = shlex.join(self.words).partition(f"{option} ")
            if after and (value := shlex.split(after)[0]) not in self._option_string_actions:
                fix = f". A value that begins with a dash is joined with =: {self.prog} {before}{option}={after}"
                reader: Any = self._option_string_actions[option].type or str
                try:
                    reader(value)
                except argparse.ArgumentTypeError as error:
                    message, fix = f"argument {option}: {error}", ""
        say(self.format_usage().rstrip())
        raise UsageError(message + fix)

    def parse_with_script(self, words: Sequence[str], *, owns_rest: bool) -> argparse.Namespace:
        """Parse ``[options] SCRIPT args`` or ``SCRIPT [options] -- args`` into `options`, `script` and `argv`.

        With `owns_rest` all words after SCRIPT are the script's, unless only Mezzo's options stand between it and a
        ``--``. Without it, other words than Mezzo's options are the script's only if no such option follows.
        """
        ours = [word for _, item in takewhile(lambda one: one[0], self.items(words)) for word in item]
        rest = list(words[len(ours) :])
        named = not owns_rest and any(word.startswith(("--demo", "-m")) for word in ours)
        cut = rest.index("--") if "--" in rest else None
        head, tail = rest[:cut], [] if cut is None else rest[cut + 1 :]
        if cut == 0:
            del rest[0]
        elif rest and not named and self._near(rest[:1]):
            self.error(f"{_UNKNOWN}{rest[0]}")
        elif rest and rest[0] in ("-", "-c") and not owns_rest:
            self.error(f"{rest[0]}: the code must be in a file. Save it as train.py: {self.prog} train.py")
        elif rest and (named or (rest[0].startswith("-") and rest[0] != "-")):
            found = (at for at, word in enumerate(head) if word[-3:] == ".py" or head[at - 1 : at] == ["-m"])
            at = 0 if named else next(found, 1)
            script = [] if named else head[at : at + 1] or ["train.py"]
            begin = at + len(script)
            end = begin if owns_rest else len(head)
            (mine, others), (after, more) = self.split(head[:at]), self.split(head[begin:end])
            tail = [*head[end:], *tail]
            self._refuse_both([*ours, *mine], script, [*others, *head[begin:end]], tail)
            self._refuse([*others, *more], [*ours, *mine, *script, *after], tail)
        elif rest:
            mine, others = self.split(head[1:])
            if owns_rest:
                mine = mine if cut is not None and not others else []
            elif others and (cut is not None or mine or not ours):
                self._refuse_both(ours, rest[:1], head[1:], tail)
                self._refuse(others, [*ours, rest[0], *mine], tail)
            elif cut is None:
                self._refuse_both(ours, rest[:1], mine)
            if mine or cut == 1:
                del rest[1 : 1 + len(mine) + (cut is not None)]
            ours += mine
        arguments = self.parse_args(ours)
        arguments.script = None if named or not rest else rest.pop(0)
        arguments.argv, arguments.options, arguments.parser = rest, ours, self
        return arguments

    def split(self, words: Sequence[str], but_for: str = "") -> tuple[list[str], list[str]]:
        """This parser's options with their values, without those in the text `but_for`; and all other words."""
        mine, others = list[str](), list[str]()
        for action, item in self.items(words):
            option, _, value = item[0].partition("=")
            lacks = action and action.nargs is None and not value and item[-1].startswith("-")
            is_mine = action and not (but_for and (lacks or option in but_for))
            (mine if is_mine else others).extend(item)
        return mine, others

    def items(self, words: Sequence[str]) -> Iterator[tuple[argparse.Action | None, list[str]]]:
        """Each option of this parser, with its value; and each other word, with None."""
        at = 0
        while at < len(words):
            option, _, value = words[at].partition("=")
            action: argparse.Action | None = self._option_string_actions.get(option)
            taken = 2 if action and action.nargs is None and not value else 1
            yield action, list(words[at : at + taken])
            at += taken

    def once(self, words: Sequence[str], exclude: Sequence[set[str]] = ()) -> list[str]:
        """The words with each option once: its last value, and the last of options that exclude each other."""
        kept = dict[str, list[str]]()
        for action, item in self.items(words):
            name = "=".join(item) if isinstance(action, (argparse._AppendAction, type(None))) else action.dest
            against = {name}.union(*(group for group in exclude if name in group))
            kept = {other: one for other, one in kept.items() if other not in against} | {name: item}
        return [word for item in kept.values() for word in item]

    def _refuse_both(
        self, ours: Sequence[str], script: Sequence[str], after: Sequence[str], more: Sequence[str] = ()
    ) -> None:
        """Refuse options after the script that it may have, too: its text has them, or Mezzo's came before it."""
        name = "".join(script)
        text = Path(name).read_text(errors="replace") if Path(name).is_file() else ""
        mine, others = self.split(after)
        for action, item in self.items(mine):
            option = item[0].partition("=")[0]
            if action in [one for one, _ in self.items(ours)] or re.search(rf"[\"']{option}[\"'/]", text):
                to_script = shlex.join([*ours, *script, "--", *after, *more])
                its = ["--", *others, *more] if others or more else []
                to_mezzo = shlex.join([*self.once([*ours, *mine]), *script, *its])
                self.error(
                    f"{option} may be Mezzo's or that of {name or 'the script'}. For the script: {self.prog} "
                    f"{to_script}. For Mezzo: {self.prog} {to_mezzo}"
                )

    def _near(self, words: Sequence[str]) -> str:
        """The option that was probably meant, as a question; empty if there is none."""
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        near = [difflib.get_close_matches(one, self._option_string_actions, 1, 0.8) for one in options]
        return next((f" Did you mean {one[0]}?" for one in near if one), "")

    def _refuse(self, unknown: Sequence[str], ours: Sequence[str], more: Sequence[str] = ()) -> NoReturn:
        if not {"-h", "--help"}.isdisjoint(ours):
            self.parse_args(["--help"])
        ours, text = self.once(ours), shlex.join([*unknown, *more])
        if self.prog == "mezzo run" and (ranks := re.match(r"--nproc[ =](\d+) ?", text)):
            launch = f"{run_words(ranks[1], *ours)} {text[ranks.end() :]}".rstrip()
            self.error(f"--nproc is an option of mezzo compare. mezzo run is started on each rank: {launch}")
        if unknown[0] in (*OF_COMPARE, "--nproc") and not self.prog.endswith("compare"):
            self.error(f"{unknown[0]} is an option of mezzo compare: mezzo compare --help")
        if "--vary" in self._option_string_actions and not any(word.startswith("--vary") for word in ours):
            varied = shlex.join([*ours, f"--vary={unknown[0]}"])
            self.error(f"--vary is missing. To try several values of {unknown[0]}: {self.prog} {varied}")
        command = f"{self.prog} {shlex.join([*ours, '--'])} {text}"
        given = f"not options of Mezzo: {shlex.join(unknown)}.{self._near(unknown)}"
        self.error(f"{given} Arguments of your script go after --: {command}")


def add_target(parser: argparse.ArgumentParser, needed: str = "") -> None:
    """The words SCRIPT, --demo and -m, and the usage, with the option that is `needed`."""
    target = "(SCRIPT | --demo NAME | -m MODULE) [-- SCRIPT'S ARGUMENTS]"
    parser.usage = f"{parser.prog} {needed}[options] {target}"
    script = "the training script: a path, or a directory with a __main__.py"
    parser.add_argument("script", nargs="?", help=script)
    demo = f"a demo that comes with Mezzo, instead of a script: {', '.join(sorted(DEMOS))}"
    parser.add_argument("--demo", metavar="NAME", help=demo)
    module = "a module instead of a script, as in python -m"
    parser.add_argument("-m", dest="module", metavar="MODULE", help=module)


def target_of(arguments: argparse.Namespace, example: str) -> str:
    """The script's path, or the module's name; `example` is a right command, for the error."""
    given = [word for word in (arguments.script, arguments.demo, arguments.module) if word]
    if len(given) != 1:
        got = ", ".join(given) or "none"
        raise UsageError(f"give one of SCRIPT, --demo NAME and -m MODULE; received {got}. Example: {example}")
    if not arguments.demo:
        return str(given[0])
    if arguments.demo not in DEMOS:
        raise unknown_name("demo", arguments.demo, DEMOS)
    return str(DEMOS[arguments.demo].path)


def folder_of(arguments: argparse.Namespace, verb: str) -> Path:
    """The folder that --out names, or mezzo-VERB-SCRIPT."""
    stem = arguments.demo or arguments.module or Path(arguments.script).resolve().stem
    return Path(arguments.out or f"mezzo-{verb}-{stem}")


def whole(what: str, example: int, least: int | None = None) -> Callable[[str], int]:
    """A reader of integers from `least`, for `add_argument(type=...)`; `what` is counted, in the plural, or empty."""

    def read(text: str) -> int:
        found = _read(int, text, f"an integer{what and f' (the number of {what})'}. Example: {example}")
        if least is not None and found < least:
            raise argparse.ArgumentTypeError(f"{text!r} is below the minimum of {least}. Example: {example}")
        return found

    return read


def number(text: str) -> float:
    """A number, for `add_argument(type=...)`."""
    return _read(float, text, "a number. Example: 0.2")


def share(text: str) -> float:
    """A share between 0 and 1, for `add_argument(type=...)`: 0.005, or 0.5%."""
    size, examples = 0.01 if text.endswith("%") else 1.0, "Examples: 0.005 or 0.5%"
    found = _read(lambda one: float(one.removesuffix("%")) * size, text, f"a number. {examples}")
    if not 0.0 < found < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the loss between 0 and 1. {examples}")
    return found


def _read(reader: Callable[[str], _Number], text: str, expected: str) -> _Number:
    try:
        return reader(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None
