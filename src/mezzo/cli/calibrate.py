"""Run a few steps of a training script in FP32, measure the ranges of its numbers, and recommend a format, a loss
scale for fp16, and the modules to keep in FP32 because fp16 can't hold their numbers, each with its histogram. Rank the
modules by how much rounding each to bf16, fp16 and fp8 would change the loss. Then run a few steps under the
recommendation. If the loss scale was too large or a module overflowed, correct that and try again, up to three times.

The script is not changed. It is started twice or more and ended after --steps updates, as by sys.exit. It writes its
own files (checkpoints, logs) each time.

Written to the folder: policy.toml (for mezzo run --policy and mezzo.MixedPrecision), calibration.json with every
histogram and the whole ranking, report.html with the watched steps, and the records and output of both runs.

Gradients change over a run, so this is where to start, and not a proof: mezzo compare proves.

Exit status: 0 the recommendation holds (or was not tried), 1 under it a step was skipped or a loss was not finite,
2 wrong usage, or a script that fails or never trains (no update could be looked at).

Examples:
  mezzo calibrate train.py
  mezzo calibrate train.py --steps 50 -- --epochs 3
  mezzo calibrate train.py --precision fp16          for another machine than this one
  mezzo calibrate --demo digits --json
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import mezzo
from mezzo.cli.arguments import add_target, folder_of, target_of, whole
from mezzo.cli.report import page
from mezzo.compare.folder import forget_run, locked, writing
from mezzo.compare.progress import Watcher, watcher
from mezzo.compare.request import ScriptRequest
from mezzo.compare.runs import LAUNCH, FinishedRun, run_to_end, terminated_like_an_interrupt
from mezzo.core import records
from mezzo.core.calibration import FORMATS, Recommendation, check_headroom, counted, recommend
from mezzo.core.errors import ScriptError, UsageError, unknown_name
from mezzo.core.formats import named
from mezzo.core.loss_scale import power_text
from mezzo.core.overflow import OUTSIDE
from mezzo.core.policy_text import is_pattern
from mezzo.core.sensitivity import RANKED, rank
from mezzo.core.whole_file import write_whole
from mezzo.demos import PYTORCH as DEMOS
from mezzo.report import build_run

PASSES_ON = True
"""What follows `--` is the script's."""

POLICY, RESULT = "policy.toml", "calibration.json"
WATCHED, CHECKED = "fp32-0", "recommended-0"
"""Names of the two runs."""

TRIALS = 3
"""How often a recommendation is tried, at most."""

BY_THE_FORMAT = {"overflow": "overflowed in the trial", "invalid": "made NaN or infinity in the trial"}
"""Causes that a wider format removes (the same steps were finite in FP32) -> the reason to keep the module in FP32."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_target(parser, DEMOS)
    add, steps = parser.add_argument, whole("updates", 20, least=1)
    formats = ", ".join(FORMATS)
    add("--steps", type=steps, default=20, metavar="N", help="updates that are watched (default 20)")
    add("--precision", metavar="P", help=f"recommend this format on any hardware: {formats}")
    add(
        "--headroom",
        type=whole("doublings", 1),
        default=1,
        metavar="BITS",
        help="doublings that the largest numbers may still make in the rest of the run, 0 to 15 (default 1)",
    )
    add("--no-check", action="store_true", help="do not try the recommendation")
    add("--out", metavar="DIR", help="the folder to write (default mezzo-calibrate-SCRIPT)")
    add("--json", action="store_true", help="print calibration.json instead of the lines")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, print, and return the exit status."""
    request = CalibrationRequest(
        target_of(arguments, DEMOS, "mezzo calibrate --demo digits"),
        tuple(arguments.argv),
        bool(arguments.module),
        arguments.steps,
        arguments.precision,
        arguments.headroom,
        not arguments.no_check,
    )
    folder = folder_of(arguments, "calibrate")
    progress = watcher(Console(stderr=True), quiet=arguments.json)
    found, check = calibrate_script(request, folder, progress=progress)
    report = page(build_run, folder)
    if arguments.json:
        print((folder / RESULT).read_text(encoding="utf-8"), end="")
    else:
        script = ["-m"] * request.is_module + [request.target, *request.argv]
        show(Console(), found, check, folder, report, script)
    return int(check is not None and not check.holds)


