"""The comparison: paired runs, one child process at a time, and their verdict.

The order of the precisions is reversed for each next seed, so a machine that becomes slower favors no precision.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mezzo.compare.answer import answer, metric_name, tf32_off
from mezzo.compare.folder import check_ours, forget_run, full, locked, prepare, writing
from mezzo.compare.judgement import Runs, last_error, verdict
from mezzo.compare.progress import Watcher
from mezzo.compare.request import BASELINE, FILE, FRAMEWORKS, PERTURBED, Request, own_masters, read_request
from mezzo.compare.runs import FinishedRun, read_run, run_to_end, terminated_like_an_interrupt
from mezzo.core.comparison import FEWEST_FOR_TOST
from mezzo.core.errors import MezzoError, ScriptError, UnsupportedPrecisionError, UsageError
from mezzo.core.records import file_name
from mezzo.core.whole_file import write_whole

KILLED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LEAST_SPACE = 1 << 20
_CAN_BE_OFF = re.compile(r"(autocast\w*|GradScaler|MixedPrecision) itself|16 parameters")  # by --own off
_READS_INPUT = re.compile(r"EOF when reading a line|\bstdin\b|\binput\(")
_IMPORTS_APEX = re.compile(r"(ModuleNotFound|Import)Error: .*\bapex\b")
_USAGE = 40  # lines: a script that was asked for its --help trains nothing


class _OwnPrecisionError(Exception):
    """The first FP32 run used a mixed precision of the script's, which later runs can switch off."""


class Planned(NamedTuple):
    """A run to be done: its name, precision and seed number, and whether it is the noise check."""

    name: str
    precision: str
    seed: int
    nudge: bool = False


def schedule(request: Request) -> list[Planned]:
    """Every run, in order: FP32 first, since it may fail by itself; then the order alternates.

    >>> request = Request("-m", is_module=True, precisions=("bf16", "fp16"), seeds=2)
    >>> [run.name for run in schedule(request)]
    ['fp32-0', 'bf16-0', 'fp16-0', 'fp32-ulp-0', 'fp16-1', 'bf16-1', 'fp32-1']
    """
    runs: list[Planned] = []
    for k in range(request.seeds):
        pair = [Planned(f"{file_name(name)}-{k}", name, k) for name in (BASELINE, *request.precisions)]
        runs += pair if k % 2 == 0 else reversed(pair)
        if k == 0:
            runs.append(Planned(f"{PERTURBED}-0", BASELINE, 0, nudge=True))
    return runs


def planned_runs(request: Request) -> str:
    """The script with its arguments; how many runs there will be, and why; how the metric is judged."""
    counts = ", ".join(f"{request.seeds} {name}" for name in ("FP32", *request.precisions))
    few = request.seeds < FEWEST_FOR_TOST
    tip = "a quick look: 3 or more seeds can prove more" if few else "--seeds 1 for a quick look"
    script = shlex.join([request.demo or request.target, *request.argv])
    ranks = "" if request.nproc is None else f" on {request.nproc} ranks"
    pairs = f"{request.seeds} pair{'s' * (request.seeds > 1)}: the same seed"
    if metric := request.how_metric:
        tip += f"\n{metric_name(metric.pattern)}: {'higher' if metric.higher else 'lower'} is better"
    return f"{script}\n{len(schedule(request))} runs{ranks}: {counts} ({pairs}), 1 FP32 as noise check; {tip}"


