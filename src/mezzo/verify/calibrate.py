"""Calibration of a script: a few steps in FP32, watched; a recommendation; a few steps under it, to see that it holds.

Each is a child process that runs the unmodified script and is ended after so many updates. What is written::

    DIR/policy.toml        the recommended policy, a reason on each line
    DIR/calibration.json   all of it, with every histogram
    DIR/report.html        the watched steps, module by module
    DIR/runs/              records and output of both runs
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mezzo
from mezzo.core import records
from mezzo.core.calibration import FORMATS, Recommendation, recommend
from mezzo.core.errors import ScriptError, UsageError, unknown_name
from mezzo.core.scale_numbers import power_text
from mezzo.pytorch.launch.request import RunRequest
from mezzo.verify.children import LAUNCH, run_child, terminated_like_an_interrupt
from mezzo.verify.finished import FinishedRun, read_run
from mezzo.verify.folder import forget_run, write_whole
from mezzo.verify.progress import Silent, Watcher

POLICY, RESULT = "policy.toml", "calibration.json"
WATCHED, CHECKED = "fp32-0", "recommended-0"
"""Names of the two runs."""

TRIALS = 3
"""How often a recommendation is tried, at most."""


@dataclass(frozen=True)
class CalibrationRequest:
    """What is calibrated.

    Args:
        target: the script's path, or a module's name where `is_module`.
        argv: the script's own arguments.
        steps: updates of the first optimizer that are watched, and again that are run under the recommendation.
        format: one of `FORMATS` to recommend it whatever this machine has; None: what is native here.
        headroom_bits: see `mezzo.core.calibration.recommend`.
        check: whether the recommendation is tried.

    Raises:
        UsageError: a number out of range, or no such script.
        UnknownNameError: no such format.
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False
    steps: int = 20
    format: str | None = None
    headroom_bits: int = 1
    check: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: give how many updates are watched, 1 or more")
        if self.headroom_bits < 0:
            raise UsageError(
                f"--headroom {self.headroom_bits}: give how many doublings gradients may still make, 0 or more"
            )
        if self.format is not None and self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS, where="--precision: ")
        if not self.is_module and not Path(self.target).exists():
            raise UsageError(f"script {self.target!r}: no such file. Give the path of a Python script.")


