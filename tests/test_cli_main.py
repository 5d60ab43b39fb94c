"""The command line: help, version, unknown commands, and the exit status of every way a command can end."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

import mezzo
from commands import Command, in_the_folder  # noqa: F401
from mezzo.cli.arguments import Parser
from mezzo.cli.main import RUN_A_SCRIPT, VERBS, main
from mezzo.core.commands import columns, folded
from mezzo.core.errors import MezzoError, UsageError


@pytest.mark.parametrize("words", ["", "--help", "help"])
def test_help_names_every_command(words: str, command: Command) -> None:
    ended = command(words)
    assert (ended.status, ended.err) == (0, "")
    printed = " ".join(ended.out.split())
    assert all(f" {name} {summary}" in printed for name, summary in VERBS.items())


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mezzo", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"mezzo {mezzo.__version__}\n"


@pytest.mark.parametrize("name", VERBS)
def test_every_command_has_its_own_help(name: str, command: Command) -> None:
    ended = command(f"{name} --help")
    assert ended == command(f"help {name}")
    assert ended.status == 0
    assert f"usage: mezzo {name}" in ended.out
    assert ended.out.count("\n") > 8
    if name in RUN_A_SCRIPT - {"run"}:  # and run's script may have a --help of its own
        assert f"usage: mezzo {name}" in command(f"{name} tiny.py train.py -h").out


ENDS = [
    (0, 0, ""),
    (1, 1, ""),
    (UsageError("write it so"), 2, "mezzo formats: write it so\n"),
    (MezzoError("it failed"), 2, "mezzo formats: it failed\n"),
    (KeyboardInterrupt(), 130, "mezzo formats: interrupted\n"),
    (BrokenPipeError(), 0, ""),
    (ZeroDivisionError(), None, ""),  # a bug is not the user's error
]


@pytest.mark.parametrize(("end", "status", "error"), ENDS, ids=repr)
def test_exit_statuses(
    end: Any, status: int | None, error: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: Any) -> int:
        if isinstance(end, BaseException):
            raise end
        return int(end)

    monkeypatch.setattr("mezzo.cli.formats.run", run)
    if status is None:
        with pytest.raises(type(end)):
            command("formats")
    else:
        ended = command("formats")
        assert (ended.status, ended.err) == (status, error)


def test_a_command_may_close_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.cli.formats.run", lambda arguments: 0)
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["formats"]) == 0


def test_python_dash_m_and_a_reader_that_leaves_early() -> None:
    numbers = ["1/3"] * 200  # more than a pipe holds
    command = [sys.executable, "-m", "mezzo", "formats", "--json", "show", *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "{\n"
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait() == 0


# Every complaint ends with what to write instead, and with status 2.

AFTER = "go after --: mezzo {} train.py -- --epochs 3\n"
SIZES = "batch-size train.py --vary=--batch"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 --no-python"
WRONG: list[tuple[str, str]] = [
    ("compair", "Did you mean 'compare'?"),
    ("formats --no-such-option", "usage: mezzo formats"),
    ("calibrate train.py --steps x", "'x' is not an integer (the number of updates). Example: 20"),
    ("compare train.py --metric-margin x", "'x' is not a number. Example: 0.2"),
    ("compare train.py --metric (", "Example: --metric 'accuracy: ([0-9.]+)'"),
    ("compare .", "'.' is a directory without a __main__.py"),
    ("compare train.py --margin x", "'x' is not a number. Examples: 0.005 or 0.5%"),
    (
        "compare train.py --margin 200%",
        "'200%' is not a share of the loss between 0 and 1. Examples: 0.005 or 0.5%",
    ),
    ("compare train.py --seeds many", "'many' is not an integer (the number of pairs). Example: 3"),
    ("batch-size train.py --vary=--b --start x", "'x' is not an integer. Example: 8"),
    ("batch-size train.py --vary --batch", "mezzo batch-size train.py --vary=--batch\n"),
    ("batch-size --vary --batch train.py -- --epochs 1", " --vary=--batch train.py -- --epochs 1\n"),
    ("batch-size train.py --vary", "--vary: expected one argument\n"),
    ("compare --metric --seeds 3 train.py", "--metric: expected one argument\n"),
    (
        "compare --margin -1% train.py",
        "--margin: '-1%' is not a share of the loss between 0 and 1. Examples: ",
    ),
    ("batch-size train.py --batch 8", "mezzo batch-size train.py --vary=--batch"),
    ("run --seeds 3 train.py", "an option of mezzo compare"),
    (
        "run --nproc 2 --precision bf16 train.py --x",
        f": {TORCHRUN} mezzo run --precision bf16 train.py --x\n",
    ),
    ("run --nproc=2 train.py -- --x", f": {TORCHRUN} mezzo run train.py --x\n"),
    ("calibrate --nproc 2 train.py", "an option of mezzo compare"),
    ("run --lr 3 --precision bf16 train.py", "Mezzo: --lr 3. "),
    ("run --lr 3 --precision bf16 -m train --x", ": mezzo run --precision bf16 -m train -- --lr 3 --x\n"),
    (
        "compare --lr 3 --seeds 2 train.py --json -- --x",
        ": mezzo compare --seeds 2 train.py --json -- --lr 3 --x\n",
    ),
    ("compare --demo digits --lr 3 --seeds 2", ": mezzo compare --demo digits --seeds 2 -- --lr 3\n"),
    ("run --epochs 3 train.py", "mezzo run train.py -- --epochs 3"),
    ("run --precision bf16 --precision fp16 train.py", "given twice (bf16, fp16)"),
    ("run --precision bf16 --quiet --policy=fp16 train.py --x", " run --quiet --policy=fp16 train.py --x\n"),
    ("run --masters split --own off train.py", ": mezzo run --masters split train.py\n"),
    ("run --masters split --own off train.py", "--own off --precision bf16,masters=split"),
    ("run --masters split --precision fp16 train.py", " --own off --precision fp16,masters=split train.py\n"),
    ("run --masters split --watch train.py", ": mezzo run --masters split train.py\n"),
    ("--precision bf16 train.py", "mezzo run --precision bf16 train.py\n"),
    ("train.py --epochs 3", "mezzo run train.py --epochs 3"),
    *((f"{verb} train.py --epochs 3", AFTER.format(verb)) for verb in ("calibrate", "compare")),
    (
        "compare --seeds 3 --precision bf16 train.py --precision=bf16 --seeds 5 --epochs 3",
        ": mezzo compare --seeds 3 --precision bf16 train.py -- --precision=bf16 --seeds 5 --epochs 3. For Mezzo: "
        "mezzo compare --precision=bf16 --seeds 5 train.py -- --epochs 3\n",
    ),
    ("compare train.py --presicion=bf16", "Did you mean --precision?"),
    ("compare", "SCRIPT, --demo NAME and -m MODULE; received none"),
    ("compare train.py --demo digits", "received train.py, digits"),
    ("compare --demo digit", "Use one of digits, text-gpt. Did you mean 'digits'?"),
    ("compare missing.py", "no script 'missing.py'"),
    ("tune train.py", "mezzo calibrate train.py"),  # a command of 0.1.0
    ("reproduce", "make reproduce"),
    ("compare train.py --precision bf61", "Did you mean 'bf16'?"),
    ("compare train.py --precision none.toml", "none.toml"),
    ("calibrate train.py --precision fp17", "unknown format 'fp17'"),
    ("batch-size --vary=--batch", "received none"),
    ("batch-size train.py -m x --vary=--batch", "received train.py, x"),
    ("batch-size train.py", "--vary is missing"),
    ("batch-size train.py --vary=batch", "--vary=batch_size= (key=value)"),
    ("batch-size train.py --vary={}", "no argument of the script contains {}"),
    (f"{SIZES} --precision bf61", "Did you mean 'bf16'?"),
    (f"{SIZES} --precision auto", "Name one, such as bf16"),
    (f"{SIZES} --limit 4giga", "--limit '4giga' is not a number of bytes"),
    (f"{SIZES} --steps 8", "argument --steps: '8' is below the minimum of 9. Example: 24"),
    (
        f"{SIZES} --start 8 --max 4",
        "max_size=4: needs 1 <= start <= max_size, integers as 8, 64 (--start 8 --max 64)",
    ),
    ("doctor A100", "mezzo doctor --gpu A100"),
]


@pytest.mark.parametrize(("words", "mend"), WRONG)
def test_wrong_usage_says_what_to_write(words: str, mend: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    ended = command(words)
    assert (ended.status, ended.out) == (2, "")
    assert mend in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


FOLDED = [
    "doctor --gpu H100",
    "doctor --gpu T5",
    "doctor train.py",
    "formats nvfp4-plain",
    "formats show 1/3",
    "compair",
    "compare train.py --epochs 3",
    "run --masters split --precision bf16 train.py",
    "report missing",
    "migrate missing.py",
]


@pytest.mark.parametrize("words", FOLDED)
def test_text_is_folded_to_a_terminal_except_for_commands_and_not_folded_in_a_pipe(
    words: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("from torch import autocast\nwith autocast('cuda'):\n    pass\n")
    monkeypatch.setenv("COLUMNS", "200")
    piped = command(words)
    monkeypatch.setenv("COLUMNS", "70")
    assert command(words) == piped
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    shown = command(words)
    assert shown.status == piped.status
    text, lines = piped.out + piped.err, shown.out + shown.err
    assert lines.split() == text.split()
    wide = [line.strip() for line in lines.splitlines() if len(line) > 70]
    assert all(line.startswith("mezzo ") and f": {line}" in text for line in wide)


def test_the_width_is_that_of_the_terminal_although_stdout_is_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 53, 0, 0))
    with open(ours, "rb"), open(theirs, "w") as terminal:
        assert columns(terminal) == 53
        monkeypatch.setenv("COLUMNS", "90")
        assert columns(terminal) == 90
    assert columns(io.StringIO()) is columns(None) is None


# What is folded, to 30 columns; the lines.
LINES = {
    "One sentence. To run it: mezzo run --precision bf16 train.py. The rest is folded, too.": [
        "One sentence. To run it:", "  mezzo run --precision bf16 train.py.", "  The rest is folded, too.",
    ],
    "unknown: --steps. Every option: mezzo formats --help": [
        "unknown: --steps. Every", "  option: mezzo formats --help",
    ],
    "In a call, mezzo.policy(one, two, three), and `some code of many words` alike": [
        "In a call,", "  mezzo.policy(one, two, three),", "  and", "  `some code of many words`", "  alike",
    ],
    "first       a cell of a table, which is folded": ["first       a cell of a table,", "            which is folded"],
    "Next:\n  mezzo compare --precision bf16 train.py -- --epochs 3\nEnd": [
        "Next:", "  mezzo compare --precision bf16 train.py -- --epochs 3", "End",
    ],
    "A command in code of two lines: mezzo run -c 'import os\nif True:\n    print(os.environ)' -x": [
        "A command in code of two", "  lines:", "  mezzo run -c 'import os", "if True:", "    print(os.environ)' -x",
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_lines_are_folded_around_commands_and_below_the_second_column(text: str) -> None:
    assert folded(text, 30).splitlines() == LINES[text]
    assert folded(text, None) == text


# Whether all words after the script are its own; the words; Mezzo's, the script, and its own.
ORDERS: list[tuple[bool, str, str, str | None, str]] = [
    *((rest, "--seeds 1 t.py --epochs 3", "--seeds 1", "t.py", "--epochs 3") for rest in (False, True)),
    *((rest, "t.py --seeds 1 -- --epochs 3", "--seeds 1", "t.py", "--epochs 3") for rest in (False, True)),
    *((rest, "--watch -- t.py --seeds 1", "--watch", "t.py", "--seeds 1") for rest in (False, True)),
    *((rest, "t.py -- --seeds 1 -- x", "", "t.py", "--seeds 1 -- x") for rest in (False, True)),
    (False, "t.py --seeds 1", "--seeds 1", "t.py", ""),
    (False, "--watch t.py --seeds=1", "--watch --seeds=1", "t.py", ""),
    (False, "--demo digits -- --epochs 3", "--demo digits", None, "--epochs 3"),
    (False, "-m p.train --seeds 1 -- x", "-m p.train --seeds 1", None, "x"),
    (True, "--watch t.py --seeds 1", "--watch", "t.py", "--seeds 1"),
    (True, "t.py --lr 1 --seeds 1 -- x", "", "t.py", "--lr 1 --seeds 1 -- x"),
]
# Words -> the command that is offered.
REFUSED = {
    "t.py --epochs 3": "mezzo it t.py -- --epochs 3",
    "--watch t.py --epochs 3 --seeds 1 a -- b": "mezzo it --watch t.py --seeds 1 -- --epochs 3 a b",
    "-m p.train --epochs 3": "mezzo it -m p.train -- --epochs 3",
    "--epochs 3 t.py": "mezzo it t.py -- --epochs 3",
    "--seeds 3 t.py --seeds 8": "mezzo it --seeds 3 t.py -- --seeds 8. For Mezzo: mezzo it --seeds 8 t.py",
    "--seeds 3 t.py a --lr 1 --seeds 8": "mezzo it --seeds 3 t.py -- a --lr 1 --seeds 8. "
    "For Mezzo: mezzo it --seeds 8 t.py -- a --lr 1",
    "--seeds 3 -m t a --seeds 8 -- b": "mezzo it --seeds 3 -m t -- a --seeds 8 b. "
    "For Mezzo: mezzo it -m t --seeds 8 -- a b",
    "--lr 1 --seeds 3 t.py --seeds 8": "mezzo it --seeds 3 t.py -- --lr 1 --seeds 8. "
    "For Mezzo: mezzo it --seeds 8 t.py -- --lr 1",
}


def parser_of_a_script() -> Parser:
    parser = Parser("mezzo it", "")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--watch", nargs="?", const=1)
    parser.add_argument("--demo")
    parser.add_argument("-m", dest="module")
    return parser


@pytest.mark.parametrize(("owns_rest", "words", "options", "script", "argv"), ORDERS)
def test_options_may_stand_on_either_side_of_the_script(
    owns_rest: bool, words: str, options: str, script: str | None, argv: str
) -> None:
    found = parser_of_a_script().parse_with_script(words.split(), owns_rest=owns_rest)
    assert (found.options, found.script, found.argv) == (options.split(), script, argv.split())


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_could_be_anybodys_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=f": {re.escape(REFUSED[words])}$"):
        parser_of_a_script().parse_with_script(words.split(), owns_rest=False)
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize("defined", ['"--seeds"', "'--seeds/--no-seeds'"])
def test_an_option_that_the_script_has_too_is_nobodys_until_it_is_said(defined: str, tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(f"parser.add_argument({defined})\nparser.add_argument('--watches')\n")
    for words in (f"{script} --seeds 1", f"--watch {script} --seeds=1"):
        with pytest.raises(UsageError, match="--seeds may be Mezzo's or that of "):
            parser_of_a_script().parse_with_script(words.split(), owns_rest=False)
    for words in (f"{script} --seeds 1 --", f"--seeds 1 {script}", f"{script} --watch"):
        assert not parser_of_a_script().parse_with_script(words.split(), owns_rest=False).argv


LOCKED: list[tuple[str, str]] = [
    ("run secret.py", "the script 'secret.py' can't be read. Check its permissions."),
    ("run locked/train.py", "no script 'locked/train.py' in "),
    ("run --out locked train.py", "Permission denied. Choose a writable folder"),
    ("run --records locked/r.jsonl train.py", "Permission denied. Give a writable file"),
    ("run --policy locked/p.toml train.py", "Permission denied. Give the path of a TOML file"),
    ("calibrate train.py --out locked/x", "Choose a writable folder with --out"),
    ("report locked", "locked/verdict.json: Permission denied. Check its permissions"),
]


@pytest.mark.parametrize(("words", "mend"), LOCKED)
def test_what_may_not_be_read_or_written_is_said(
    words: str, mend: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "secret.py").write_text("")
    (tmp_path / "secret.py").chmod(0)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    if os.access(locked, os.R_OK):
        pytest.skip("this user may read and write everything")
    try:
        ended = command(words)
    finally:
        locked.chmod(0o700)  # or pytest could not take it away
    assert ended.status == 2
    assert mend in ended.err


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("compare train.py", "Give a script that trains"),
        ("calibrate train.py", "mezzo.calibrate(model, loss_fn, batches)"),
        ("batch-size train.py --vary={} -- {}", "Let it train longer"),
    ],
)
def test_a_script_that_never_trains_is_status_2(
    words: str, mend: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('no training here')\n")
    ended = command(words)
    assert ended.status == 2
    assert mend in ended.err
