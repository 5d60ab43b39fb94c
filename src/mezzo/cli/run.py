"""Run a training script in mixed precision, without changing it.

  mezzo run train.py --epochs 3                      auto: the precision that is fast on this machine
  mezzo run --precision bf16 train.py --epochs 3     bf16
  mezzo run --precision fp16 train.py --epochs 3     fp16, with loss scaling
  mezzo run --precision bf16,masters=split train.py  bf16 weights with exact FP32 masters: 14 bytes per parameter
  mezzo run --watch train.py --epochs 3              also record the exponents of all tensors, and write a report
  mezzo run --own off --precision bf16 train.py      switch the script's own mixed precision off, and use bf16
  mezzo run --masters split train.py                 exact FP32 masters for bf16 weights that the script makes
  mezzo run --apex train.py --epochs 3               for scripts of NVIDIA Apex: Mezzo's apex.amp

All words after the script's name are arguments of the script, unless a -- separates Mezzo's options from them. The
script runs as it does under python: same arguments, output and exit status. At the end a few lines on stderr say what
ran in which precision. In fp16 they also name the operation that produced the first NaN or infinity of a skipped step.

mezzo run is for PyTorch. For Keras, call mezzo.keras.set_policy("bf16") before the model is built.

Exit status: that of the script, also if every update was skipped; 1 after an exception, 130 after an interrupt; 2 if
nothing could be run (no such script, wrong policy, unwritable file) or a module pattern of the policy matches nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from mezzo.apex.imports import provided
from mezzo.cli.arguments import whole
from mezzo.core.commands import run_words, say
from mezzo.core.errors import UsageError
from mezzo.pytorch.run.session import checked
from mezzo.pytorch.run.session import run as run_request
from mezzo.runner.journal import of_rank
from mezzo.runner.lifecycle import RunRequest, of_torchrun, rank_here, ranks_here
from mezzo.runner.script import locate

_FOLDER = Path("mezzo-run")
_RECORDS = Path("runs") / "run.jsonl"
_OURS = ("runs", "report.html")
_EXCLUDE = {"masters", "precision"}, {"masters", "own"}, {"masters", "watch"}, {"out", "records"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options. All that follows the script is its own."""
    parser.usage = "mezzo run [OPTIONS] (SCRIPT | -m MODULE | -c CODE | -) [ARGS...]"
    add = parser.add_argument
    precision = "auto (default), bf16, fp16, fp8, tf32, fp32, or a policy: bf16,masters=split or policy.toml"
    add("--precision", metavar="P", help=precision)
    add("--policy", dest="precision", help=argparse.SUPPRESS)  # of 0.1.0
    watch = (
        "--watch, or --watch=N: record the exponents of weights, activations, gradients and updates, by module, "
        "at the first update and every Nth after it (default 100)"
    )
    add("--watch", metavar="N", type=whole("updates", 50, 1), nargs="?", const=-1, default=0, help=watch)
    no_trace = "do not search skipped steps for the origin of their NaN or infinity (fp16)"
    add("--no-trace", action="store_true", help=no_trace)
    where = parser.add_mutually_exclusive_group()
    out = (
        "folder for the run's records and their report; an earlier run in it is replaced (default with --watch: "
        f"{_FOLDER}, or {_FOLDER}-2 and so on if that is not empty)"
    )
    where.add_argument("--out", metavar="DIR", type=Path, help=out)
    file = "write the run's records to this file, as JSON lines (of several ranks: FILE-rank1 and so on)"
    where.add_argument("--records", metavar="FILE", type=Path, help=file)
    add("--tensorboard", metavar="DIR", type=Path, help="also write the records as TensorBoard events")
    observe = "measure one early step: its peak memory and the formats of its ops"
    add("--observe", action="store_true", help=observe)
    own = (
        "the script's own mixed precision: keep it and change nothing (default), or switch it off (torch.amp, "
        "Accelerate, Transformers, Lightning, conversions of models to 16 bits)"
    )
    add("--own", choices=("keep", "off"), default="keep", help=own)
    masters = (
        "keep the script's own precision, and give its 16-bit weights FP32 masters: split or split8 under AdamW, "
        "Adam, SGD and Muon (fp32 under any other optimizer), or fp32"
    )
    add("--masters", choices=("split", "split8", "fp32"), default="", help=masters)
    add("--quiet", action="store_true", help="print no summary at the end")
    apex = "let the script import Mezzo's apex.amp, with its own opt_level if --precision is not given"
    add("--apex", action="store_true", help=apex)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    kind.add_argument("-c", dest="code", action="store_true", help="run code, as python -c does")
    script = "the script, the module with -m, or the code with -c; - reads a script from standard input"
    add("script", nargs="?", metavar="SCRIPT", help=script)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; its exit status is ours."""
    target, argv, source, parser = arguments.script, arguments.argv, None, arguments.parser
    if not target:
        raise UsageError("no script was given. Example: mezzo run train.py, or mezzo run -m package.train")
    if arguments.watch == -1 and target.isdigit() and not (arguments.module or Path(target).exists()):
        raise UsageError(
            f"no script {target!r} in {os.getcwd()}. To watch every {target}th update: --watch={target}"
        )
    every = (parser.parse_args(item).precision for _, item in parser.items(arguments.options))
    if len(given := list(dict.fromkeys(filter(None, every)))) > 1:
        last = _with(arguments, argv)
        raise UsageError(f"--precision was given twice ({', '.join(given)}). To use the last one{last}")
    if arguments.masters:
        _check_masters(arguments)
    if arguments.code:
        target, source = "-c", target
    elif target == "-" and not arguments.module:
        source = sys.stdin.read()
    rank = rank_here() or 0
    if rank == 0 and argv:
        _tell_misplaced(arguments, source)
    records = arguments.records  # a name with the rank's number was made for it
    if records is not None and rank and str(rank) not in records.stem:
        records = of_rank(records, rank)
    request = RunRequest(
        target=target,
        argv=tuple(argv),
        is_module=arguments.module,
        source=source,
        nproc=of_torchrun(),
        policy="fp32" if arguments.masters else arguments.precision or "auto",
        own="record" if arguments.masters else arguments.own,
        records=records,
        summary=not arguments.quiet,
        trace=not arguments.no_trace,
        **{name: getattr(arguments, name) for name in ("masters", "observe", "watch", "apex")},
        # The script may change the working directory; of several processes one is enough.
        tensorboard=None if arguments.tensorboard is None or rank else arguments.tensorboard.absolute(),
    )
    instead = "" if request.policy == "auto" else request.policy
    with provided(instead) if arguments.apex else nullcontext():
        return _run(request, arguments, rank)


def _run(request: RunRequest, arguments: argparse.Namespace, rank: int) -> int:
    """The run, with its folder and report if they are wanted."""
    if arguments.out is None and (not arguments.watch or arguments.records is not None):
        return run_request(request)
    checked(request)  # before anything of an earlier run is touched
    folder, note = _folder(arguments.out)
    with ExitStack() as lock:
        records = _prepared(folder, rank, lock)
        if note and rank == 0 and not arguments.quiet:
            say(f"mezzo: {note}")
        report = folder / "report.html" if rank == 0 else None
        status = run_request(replace(request, records=records, report=report))
    if rank == 0:
        from mezzo.cli.report import page
        from mezzo.report import build_run

        made = page(build_run, folder)  # if that fails, the script's status stands
        if made is not None and not arguments.quiet and status == 0:  # after a failure it is printed already
            say(f"mezzo: report: {made}")
    return status


def _check_masters(arguments: argparse.Namespace) -> None:
    kept = f"--masters {arguments.masters} keeps the script's own precision"
    keep = _with(arguments, arguments.argv, "--masters", arguments.masters)
    if arguments.precision or arguments.own == "off":
        precision = f"{(arguments.precision or 'bf16').partition(',')[0]},masters={arguments.masters}"
        other = _with(arguments, arguments.argv, "--own", "off", "--precision", precision)
        raise UsageError(f"{kept}; --precision and --own off replace it. To keep it{keep}\nInstead{other}")
    if arguments.watch:
        raise UsageError(f"{kept}; --watch needs a precision of Mezzo's. To keep it{keep}")


def _with(arguments: argparse.Namespace, argv: list[str], *more: str) -> str:
    """The end of a sentence: the command with more options, after those that they replace."""
    words = [*arguments.options, *more]
    ours = arguments.parser.once(words, _EXCLUDE)
    items = [item for _, item in arguments.parser.items(words) if not {*item} <= {*ours}]
    left = " and ".join(dict.fromkeys(f"`{shlex.join(item)}`" for item in items))
    ours.sort(key=lambda word: word in ("-m", "-c"))
    script = [*ours, arguments.script, *["--"] * ("--" in argv), *argv]
    return f"{left and f', without {left}'}: {run_words(of_torchrun(), *script)}"


def _tell_misplaced(arguments: argparse.Namespace, source: str | None) -> None:
    """Warn of words that look like options of Mezzo's, but go to a script whose text does not mention them."""
    target = arguments.script
    text = source
    if text is None:
        text = Path(locate(target, is_module=arguments.module).file).read_text(errors="replace")
    # Any script may have a --help, an -m or a -c.
    mine, others = arguments.parser.split(arguments.argv, but_for=f"{text} --help -m -c")
    if mine:
        named = "the code" if arguments.code else target
        say(
            f"mezzo: `{shlex.join(mine)}` was passed to {named}, which does not mention it: words after the script's "
            f"name belong to the script. To give it to Mezzo{_with(arguments, others, *mine)}"
        )


def _folder(out: Path | None) -> tuple[Path, str]:
    """The run's folder as an absolute path (the script may change the working directory), and a note."""
    folder, number = out or _FOLDER, 1
    if out is None and ranks_here() == 1:
        while os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
            number += 1
            folder = _FOLDER.with_name(f"{_FOLDER}-{number}")
    note = f"{_FOLDER} is not empty, so this run is in {folder}" if number > 1 else ""
    folder = folder.absolute()
    if os.path.exists(folder / _RECORDS):
        note = f"this run replaces the one in {folder} (to keep both, choose another --out)"
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
            for old in (folder / "runs").glob("run-*.jsonl"):
                number = old.stem.removeprefix("run-rank")
                if not number.isdigit() or int(number) not in range(1, ranks_here()):
                    old.unlink()
    return folder / (of_rank(_RECORDS, rank) if rank else _RECORDS)
