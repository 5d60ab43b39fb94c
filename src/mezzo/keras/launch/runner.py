"""run: one unmodified Keras script under one policy, from the request to the exit status."""

from __future__ import annotations

import sys

from mezzo.core.errors import UsageError
from mezzo.core.records import RunStarted
from mezzo.keras.launch.instrument import Instrument
from mezzo.keras.launch.session import Session
from mezzo.keras.launch.summary import summary
from mezzo.keras.machine import describe
from mezzo.keras.policy.plan import KerasPlan, plan
from mezzo.scripts import script
from mezzo.scripts.framework_seeds import FrameworkSeeds
from mezzo.scripts.imports import ImportWatch
from mezzo.scripts.journal import Journal, now_text
from mezzo.scripts.request import RunRequest
from mezzo.scripts.seeds import Seeds

# What a run of PyTorch's can be asked for and this one cannot.
_NOT_HERE = {
    "watch": "look at exponents",
    "watch_all": "look at exponents",
    "sensitivity": "measure sensitivity",
    "tensorboard": "write TensorBoard's events",
}


def run(request: RunRequest) -> int:
    """Run a script as `python SCRIPT ARGS...` would, under a dtype policy; its exit status.

    Nothing of Keras is imported before the script does so; its backend is the one that the script or KERAS_BACKEND
    chooses. A script that raises has its traceback printed, with the script's code alone in it, and gives status 1;
    after an interrupt the status is 130. All patches are undone at the end.

    Raises:
        UsageError: the script is missing, the policy is wrong, the request asks for what only PyTorch's runs do, or
            records can't be written; nothing has run.
        ScriptError: the script sets a policy of its own in a run in FP32.
        MezzoError: likewise, from the policy.
    """
    kept, target = checked(request)
    try:
        journal = Journal(request.records, lambda: _started(session))
    except OSError as error:
        raise UsageError(
            f"can't write records to {str(request.records)!r}: {error.strerror}. Name a file that can be written, in a "
            "folder that is there."
        ) from error
    session = Session(request, kept, journal)
    imports = ImportWatch()
    instrument = Instrument(session, imports)
    seeds = None if request.seed_offset is None else Seeds(request.seed_offset, imports)
    more = None if seeds is None else FrameworkSeeds(seeds, imports)
    status = 1
    with script.surroundings(target, request.argv) as namespace:
        imports.install()
        if (
            seeds is not None and more is not None
        ):  # before the policy: Keras's own modules draw from the streams
            seeds.install()
            more.install()
        instrument.install()
        try:
            status = script.execute(target, namespace, lambda error: error is session.fatal)
        finally:
            instrument.remove()
            if seeds is not None and more is not None:
                more.remove()
                seeds.remove()
            imports.remove()
            session.finish()
            journal.end(status)
    if session.fatal is not None:
        raise session.fatal
    if request.summary:
        sys.stdout.flush()
        print(summary(session), file=sys.stderr)
    return status


def checked(request: RunRequest) -> tuple[KerasPlan, script.Target]:
    """A request's plan, and its script's place; nothing is imported of Keras.

    Raises:
        UsageError: the script is missing, the policy is wrong, or the request asks for what only PyTorch's runs do.
        MezzoError: likewise, from the policy.
    """
    for name, what in _NOT_HERE.items():
        if getattr(request, name):
            raise UsageError(
                f"a run of a Keras script can't {what} ({name} is {getattr(request, name)!r}): leave it out. "
                "mezzo.keras.PrecisionMonitor, a callback, watches a model in fit."
            )
    return plan(request.policy), script.locate(request.target, is_module=request.is_module)


def _started(session: Session) -> RunStarted:
    request, journal = session.request, session.journal
    used = session.used or bool(journal.losses or journal.updates)
    return RunStarted(
        script=request.target,
        argv=list(request.argv),
        policy=session.plan.precision,
        seed_offset=request.seed_offset or 0,
        nudged=request.nudge,
        machine=describe(session.backend, used=used),
        started=now_text(),
    )
