"""Recommend a format, a loss scale for fp16, and the modules that fp16 needs in FP32, from a few steps in FP32.

Mezzo measures the ranges of all numbers of the model, and shows them as histograms. It also ranks the modules by how
much rounding each of them to bf16, fp16 or fp8 would change the loss. With --precision fp8, mxfp8, fp8-block or nvfp4
it ranks the linear layers in that precision instead, and keeps the most sensitive in bf16.

The script is not changed. It starts once and ends after --steps updates, as by sys.exit. It writes its own files
(checkpoints, logs). Its own mixed precision, if it has one, is switched off.

Files in the folder: policy.toml (for --precision and mezzo.MixedPrecision), calibration.json with every histogram and
the whole ranking, report.html with the recommendation and the watched steps, and the run's records and output.

The recommendation is a starting point and has not been tried: gradients change over a run. mezzo compare tests it, and
shows whether it is faster.

Exit status: 0 a recommendation was written, 2 wrong usage, or a script that fails or never trains.

Examples:
  mezzo calibrate train.py
  mezzo calibrate train.py --steps 50 -- --epochs 3
  mezzo calibrate train.py --precision fp16          for another machine than this one
  mezzo calibrate train.py --precision nvfp4         which linear layers have to stay in bf16
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

import mezzo
from mezzo.cli.arguments import KERAS, add_target, folder_of, share, target_of, whole
from mezzo.cli.report import page
from mezzo.compare.folder import forget_run, locked, writing
from mezzo.compare.progress import Watcher
from mezzo.compare.request import ScriptRequest
from mezzo.compare.runs import LAUNCH, run_to_end, terminated_like_an_interrupt
from mezzo.core import records
from mezzo.core.calibration import FORMATS, RANKED, Recommendation, check_format, ranked_for, recommend
from mezzo.core.commands import DEFAULT_MARGIN, command, say
from mezzo.core.errors import ScriptError, UsageError
from mezzo.core.whole_file import write_whole
from mezzo.report import build_run

POLICY, RESULT = "policy.toml", "calibration.json"
RUN = "fp32-0"
"""Name of the watched run."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_target(parser)
    add, steps = parser.add_argument, whole("updates", 20, least=1)
    formats = ", ".join(FORMATS)
    add("--steps", type=steps, default=20, metavar="N", help="number of updates to watch (default 20)")
    add("--precision", metavar="P", help=f"recommend this format, whatever the hardware: {formats}")
    margin = "the change of the loss that all modules together may make, as a share of it: 0.005 or 0.5%% (the default)"
    add("--margin", type=share, default=DEFAULT_MARGIN, metavar="X", help=margin)
    add("--no-check", action="store_true", help=argparse.SUPPRESS)  # of 0.1.0: nothing is tried any more
    add("--out", metavar="DIR", help="the output folder (default mezzo-calibrate-SCRIPT)")
    add("--verbose", action="store_true", help="print all modules in all formats")
    add("--json", action="store_true", help="print calibration.json instead of the lines")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, print, and return the exit status."""
    target = target_of(arguments, "mezzo calibrate --demo digits")
    settings = arguments.steps, arguments.precision, arguments.margin, arguments.demo
    request = CalibrationRequest(target, tuple(arguments.argv), bool(arguments.module), *settings)
    folder = folder_of(arguments, "calibrate")
    found = calibrate_script(request, folder, Watcher(Console(stderr=True), quiet=arguments.json))
    report = page(build_run, folder)
    if arguments.json:
        print((folder / RESULT).read_text(encoding="utf-8"), end="")
        return 0
    advice, use = next_step(found, request, folder)
    made = [f"Report: {report}"] * (report is not None)
    lines = [*found.lines(arguments.verbose), "", *made, f"Next: {advice}:", f"  {use}"]
    if found.format == "bf16" and found.kept:  # which only fp16 needs
        lines += ["For the fp16 policy, with its FP32 modules:", f"  {request.in_fp16}"]
    say("\n".join(lines), out=True)
    return 0


@dataclass(frozen=True)
class CalibrationRequest(ScriptRequest):
    """A script, and how many of its updates are watched."""

    steps: int = 20
    format: str | None = None
    margin: float = DEFAULT_MARGIN
    demo: str | None = None  # its name, if the script is one

    def __post_init__(self) -> None:
        check_format(self.format)
        super().__post_init__()

    @property
    def in_fp16(self) -> str:
        """The command of the same calibration for fp16."""
        words = [f"--steps={self.steps}"] * (self.steps != type(self).steps)
        words += [f"--margin={self.margin}"] * (self.margin != DEFAULT_MARGIN)
        return command("calibrate", vars(self), *words, "--precision", "fp16")


def next_step(found: Recommendation, request: CalibrationRequest, folder: Path) -> tuple[str, str]:
    """What to do next, and its command."""
    if found.format == "fp32":
        return "calibrate for other hardware", request.in_fp16
    file = [str(folder / POLICY)] * (found.policy != found.format)
    names = [found.format, *file] if ranked_for(found.format) else file or [found.format]
    advice = "test it against FP32" + f", with {found.format} as it is" * (len(names) > 1)
    options = [word for name in names for word in ("--precision", name)]  # of which mezzo run takes the last
    stem = request.demo or (request.target if request.is_module else Path(request.target).resolve().stem)
    if Path(f"mezzo-compare-{stem}").exists():  # with other precisions, most probably
        options += ["--out", f"mezzo-compare-{stem}-calibrated"]
    return advice, command("compare", vars(request), *options)


def calibrate_script(request: CalibrationRequest, folder: Path, shown: Watcher) -> Recommendation:
    """Run the script in a child process, recommend, and write the folder's files anew."""
    with writing(folder), locked(folder), shown, terminated_like_an_interrupt():
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        for name in (POLICY, RESULT):
            (folder / name).unlink(missing_ok=True)
        forget_run(folder, RUN)
        shown.begin("fp32", 1, 1, request.steps)
        ranked = ranked_for(request.format)
        options = {"watch": 1, "watch_all": True, "sensitivity": True, "ranked": ranked, "trace": False}
        child = request.child(folder, RUN, "fp32", own="off", stop_after=request.steps, **options)
        finished, status = run_to_end(LAUNCH, child, shown)
        for setting in finished.switched_off:
            shown.say(f"switched off: the script's {setting}")
        if not finished.succeeded:
            raise ScriptError(
                f"{request.target} ended with exit status {status} in FP32. Its output ended:\n{finished.failure()}"
            )
        written = list(records.read(folder / "runs" / f"{RUN}.jsonl"))
        try:
            if not any(isinstance(record, records.RangesRecord) and record.rows for record in written):
                raise UsageError(
                    f"nothing to calibrate with: the script made {len(finished.updates)} updates, and none could be "
                    "watched. The script must train without torch.compile, with a torch optimizer whose step takes no "
                    "closure (SGD, Adam; not LBFGS). Otherwise call mezzo.calibrate(model, loss_fn, batches) in "
                    "Python, which needs no optimizer"
                )
            native = set(finished.machine.get("native_formats", ()))
            found = recommend(
                written, native=native, format=request.format, ranked=ranked or RANKED, margin=request.margin
            )
        except UsageError as error:
            if "keras" in finished.machine:
                raise ScriptError(f"{request.target} {KERAS.format('calibrate')} {request.target}") from error
            told = "".join(f" {note[0].upper()}{note[1:].rstrip('.')}." for note in finished.notes)
            raise ScriptError(f"{request.target}: {error}.{told}") from error
        write_whole(folder / POLICY, found.to_toml())
        result = {
            "schema": 1,
            "mezzo": mezzo.__version__,
            "request": asdict(request),
            "recommendation": json.loads(found.to_json()),
            "plain": found.plain,
            **dict(zip(("advice", "command"), next_step(found, request, folder))),
            "title": found.sensitivity.title(found.sensitivity.formats) if found.sensitivity else "",
            "table": found.sensitivity.table(found.sensitivity.formats) if found.sensitivity else [],
        }
        write_whole(folder / RESULT, json.dumps(result, indent=2, allow_nan=False) + "\n")
    return found