@dataclass(frozen=True)
class CalibrationRequest(ScriptRequest):
    """What is calibrated: `steps` are watched, and run again under the recommendation if `check`.

    Raises:
        UsageError: a headroom out of range, or no such script.
        UnknownNameError: no such format.
    """

    steps: int = 20
    format: str | None = None
    headroom_bits: int = 1
    check: bool = True

    def __post_init__(self) -> None:
        check_headroom(self.headroom_bits, "--headroom ")
        if self.format is not None and self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS, where="--precision: ")
        super().__post_init__()


@dataclass(frozen=True)
class Check:
    """The result of a run under the recommended policy.

    Args:
        steps: updates that were made or skipped.
        scale: the loss scale after it.
        alarms: whether a step was skipped for another reason than the loss scale.
        findings: a line for each place that made a step be skipped.
        remedies: what to try, those that keep a module in FP32 first.
        modules: modules in which a finite number became infinite or NaN, with the reason to keep each in FP32.
    """

    steps: int
    skipped: int
    loss_finite: bool
    scale: float = 1.0
    alarms: bool = False
    findings: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether no step was skipped and no loss was NaN or infinite."""
        return not self.skipped and self.loss_finite

    def __str__(self) -> str:
        skipped = f"{self.skipped} of {counted(self.steps)} skipped" if self.skipped else "no step skipped"
        loss = "every loss finite" if self.loss_finite else "a loss that is not finite"
        return f"{counted(self.steps)} under this policy: {skipped}, {loss}"


def calibrate_script(
    request: CalibrationRequest,
    folder: Path,
    *,
    progress: Watcher | None = None,
    command: Sequence[str] = LAUNCH,
) -> tuple[Recommendation, Check | None]:
    """Run the script in child processes, recommend, and try the recommendation `TRIALS` times at most.

    Writes `policy.toml`, `calibration.json` and `runs/` to the folder; those of an earlier calibration are deleted
    first. `command` runs a request's file.

    Raises:
        ScriptError: the script fails, no update could be watched, or no gradient is finite and not 0.
        UsageError: the folder can't be written.
    """
    policy, runs = folder / POLICY, 2 if request.check else 1
    with writing(folder), locked(folder), progress or Watcher() as shown, terminated_like_an_interrupt():
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        for name in (POLICY, RESULT):
            (folder / name).unlink(missing_ok=True)
        forget_run(folder, CHECKED)

        def one_run(
            index: int, name: str, policy: str, kind: str, **options: Any
        ) -> tuple[FinishedRun, list[records.Record]]:
            forget_run(folder, name)
            shown.begin(name.removesuffix("-0"), index, max(index, runs), request.steps)
            child = request.child(folder, name, policy, stop_after=request.steps, **options)
            finished, status = run_to_end(command, child, shown)
            if not finished.succeeded:
                raise ScriptError(
                    f"{request.target} ended with exit status {status} {kind}. Its output ended:\n{finished.failure()}"
                )
            return finished, list(records.read(folder / "runs" / f"{name}.jsonl"))

        options = {"watch": 1, "watch_all": True, "sensitivity": True, "trace": False}
        found = recommendation_of(request, *one_run(1, WATCHED, "fp32", "in FP32", **options))
        check = None
        for attempt in range(TRIALS if request.check else 0):
            write_whole(policy, found.to_toml(_head(found, None)))
            check = check_of(*one_run(2 + attempt, CHECKED, str(policy.resolve()), f"under {policy}"))
            better = None if attempt == TRIALS - 1 else _corrected(found, check)
            if better is None:
                break
            found = better
        write_whole(policy, found.to_toml(_head(found, check)))
        whole: dict[str, Any] = {
            "schema": 1,
            "mezzo": mezzo.__version__,
            "request": asdict(request),
            "recommendation": json.loads(found.to_json()),
            "check": None if check is None else {**asdict(check), "holds": check.holds},
        }
        write_whole(folder / RESULT, json.dumps(whole, indent=2, allow_nan=False) + "\n")
    return found, check


def _corrected(found: Recommendation, check: Check) -> Recommendation | None:
    """What to try after a recommendation failed its trial; None if it held, or no correction is known."""
    if check.holds:
        return None
    if check.alarms:
        known = {kept.module for kept in found.kept}
        further = {path: why for path, why in check.modules.items() if path not in known}
        return found.keeping(further) if found.format == "fp16" and further else None
    if not check.loss_finite:
        return None
    why = (
        f"from {power_text(found.start)}, {check.skipped} of {counted(check.steps)} overflowed: the scale "
        f"is what it then was, {power_text(check.scale)}. A gradient was larger than what was seen: "
        "one that the script clipped before the step, or a part of one that cancels"
    )
    return found.lowered(check.scale, why)


def _head(found: Recommendation, check: Check | None) -> str:
    """The first line of the policy's file."""
    if check is not None and not check.holds:
        return f"FAILED ITS TRIAL by mezzo calibrate, not recommended: {check}."
    tried = "not tried" if check is None else f"tried: {check}"
    return f"Recommended by mezzo calibrate from {counted(found.steps)} in FP32; {tried}."


