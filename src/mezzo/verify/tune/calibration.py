"""The calibration: one FP32 run of the script in which a probe measures a few steps, and which ends after them.

`torch.compile` is switched off in that run: inside a compiled function no module can be told from another. What is
measured is then each module's eager time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mezzo.core.errors import ScriptError
from mezzo.core.sensitivity import Sensitivities
from mezzo.pytorch.sensitivity.settings import Settings
from mezzo.scripts.request import RunRequest
from mezzo.verify.children import LAUNCH, attempt, run_child
from mezzo.verify.finished import FinishedRun, read_run
from mezzo.verify.progress import Watcher
from mezzo.verify.tune.request import TuneRequest

NAME = "calibration"
RESULTS = "sensitivity.json"


def calibrate(
    request: TuneRequest, folder: Path, told: Watcher, command: Sequence[str] = LAUNCH
) -> Sensitivities:
    """Run the script until the measured steps are over, and return what was measured.

    Args:
        request: what is tuned.
        folder: gets the run's records, its output, and `sensitivity.json`.
        told: of the run.
        command: what runs a request's file, in place of `python -m mezzo.pytorch.launch` (for tests).

    Raises:
        ScriptError: the script fails in FP32, or makes no update with a model's call and a backward before it.
        OSError: the folder can't be written.
    """
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    records, results = runs / f"{NAME}.jsonl", folder / RESULTS
    for old in (records, results):
        old.unlink(missing_ok=True)
    settings = Settings(request.preset, request.budget, request.first)
    settings.write(results.resolve())
    last = request.first + request.budget
    child = RunRequest(
        target=request.target,
        argv=request.argv,
        is_module=request.is_module,
        policy="fp32",
        records=records.resolve(),
        summary=False,
        stop_after=last,
        sensitivity=results.resolve(),
    )
    eager = ("env", "TORCHDYNAMO_DISABLE=1", *command)
    told.begin(NAME, 1, 1, last)
    try:
        with attempt(child) as here:
            status = run_child(eager, here, told.steps)
    except BaseException:
        told.end("stopped")
        raise
    finally:
        settings.remove(results.resolve())
    run = read_run(runs, NAME)
    told.end(f"{run.steps} steps" if run.succeeded else f"failed with exit status {status}")
    if not run.succeeded:
        raise ScriptError(
            f"{request.target} ended with exit status {status} in FP32, without mixed precision, so there is nothing "
            f"to tune. Mend the script first. Its output ended:\n{run.failure()}"
        )
    if not results.exists():
        raise ScriptError(_nothing(request, run))
    measured = Sensitivities.from_json(results.read_text(encoding="utf-8"))
    if not measured.units or not measured.losses:
        raise ScriptError(_nothing(request, run))
    return measured


def _nothing(request: TuneRequest, run: FinishedRun) -> str:
    if 0 < run.steps <= request.first:
        return (
            f"{request.target} made {run.steps} updates, and the first {request.first} are not measured. "
            "Give it more steps, or fewer to pass over with --first 0."
        )
    notes = "; ".join(run.ended.notes) if run.ended else ""
    return (
        f"{request.target}: nothing could be measured. A module's call in training mode, a backward pass and an "
        f"optimizer's step must follow each other. Give a script, and arguments of its own after --, with which it "
        f"trains. {f'It says: {notes}.' if notes else ''}".rstrip()
    )