def compare(
    request: Request,
    folder: Path,
    *,
    fresh: bool = False,
    watcher: Watcher | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run what has not run yet, judge, write `verdict.json`, and return it. Finished runs in the folder are kept."""
    with writing(folder), terminated_like_an_interrupt():
        check_ours(folder)
        with locked(folder):
            request = request if fresh else _known(request, folder)
            resumed = prepare(folder, request, fresh=fresh)
            launch = tuple(command or request.launch)
            with watcher or Watcher() as told:
                told.say(planned_runs(request))
                if resumed:
                    told.say(f"finished runs in {folder} are kept")
                try:
                    runs = _run_all(request, folder, told, launch)
                except _OwnPrecisionError as own:
                    request = request.with_own(str(own))
                    prepare(folder, request)
                    told.say(
                        f"{request.target} has its own mixed precision: {own}. FP32 runs switch it off; the script "
                        f"as it is becomes the candidate own.\n{planned_runs(request)}"
                    )
                    runs = _run_all(request, folder, told, launch)
                found = verdict(request, runs)
                for name, one in found["candidates"].items():
                    one.update(answer(name, one, request, folder))
                found["notes"] = tf32_off(runs[BASELINE][0].notes, request, folder)
                write_whole(folder / "verdict.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
    return found


def _known(request: Request, folder: Path) -> Request:
    """The request, with the own precision of the same script that an earlier call found."""
    if not (folder / FILE).exists():
        return request
    before, now = read_request(folder / FILE), request.declared()
    same = all(before.get(key) == now[key] for key in ("target", "argv", "script_sha256"))
    return request.with_own(before["own"]) if same and before.get("own") else request


def _run_all(request: Request, folder: Path, told: Watcher, command: tuple[str, ...]) -> Runs:
    planned = schedule(request)
    runs: Runs = {}
    dropped: set[str] = set()  # precisions that need no more runs
    steps: int | None = None
    for index, plan in enumerate(planned, start=1):
        if plan.precision in dropped:
            continue
        run = _kept(folder, plan.name, told)
        if not run.succeeded:
            told.begin(plan.name, index, len(planned), steps)
            forget_run(folder, plan.name)
            masters = own_masters(plan.precision)
            own = "record" if masters is not None else "off" if request.own else "refuse"
            patterns = request.patterns if plan.precision == BASELINE else ()
            options = {"own": own, "masters": masters or "", "patterns": patterns, "nudge": plan.nudge}
            options |= {"seed_offset": plan.seed, "observe": not plan.nudge}
            policy = plan.precision if masters is None else BASELINE
            child = request.child(folder, plan.name, policy, **options)
            try:
                run, status = run_to_end(command, child, told)
            except BaseException:
                forget_run(folder, plan.name)
                raise
            _check(request, folder, plan, run, status)
        steps = steps or run.steps
        runs.setdefault(PERTURBED if plan.nudge else plan.precision, {})[plan.seed] = run
        if run.succeeded and plan.precision == BASELINE:
            _check_baseline(request, run)
        elif not run.succeeded or run.ran_nothing or run.in_no_layer:
            dropped.add(plan.precision)
            if (more := len(planned) - index) and dropped.issuperset(request.precisions):
                told.say(f"No candidate is left to compare, so the last {more} runs are left out.")
                break
        if plan.name == f"{BASELINE}-1" and index < len(planned):  # ends the second seed's runs
            first, second = (runs[BASELINE][k].result(request.how_metric) for k in (0, 1))
            if first.same_as(second) and np.ptp(first.losses):  # a constant loss does not show the seed
                left = f"The last {len(planned) - index} runs are left out"
                told.say(f"The script ignores its seed: two seeds gave the same FP32 run. {left}.")
                break
    return runs


def _kept(folder: Path, name: str, told: Watcher) -> FinishedRun:
    """What an earlier call left of a run. Damaged records are deleted, so that the run is repeated."""
    try:
        return read_run(folder / "runs", name)
    except UsageError as error:
        told.say(f"{error}. Run {name} is repeated.")
        forget_run(folder, name)
        return read_run(folder / "runs", name)


def _check(request: Request, folder: Path, plan: Planned, run: FinishedRun, status: int) -> None:
    """Raise what ends the comparison: FP32's failures, and those that say nothing about a precision."""
    refused, own = run.refused(status), run.own
    if run.succeeded and not refused and own is None:
        return
    try:
        if "No space left on device" in run.failure() or shutil.disk_usage(folder).free < LEAST_SPACE:
            raise full(folder)
        if -status in KILLED_FROM_OUTSIDE:
            raise MezzoError(
                f"run {plan.name} was killed by signal {-status} (9 often means that the system ran out of memory). "
                "Finished runs are kept: give the same command again to continue."
            )
        if own is not None:
            cause, fix = own
            if plan.precision == BASELINE and not request.own and _CAN_BE_OFF.search(cause):
                raise _OwnPrecisionError(cause)
            raise ScriptError(
                f"{request.target} cannot be compared: {cause}, which mezzo compare can't switch off; {fix}"
            )
        if refused and plan.precision == BASELINE:  # of a candidate's pattern
            raise UsageError(refused)
        if refused:
            raise UnsupportedPrecisionError(f"{plan.precision} cannot run here: {refused}")
        if plan.precision == BASELINE:
            # A script of another framework may have failed because of that.
            why = FRAMEWORKS[request.framework].mistaken(run) if "keras" in run.machine else None
            ending = f"Its output ended:\n{run.failure()}"
            if why is None:
                how = f"exit status {status}" if status else "it ended before its records were complete"
                why = f"fails without mixed precision, too (FP32 run, {how})"
                if off := ", ".join(run.switched_off):
                    why = f"fails with its own mixed precision ({off}) switched off: {last_error(run).rstrip('.')}"
                    ending = f"Convert to the weights' dtype: x.to(layer.weight.dtype) (output: {run.log})"
                if _READS_INPUT.search(run.failure()):
                    why += ". It reads standard input, which is empty here: give it a file or an option"
                if _IMPORTS_APEX.search(run.failure()):
                    why += ". Remove Apex's amp, or put it behind an option: this command sets the precision"
            raise ScriptError(f"{request.target} {why}. {ending}")
    except (MezzoError, _OwnPrecisionError):
        # A later call must not read this as a candidate's result; the log stays for the user.
        (folder / "runs" / f"{plan.name}.jsonl").unlink(missing_ok=True)
        raise


def _check_baseline(request: Request, run: FinishedRun) -> None:
    its = FRAMEWORKS[request.framework]
    if mistaken := its.mistaken(run):
        raise ScriptError(f"{request.target} {mistaken}.{_ending(run, _USAGE)}")
    losses = np.array([record.loss for record in run.losses])
    if not losses.size:
        raise ScriptError(f"{request.target} {its.untrained}{_ending(run, _USAGE)}")
    if not np.isfinite(losses).all():
        step = int(np.flatnonzero(~np.isfinite(losses))[0])
        raise ScriptError(
            f"{request.target}: in FP32, without mixed precision, the loss is {losses[step]} at step {step} (run "
            f"{run.name}), so nothing can be compared with it. Lower the learning rate, or fix the script."
        )
    if not request.own and any(own_masters(name) is not None for name in request.precisions):
        source = Path(request.target)
        by_accelerate = source.is_file() and "accelerate" in source.read_text(errors="replace")
        why = " (on a CPU, Accelerate ignores mixed_precision='fp16')" * by_accelerate
        raise UsageError(
            f"--precision own: {request.target} uses no mixed precision of its own{why}, so it is the FP32 run. Leave "
            "own out."
        )
    if request.how_metric is not None and run.metric(request.how_metric) is None:
        ending = _ending(run, 5) or " It printed nothing."
        nearest = request.how_metric.nearest(run.output)
        fix = f" Try --metric {nearest!r}." if nearest else ""
        raise UsageError(
            f"--metric {request.metric!r} does not match the output of the script. The finished run is kept.{fix}"
            f"{ending}"
        )


def _ending(run: FinishedRun, lines: int) -> str:
    """The last lines that a script printed, for the end of an error; empty if it printed nothing."""
    return "\n".join([" Its output ended:", *run.said[-lines:]]) if run.said else ""
