"""Run a training script in mixed precision, without a change to it.

  mezzo run train.py --epochs 3                     the precision that this machine is good at
  mezzo run --precision fp16 train.py --epochs 3    fp16, with loss scaling
  mezzo run --precision bf16,masters=split train.py bf16 weights with exact masters: 14 bytes a parameter
  mezzo run --watch train.py --epochs 3             and look at the exponents of all it computes: a report
  mezzo run -m package.train --epochs 3             as after python -m

What follows the script's name belongs to the script. It runs as it does under python: the same arguments,
the same output, the same exit status; a few lines on stderr at the end say what ran in which precision, and
in fp16 where each value came from that was not finite.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from mezzo.core.errors import MezzoError, UsageError
from mezzo.pytorch.launch.request import RunRequest
from mezzo.pytorch.launch.runner import run as run_request

_FOLDER = Path("mezzo-run")
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
    which.add_argument("--policy", metavar="FILE", help="a policy in a TOML file")
    parser.add_argument(
        "--watch",
        metavar="N",
        type=_interval,
        nargs="?",
        const=-1,
        default=0,
        help="--watch, or --watch=N: look at the exponents of weights, activations, gradients and updates, by module, "
        "at every Nth update",
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
        help=f"folder for the run's records and a report made from them (default with --watch: {_FOLDER})",
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
    parser.parse_known_args = functools.partial(  # type: ignore[method-assign,assignment]
        _parse, parser.parse_known_args, valued
    )


def _parse(
    parse: Callable[..., tuple[argparse.Namespace, list[str]]],
    valued: Collection[str],
    words: Sequence[str] | None = None,
    namespace: argparse.Namespace | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    """Parse, where a bare ``--watch`` does not take the script's name for its interval."""
    words = list(sys.argv[1:] if words is None else words)
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--watch":
            words[at] = f"--watch={_DEFAULT}"
        at += 2 if words[at] in valued else 1
    return parse(words, namespace)


def _interval(text: str) -> int:
    if text == _DEFAULT:
        return -1
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of updates. Write --watch, or --watch=50")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; its exit status is ours."""
    if not arguments.command:
        raise UsageError(
            "no script was given. Write: mezzo run SCRIPT [ARGS...], or mezzo run -m MODULE [ARGS...]"
        )
    policy = arguments.precision or "auto"
    if arguments.policy is not None:
        policy = arguments.policy
        if not policy.endswith(".toml"):
            raise UsageError(
                f"--policy {policy!r}: give a TOML file (its name ends in .toml), or use --precision"
            )
    target, *argv = arguments.command
    folder, records = arguments.out, arguments.records
    if arguments.watch and records is None and folder is None:
        folder = _FOLDER
    request = RunRequest(
        target=target,
        argv=tuple(argv),
        is_module=arguments.module,
        policy=policy,
        records=records,
        observe=arguments.observe,
        summary=not arguments.quiet,
        watch=arguments.watch,
        trace=not arguments.no_trace,
        # The script may change the working directory; of several processes one is enough.
        tensorboard=None if arguments.tensorboard is None or _rank() else arguments.tensorboard.absolute(),
    )
    if folder is None:
        return run_request(request)
    folder = folder.absolute()  # the script may change the working directory
    rank = _rank()
    status = run_request(replace(request, records=_prepared(folder, rank)))
    if rank == 0:
        _report(folder, quiet=arguments.quiet)
    return status


def _rank() -> int:
    """Which of the processes that torchrun started this is; 0 for one alone."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def _prepared(folder: Path, rank: int) -> Path:
    """The file for this process's records, in a folder that is ours.

    Raises:
        UsageError: the folder holds something else, or can't be made.
    """
    try:
        if folder.exists() and not (folder / "runs" / "run.jsonl").exists():
            strangers = sorted(
                p.name for p in folder.iterdir() if p.name not in _OURS and not p.name.startswith(".")
            )
            if strangers:
                raise UsageError(
                    f"--out {folder}: holds other files ({', '.join(strangers[:5])}). Name an empty or a new folder."
                )
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (folder / "report.html").unlink(missing_ok=True)  # it would tell of other records
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}. Name a folder that can be written.") from error
    return folder / "runs" / ("run.jsonl" if rank == 0 else f"run-rank{rank}.jsonl")


def _report(folder: Path, *, quiet: bool) -> None:
    """Make the report. The script has run: where that fails, it is said, and the script's status stands."""
    from mezzo.report import build_run

    try:
        page = build_run(folder)
    except (MezzoError, OSError) as error:
        print(f"mezzo: no report: {error}", file=sys.stderr)
        return
    if not quiet:
        print(f"mezzo: report: {page}", file=sys.stderr)
