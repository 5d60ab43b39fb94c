"""Calibration of a script: a few steps in FP32, watched; a recommendation; a few steps under it, to see that it holds.

Each is a child process that runs the unmodified script and is ended after so many updates. What is written::

    DIR/policy.toml        the recommended policy, a reason on each line
    DIR/calibration.json   all of it, with every histogram and the ranking of the modules
    DIR/report.html        the watched steps, module by module
    DIR/runs/              records and output of both runs
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mezzo
from mezzo.core import records
from mezzo.core.calibration import FORMATS, Recommendation, check_headroom, counted, recommend
from mezzo.core.errors import ScriptError, UsageError, unknown_name
from mezzo.core.finding import OUTSIDE, Finding
from mezzo.core.formats import named
from mezzo.core.patterns import is_pattern
from mezzo.core.scale_numbers import power_text
from mezzo.core.sensitivity import RANKED, rank
from mezzo.core.whole_file import write_whole
from mezzo.verify.folder import forget_run, locked, writing
from mezzo.verify.progress import Watcher
from mezzo.verify.request import ScriptRequest
from mezzo.verify.runs import LAUNCH, FinishedRun, run_to_end, terminated_like_an_interrupt

POLICY, RESULT = "policy.toml", "calibration.json"
WATCHED, CHECKED = "fp32-0", "recommended-0"
"""Names of the two runs."""

TRIALS = 3
"""How often a recommendation is tried, at most."""


@dataclass(frozen=True)
class CalibrationRequest(ScriptRequest):
    """What is calibrated.

    Args:
        steps: updates of the first optimizer that are watched, and again that are run under the recommendation.
        format: one of `FORMATS` to recommend it whatever this machine has; None: what is native here.
        headroom_bits: see `mezzo.core.calibration.recommend`.
        check: whether the recommendation is tried.

    Raises:
        UsageError: a number out of range, or no such script.
        UnknownNameError: no such format.
    """

    steps: int = 20
    format: str | None = None
    headroom_bits: int = 1
    check: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: give how many updates are watched, 1 or more")
        check_headroom(self.headroom_bits, "--headroom ")
        if self.format is not None and self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS, where="--precision: ")
        super().__post_init__()


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

    Where a trial shows that the loss scale was too large, the recommendation takes the scale that the trial ended with;
    where a module overflowed in it, the module is kept in FP32. Then it is tried again, `TRIALS` times in all. What
    failed the last of them is written as a policy that did.

    Args:
        request: what is calibrated.
        folder: where everything is written; made if need be.
        watcher: told of both runs; by default nothing is said.
        command: what runs a request's file, in place of `python -m mezzo.pytorch.launch` (for tests).

    Raises:
        ScriptError: the script fails, no update could be looked at, or no gradient is finite and not 0.
        UsageError: the folder can't be written.
    """
    runs = 2 if request.check else 1
    with writing(folder), locked(folder):
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        for name in (WATCHED, CHECKED):
            forget_run(folder, name)
        for name in (POLICY, RESULT):  # or a calibration that fails leaves another's recommendation
            (folder / name).unlink(missing_ok=True)
        with watcher or Watcher() as told, terminated_like_an_interrupt():
            run = _run(request, folder, WATCHED, "fp32", told, (1, runs), command, watch=1)
            found = recommendation_of(request, run, records.read(folder / "runs" / f"{WATCHED}.jsonl"))
            policy = folder / POLICY
            check = None
            for attempt in range(TRIALS if request.check else 0):
                write_whole(policy, found.to_toml(_head(found, None)))
                forget_run(folder, CHECKED)
                count = (2 + attempt, max(2 + attempt, runs))
                tried = _run(request, folder, CHECKED, str(policy.resolve()), told, count, command)
                check = check_of(tried, records.read(folder / "runs" / f"{CHECKED}.jsonl"))
                mended = None if attempt == TRIALS - 1 else _mended(found, check)
                if mended is None:
                    break
                found = mended
            write_whole(policy, found.to_toml(_head(found, check)))
            done = Calibrated(found, check)
            write_whole(folder / RESULT, done.to_json(request))
    return done


def _mended(found: Recommendation, check: Check) -> Recommendation | None:
    """What to try in place of a recommendation that failed its trial; None where it held, or nothing is known."""
    if check.holds:
        return None
    if check.alarms:
        known = {kept.module for kept in found.kept}
        further = {path: why for path, why in check.modules.items() if path not in known}
        if found.format != "fp16" or not further:
            return None
        return found.keeping(further)
    if not check.loss_finite:
        return None
    why = (
        f"from {power_text(found.start)}, {check.skipped} of {counted(check.steps)} overflowed: the scale "
        f"is what it then was, {power_text(check.scale)}. A gradient was larger than what was seen: "
        "one that the script clipped before the step, or a part of one that cancels"
    )
    return found.lowered(check.scale, why)


def _head(found: Recommendation, check: Check | None) -> str:
    """What the policy's file says of itself."""
    if check is not None and not check.holds:
        return f"FAILED ITS TRIAL by mezzo calibrate, not recommended: {check}."
    tried = "not tried" if check is None else f"tried: {check}"
    return f"Recommended by mezzo calibrate from {counted(found.steps)} in FP32; {tried}."


