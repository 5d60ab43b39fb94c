"""Run a training script in mixed precision, without a change to it.

  mezzo run train.py --epochs 3                     the precision that this machine is good at
  mezzo run --precision fp16 train.py --epochs 3    fp16, with loss scaling
  mezzo run --precision bf16,masters=split train.py bf16 weights with exact masters: 14 bytes a parameter
  mezzo run --watch train.py --epochs 3             and look at the exponents of all it computes: a report
  mezzo run -m package.train --epochs 3             as after python -m

What follows the script's name belongs to the script. It runs as it does under python: the same arguments,
the same output, the same exit status; a few lines on stderr at the end say what ran in which precision, and
in fp16 where each value came from that was not finite.

Exit status: the script's own, whether it trains or not; 1 if it raises, 130 after an interrupt, 2 where nothing could
be run (no such script or module, a wrong policy, records or events that can't be written) or a module pattern of the
policy matches nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.pytorch.run.session import checked
from mezzo.pytorch.run.session import run as run_request
from mezzo.runner.lifecycle import RunRequest

_FOLDER = Path("mezzo-run")
_RECORDS = Path("runs") / "run.jsonl"
_OURS = ("runs", "report.html")
_DEFAULT = "default"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options. All that follows the script is its own."""
    parser.usage = "mezzo run [OPTIONS] (SCRIPT | -m MODULE) [ARGS...]"
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--precision",
        metavar="P",
        help="auto (default), bf16, fp16, fp8, tf32, fp32, or a policy: bf16,op.softmax=lower or bf16,masters=split",
    )
    which.add_argument(
        "--policy", metavar="FILE", dest="precision", type=_toml, help="a policy in a TOML file"
    )
    parser.add_argument(
        "--watch",
        metavar="N",
        type=_interval,
        nargs="?",
        const=-1,
        default=0,
        help="--watch, or --watch=N: look at the exponents of weights, activations, gradients and updates, by module, "
        "at the first update and every Nth after it (default 100)",
    )
    parser.add_argument(
        "--no-trace",
        action="store_true",
        help="do not look into skipped steps for where their NaN or infinity came from (fp16)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for the run's records and a report made from them; a run that it holds is replaced (default with "
        f"--watch: {_FOLDER}, or {_FOLDER}-2 and so on if that holds something)",
    )
    where.add_argument(
        "--records", metavar="FILE", type=Path, help="write the run's records here, as JSON lines"
    )
    parser.add_argument(
        "--tensorboard", metavar="DIR", type=Path, help="write the records as TensorBoard events, too"
    )
    parser.add_argument("--observe", action="store_true", help="watch one early step: memory, formats of ops")
    parser.add_argument("--quiet", action="store_true", help="no summary at the end")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")
    valued = {word for action in parser._actions if action.nargs is None for word in action.option_strings}
    parse = parser.parse_known_args

    def parse_known_args(words: Sequence[str], namespace: Any = None) -> Any:
        """A bare ``--watch`` does not take the script's name for its interval."""
        words, at = list(words), 0
        while at < len(words) and words[at].startswith("-"):
            if words[at] == "--watch":
                words[at] = f"--watch={_DEFAULT}"
            at += 2 if words[at] in valued else 1
        return parse(words, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]


def _toml(text: str) -> str:
    if not text.endswith(".toml"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a TOML file. Give one, or use --precision")
    return text


def _interval(text: str) -> int:
    if text == _DEFAULT:
        return -1
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of updates. Write --watch, or --watch=50")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; its exit status is ours."""
    if not arguments.command:
        raise UsageError(
            "no script was given. Write: mezzo run SCRIPT [ARGS...], or mezzo run -m MODULE [ARGS...]"
        )
    target, *argv = arguments.command
    if arguments.watch == -1 and target.isdigit() and not (arguments.module or Path(target).exists()):
        raise UsageError(
            f"no script {target!r} in {os.getcwd()}. For every {target}th update write --watch={target}, in one word."
        )
    rank = _number("RANK", 0)
    request = RunRequest(
        target=target,
        argv=tuple(argv),
        is_module=arguments.module,
        policy=arguments.precision or "auto",
        records=arguments.records,
        observe=arguments.observe,
        summary=not arguments.quiet,
        watch=arguments.watch,
        trace=not arguments.no_trace,
        # The script may change the working directory; of several processes one is enough.
        tensorboard=None if arguments.tensorboard is None or rank else arguments.tensorboard.absolute(),
    )
    if arguments.out is None and (not arguments.watch or arguments.records is not None):
        return run_request(request)
    checked(request)  # before anything of an earlier run is touched
    folder, note = _folder(arguments.out)
    with ExitStack() as lock:
        records = _prepared(folder, rank, lock)
        if note and rank == 0 and not arguments.quiet:
            print(f"mezzo: {note}", file=sys.stderr)
        report = folder / "report.html" if rank == 0 else None
        status = run_request(replace(request, records=records, report=report))
    if rank == 0:
        from mezzo.cli.report import page
        from mezzo.report import build_run

        made = page(build_run, folder)  # if that fails, the script's status stands
        if made is not None and not arguments.quiet and status == 0:  # after a failure it is printed already
            print(f"mezzo: report: {made}", file=sys.stderr)
    return status


def _number(name: str, absent: int) -> int:
    """A number that torchrun gives each process: its RANK, the WORLD_SIZE."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else absent


def _ranks() -> int:
    """How many processes share this run; more than any where only their RANK is known."""
    return _number("WORLD_SIZE", sys.maxsize if "RANK" in os.environ else 1)


def _folder(out: Path | None) -> tuple[Path, str]:
    """The run's folder as an absolute path (the script may change the working directory), and a note.

    Without `out` it is a new one, or an empty one; several processes of one run share it.
    """
    folder, number = out or _FOLDER, 1
    if out is None and _ranks() == 1:
        while os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
            number += 1
            folder = _FOLDER.with_name(f"{_FOLDER}-{number}")
    note = f"{_FOLDER} holds something already, so this run is in {folder}" if number > 1 else ""
    folder = folder.absolute()
    if os.path.exists(folder / _RECORDS):
        note = f"the run that {folder} held is replaced by this one (another --out keeps both)"
    return folder, note


def _prepared(folder: Path, rank: int, lock: ExitStack) -> Path:
    """The file for this process's records, in the folder, which the first rank locks until `lock` ends."""
    from mezzo.compare.folder import check_ours, locked, writing

    with writing(folder):
        check_ours(folder, _OURS, str(_RECORDS))
        if rank == 0:
            lock.enter_context(locked(folder))
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (folder / "report.html").unlink(missing_ok=True)  # of other records
            # Records of a run on more processes; ours are in use.
            for old in (folder / "runs").glob("run-rank*.jsonl"):
                number = old.stem.removeprefix("run-rank")
                if number.isdigit() and int(number) >= _ranks():
                    old.unlink()
    return folder / (_RECORDS if rank == 0 else _RECORDS.with_name(f"run-rank{rank}.jsonl"))