def recommendation_of(
    request: CalibrationRequest, run: FinishedRun, written: Sequence[records.Record]
) -> Recommendation:
    """The recommendation from a watched run's records.

    Raises:
        ScriptError: no update was watched, or no gradient is finite and not 0.
    """
    ranges = [record for record in written if isinstance(record, records.RangesRecord)]
    notes = " ".join(run.ended.notes) if run.ended else ""
    if not any(record.rows for record in ranges):
        why = (
            f"{len(run.updates)} updates were made, and none could be watched. Steps that take a closure (LBFGS) and "
            "models inside compiled functions are not seen. Calibrate with an optimizer whose step takes no closure "
            "(SGD, Adam) and without torch.compile"
            if run.updates
            else "no optimizer's step was seen. Give a script that trains with a torch optimizer, with its own "
            "arguments after --"
        )
        raise ScriptError(
            f"{request.target}: nothing to calibrate with: {why}; or call mezzo.calibrate(model, loss_fn, batches) in "
            f"a program of your own, which needs no optimizer. {notes}".rstrip()
        )
    native = set(run.machine.get("native_formats", ()))
    try:
        found = recommend(ranges, native=native, format=request.format, headroom_bits=request.headroom_bits)
    except UsageError as error:
        raise ScriptError(f"{request.target}: {error}. {notes}".rstrip()) from error
    measured = [record for record in written if isinstance(record, records.SensitivityRecord)]
    return replace(found, sensitivity=rank(measured, [named(name) for name in RANKED]))


def check_of(run: FinishedRun, written: Iterable[records.Record]) -> Check:
    """The check from a run and all its records."""
    overflows = [record for record in written if isinstance(record, records.OverflowRecord)]
    alarms = [record.finding for record in overflows if record.finding.alarms]
    first = {record.finding.place: record for record in reversed(overflows)}
    counts = Counter(record.finding.place for record in overflows)
    last = run.updates[-1] if run.updates else None
    remedies = dict.fromkeys(remedy for finding in alarms for remedy in finding.remedies)
    return Check(
        steps=len(run.updates),
        skipped=sum(update.skipped for update in run.updates),
        loss_finite=all(math.isfinite(record.loss) for record in run.losses),
        scale=1.0 if last is None else last.loss_scale * (0.5 if last.skipped else 1.0),
        alarms=bool(alarms),
        findings=[
            f"{f'step {first[place].update}' if count == 1 else counted(count)}: {first[place].finding}"
            for place, count in counts.items()
        ],
        remedies=sorted(remedies, key=lambda remedy: "module." not in remedy),
        modules={
            one.module: BY_THE_FORMAT[one.cause]
            for one in reversed(alarms)
            if one.cause in BY_THE_FORMAT and one.module != OUTSIDE and is_pattern(one.module)
        },
    )


def show(
    console: Console,
    found: Recommendation,
    check: Check | None,
    folder: Path,
    report: Path | None,
    script: list[str],
) -> None:
    """Print a recommendation, a line each, with its histograms."""

    def line(label: str, value: str, style: str = "") -> None:
        # Never folded: a histogram that is cut in two is none.
        console.print(Text.assemble(f"{label:<13}", (value, style)), soft_wrap=True, highlight=False)

    failed = check is not None and not check.holds
    for label, value in found.rows():
        if failed and label == "keep in fp32" and not found.kept:
            value = "no module by what each of them returned in FP32; the trial saw inside them"
        line(label, value, "bold" if label == "policy" else "")
    if check is not None:
        line("checked", str(check), "bold red" if failed else "green")
        for finding in check.findings:
            line("", finding)
        for index, remedy in enumerate(check.remedies):
            line("" if index else "try", remedy)
    for note in found.notes:
        line("note", note, "dim")
    console.print()
    if report is not None:
        line("Report:", str(report))
    if failed:
        line("Not for use:", f"{folder / POLICY} failed its trial", "bold red")
    else:
        line("Use it:", shlex.join(["mezzo", "run", "--policy", str(folder / POLICY), *script]))