def recommendation_of(
    request: CalibrationRequest, run: FinishedRun, written: Sequence[records.Record] | Any
) -> Recommendation:
    """The recommendation from a watched run's records.

    Raises:
        ScriptError: no update was looked at, or there is no gradient in them to go by.
    """
    written = list(written)
    ranges = [record for record in written if isinstance(record, records.RangesRecord)]
    said = " ".join(run.ended.notes) if run.ended else ""
    if not any(record.rows for record in ranges):
        raise ScriptError(f"{request.target}: {_why_nothing(run)} {said}".rstrip())
    native = set(run.machine.get("native_formats", ()))
    try:
        found = recommend(ranges, native=native, format=request.format, headroom_bits=request.headroom_bits)
    except UsageError as error:
        raise ScriptError(
            f"{request.target}: {error}. Ranges are seen in the steps of a torch optimizer, over models that the "
            f"script calls outside of compiled functions. {said}".rstrip()
        ) from error
    measured = [record for record in written if isinstance(record, records.SensitivityRecord)]
    return replace(found, sensitivity=rank(measured, [named(name) for name in RANKED]))


def _why_nothing(run: FinishedRun) -> str:
    """Why no update was looked at, and how to mend it."""
    made = len(run.updates)
    if made:
        were = (
            "1 update was made, and it was not"
            if made == 1
            else f"{made} updates were made, and none of them was"
        )
        why = (
            f"{were} looked at. What an optimizer does in a step that takes a closure (LBFGS) is not seen, nor are "
            "models that run inside compiled functions. Calibrate the script with an optimizer whose step takes no "
            "closure (SGD, Adam) and without torch.compile"
        )
    else:
        why = (
            "no optimizer's step was seen. Ranges are seen in the steps of a torch optimizer: give a script, and "
            "arguments of its own after --, with which it trains"
        )
    return (
        f"nothing to calibrate with: {why}; or call mezzo.calibrate(model, loss_fn, batches) in a program of your own, "
        "which needs no optimizer."
    )


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
    child = request.child(
        folder,
        name,
        policy,
        watch=watch,
        watch_all=bool(watch),
        sensitivity=bool(watch),
        trace=not watch,
        stop_after=request.steps,
    )
    told.begin(name.removesuffix("-0"), *count, request.steps)
    run, status = run_to_end(command, child, told)
    if not run.succeeded:
        kind = "in FP32" if watch else f"under {policy}"
        raise ScriptError(
            f"{request.target} ended with exit status {status} {kind}. Its output ended:\n{run.failure()}"
        )
    return run


BY_THE_FORMAT = {"overflow": "overflowed in the trial", "invalid": "made NaN or infinity in the trial"}
"""Causes that a wider format can mend, for the same steps were finite in FP32; and what is told of their modules."""


@dataclass(frozen=True)
class Check:
    """What came of the recommended policy in a run of its own.

    Args:
        steps: updates that were made or skipped.
        skipped: those that were skipped.
        loss_finite: whether every loss was.
        scale: the loss scale after it.
        alarms: whether a step was skipped for another reason than the loss scale.
        findings: what was found out about the skips, a line for each that differs, with how many steps it was so.
        remedies: what to try, without repeats, those that keep a module in FP32 first.
        modules: those that a policy can name, in which a finite number became infinite or NaN; and which it was.
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


def check_of(run: FinishedRun, written: Iterable[records.Record]) -> Check:
    """The check from a run's updates and losses, and from all that it wrote."""
    overflows = [record for record in written if isinstance(record, records.OverflowRecord)]
    alarms = [record.finding for record in overflows if record.finding.alarms]
    last = run.updates[-1] if run.updates else None
    remedies = dict.fromkeys(remedy for finding in alarms for remedy in finding.remedies)
    return Check(
        steps=len(run.updates),
        skipped=sum(update.skipped for update in run.updates),
        loss_finite=all(math.isfinite(record.loss) for record in run.losses),
        scale=1.0 if last is None else last.loss_scale * (0.5 if last.skipped else 1.0),
        alarms=bool(alarms),
        findings=_lines(overflows),
        remedies=sorted(remedies, key=lambda remedy: "module." not in remedy),
        modules={one.module: BY_THE_FORMAT[one.cause] for one in reversed(alarms) if _can_be_kept(one)},
    )


def _lines(overflows: list[records.OverflowRecord]) -> list[str]:
    """A line for each finding that differs, in the order in which they came."""
    first = {record.finding.place: record for record in reversed(overflows)}
    counts = Counter(record.finding.place for record in overflows)
    return [
        f"{f'step {first[place].update}' if count == 1 else counted(count)}: {first[place].finding}"
        for place, count in counts.items()
    ]


def _can_be_kept(finding: Finding) -> bool:
    named = finding.module != OUTSIDE and is_pattern(finding.module)
    return named and finding.cause in BY_THE_FORMAT
