"""run: one unmodified Keras script under one policy, from the request to the exit status."""

from __future__ import annotations

from mezzo.core.errors import UsageError
from mezzo.core.records import RunStarted
from mezzo.keras.launch.instrument import Instrument
from mezzo.keras.launch.session import Session
from mezzo.keras.launch.summary import summary
from mezzo.keras.machine import describe
from mezzo.keras.policy.plan import KerasPlan, plan
from mezzo.scripts import life_cycle, script
from mezzo.scripts.framework_seeds import FrameworkSeeds
from mezzo.scripts.imports import ImportWatch
from mezzo.scripts.journal import Journal
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
    journal = Journal(request.records, lambda: _started(session))
    session = Session(request, kept, journal)
    imports = ImportWatch()
    parts: list[life_cycle.Part] = [imports]
    if request.seed_offset is not None:  # before the policy: Keras's own modules draw from the streams
        seeds = Seeds(request.seed_offset, imports)
        parts += [seeds, FrameworkSeeds(seeds, imports)]
    parts.append(Instrument(session, imports))
    return life_cycle.run(
        session,
        target,
        parts,
        finish=lambda status: session.finish(),
        summary=lambda failed: summary(session, failed=failed),
    )


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
    used = session.used or bool(session.journal.losses or session.journal.updates)
    machine = describe(session.backend, used=used)
    return life_cycle.started(session.request, session.plan.precision, machine)