@dataclass(frozen=True)
class Check:
    """What came of the recommended policy in a run of its own.

    Args:
        steps: updates that were made or skipped.
        skipped: those that were skipped.
        loss_finite: whether every loss was.
        scale: the loss scale after it.
        alarms: whether a step was skipped for another reason than the loss scale.
        findings: what was found out about the skips.
    """

    steps: int
    skipped: int
    loss_finite: bool
    scale: float = 1.0
    alarms: bool = False
    findings: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no step was skipped and no loss was NaN or infinite."""
        return not self.skipped and self.loss_finite

    def __str__(self) -> str:
        skipped = f"{self.skipped} of {self.steps} steps skipped" if self.skipped else "no step skipped"
        loss = "every loss finite" if self.loss_finite else "a loss that is not finite"
        return f"{self.steps} steps under this policy: {skipped}, {loss}"


@dataclass(frozen=True)
class Calibrated:
    """A recommendation, and what came of it; None where it was not tried."""

    recommendation: Recommendation
    check: Check | None

    def to_json(self, request: CalibrationRequest) -> str:
        """All of it as one JSON document."""
        check = None if self.check is None else {**asdict(self.check), "holds": self.check.holds}
        whole: dict[str, Any] = {
            "schema": 1,
            "mezzo": mezzo.__version__,
            "request": asdict(request),
            "recommendation": json.loads(self.recommendation.to_json()),
            "check": check,
        }
        return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def calibrate_script(
    request: CalibrationRequest,
    folder: Path,
    *,
    watcher: Watcher | None = None,
    command: Sequence[str] = LAUNCH,
) -> Calibrated:
    """Run the script, recommend, try it, and write it down; what an earlier calibration wrote there is replaced.

    Where a trial shows that the loss scale was too large, the recommendation takes the scale that the trial ended with,
    and is tried again.

    Args:
        request: what is calibrated.
        folder: where everything is written; made if need be.
        watcher: told of both runs; by default nothing is said.
        command: what runs a request's file, in place of `python -m mezzo.pytorch.launch` (for tests).

    Raises:
        ScriptError: the script fails, or has no gradient to look at.
        UsageError: the folder can't be written.
    """
    runs = 2 if request.check else 1
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        for name in (WATCHED, CHECKED):
            forget_run(folder, name)
        with watcher or Silent() as told, terminated_like_an_interrupt():
            run = _run(request, folder, WATCHED, "fp32", told, (1, runs), command, watch=1)
            found = recommendation_of(request, run, records.read(folder / "runs" / f"{WATCHED}.jsonl"))
            policy = folder / POLICY
            write_whole(policy, found.to_toml())
            check = None
            for attempt in range(TRIALS if request.check else 0):
                if check is not None:
                    why = (
                        f"from {power_text(found.start)}, {check.skipped} of {check.steps} steps overflowed: the scale "
                        f"is what it then was, {power_text(check.scale)}. A gradient was larger than what was seen: "
                        "one that the script clipped before the step, or a part of one that cancels"
                    )
                    found = found.lowered(check.scale, why)
                    write_whole(policy, found.to_toml())
                    forget_run(folder, CHECKED)
                count = (2 + attempt, max(2 + attempt, runs))
                tried = _run(request, folder, CHECKED, str(policy.resolve()), told, count, command)
                check = _checked(tried, records.read(folder / "runs" / f"{CHECKED}.jsonl"))
                if check.holds or check.alarms or not check.loss_finite:
                    break
            done = Calibrated(found, check)
            write_whole(folder / RESULT, done.to_json(request))
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror or error}. Name a folder that can be written with --out."
        ) from error
    return done


def recommendation_of(
    request: CalibrationRequest, run: FinishedRun, written: Sequence[records.Record] | Any
) -> Recommendation:
    """The recommendation from a watched run's records.

    Raises:
        ScriptError: there is nothing in them to go by.
    """
    ranges = [record for record in written if isinstance(record, records.RangesRecord)]
    native = set(run.machine.get("native_formats", ()))
    try:
        return recommend(ranges, native=native, format=request.format, headroom_bits=request.headroom_bits)
    except UsageError as error:
        notes = " ".join(run.ended.notes) if run.ended else ""
        raise ScriptError(
            f"{request.target}: {error}. Ranges are seen in the steps of a torch optimizer, over models that the "
            f"script calls outside of compiled functions. {notes}".rstrip()
        ) from error


def _run(
    request: CalibrationRequest,
    folder: Path,
    name: str,
    policy: str,
    told: Watcher,
    count: tuple[int, int],
    command: Sequence[str],
    *,
    watch: int = 0,
) -> FinishedRun:
    """One child run to its end."""
    path = folder / "runs" / f"{name}.jsonl"
    asked = folder / "runs" / f"{name}.request.json"
    child = RunRequest(
        target=request.target,
        argv=request.argv,
        is_module=request.is_module,
        policy=policy,
        records=path.resolve(),
        summary=False,
        watch=watch,
        trace=not watch,
        stop_after=request.steps,
    )
    asked.write_text(child.to_json(), encoding="utf-8")
    told.begin(name.removesuffix("-0"), *count, request.steps)
    try:
        status = run_child((*command, str(asked)), path.with_suffix(".log"), path, told.steps)
    except BaseException:
        told.end("stopped")
        raise
    finally:
        asked.unlink(missing_ok=True)
    run = read_run(folder / "runs", name)
    told.end(f"{run.steps} steps" if run.succeeded else f"failed with exit status {status}")
    if not run.succeeded:
        kind = "in FP32" if watch else f"under {policy}"
        raise ScriptError(
            f"{request.target} ended with exit status {status} {kind}. Its output ended:\n{run.failure()}"
        )
    return run


def _checked(run: FinishedRun, written: Any) -> Check:
    overflows = [record for record in written if isinstance(record, records.OverflowRecord)]
    last = run.updates[-1] if run.updates else None
    return Check(
        steps=len(run.updates),
        skipped=sum(update.skipped for update in run.updates),
        loss_finite=all(math.isfinite(record.loss) for record in run.losses),
        scale=1.0 if last is None else last.loss_scale * (0.5 if last.skipped else 1.0),
        alarms=any(record.finding.alarms for record in overflows),
        findings=[f"step {record.update}: {record.finding}" for record in overflows],
    )
