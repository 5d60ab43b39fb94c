"""run: one unmodified script under one policy, from the request to the exit status."""

from __future__ import annotations

import sys
from pathlib import Path

from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.records import RecordWriter, RunStarted
from mezzo.pytorch.launch.instrument import Instrument
from mezzo.pytorch.launch.session import Session
from mezzo.pytorch.launch.storage import check
from mezzo.pytorch.launch.summary import summary
from mezzo.scripts import runner, script
from mezzo.scripts.journal import Journal, Widen, check_events
from mezzo.scripts.patches import ImportWatch
from mezzo.scripts.runner import RunRequest
from mezzo.scripts.seeds import Seeds


def run(request: RunRequest) -> int:
    """Run a script as `python SCRIPT ARGS...` would, under a policy; its exit status.

    Nothing of PyTorch is imported before the script does so. A script that raises has its traceback
    printed, with the script's code alone in it, and gives status 1; after an interrupt the status is 130.
    All patches are undone at the end. Under the policy ``fp32`` nothing is lowered and TF32 is off, so on a
    CPU the script computes what it computes without Mezzo, to the last bit.

    Raises:
        UsageError: the script is missing, the policy is wrong, records or TensorBoard's events can't be written;
        nothing has run.
        MezzoError: likewise, from the policy.
    """
    policy, target = checked(request)
    journal = Journal(request.records, lambda: _started(session), _events(request.tensorboard))
    session = Session(request, policy, journal)
    imports = ImportWatch()
    instrument = Instrument(session, imports)
    parts: list[runner.Part] = [imports, instrument]
    if request.seed_offset is not None:
        parts.append(Seeds(request.seed_offset, imports))
    return runner.run(
        session,
        target,
        parts,
        finish=lambda status: _finish(session, instrument, status),
        summary=lambda failed: summary(session, failed=failed),
    )


def checked(request: RunRequest) -> tuple[Policy, script.Target]:
    """A request's policy, and its script's place; nothing is imported of PyTorch.

    Raises:
        UsageError: the script is missing, the policy is wrong, or TensorBoard's events can't be written.
        MezzoError: likewise, from the policy.
    """
    policy = policy_of(request.policy)
    check(policy)
    target = script.locate(request.target, is_module=request.is_module)
    if request.tensorboard is not None:
        check_events(request.tensorboard)
    return policy, target


def _finish(session: Session, instrument: Instrument, status: int) -> None:
    """What is left to measure, to finish and to note when the script is over."""
    journal = session.journal
    if instrument.watch is not None:
        instrument.watch.finish()
    if instrument.storage is not None:
        instrument.storage.finish()
    if instrument.preparation is not None and status == 0 and session.request.stop_after is None:
        instrument.preparation.finish()
    journal.seen(session.companions.finish())
    if not journal.losses and session.left_alone is None:
        journal.note("the script never called backward()")


def _events(folder: Path | None) -> Widen | None:
    """What writes the records as TensorBoard's events too; nothing where the script never imported PyTorch."""
    if folder is None:
        return None

    def widen(also: RecordWriter | None) -> RecordWriter | None:
        if "torch" not in sys.modules:
            return also
        from mezzo.pytorch.monitor.tensorboard import TensorBoardWriter

        return TensorBoardWriter(folder, also=also)

    return widen


def _started(session: Session) -> RunStarted:
    # Beside TensorFlow, what describes PyTorch's machine would load Triton, whose LLVM aborts where another is loaded.
    idle = "keras" in sys.modules and not session.journal.losses and not session.model_calls
    if "torch" in sys.modules and not idle:
        import torch

        from mezzo.pytorch.kernels.fp8.gemm import is_native
        from mezzo.pytorch.machine import describe, has_tf32, native_formats

        machine = describe()
        if session.device_type:
            machine["device_type"] = session.device_type
            device = session.device_type
            apart = {"tf32": has_tf32(device), "fp8": is_native(torch.device(device))}
            machine["native_formats"] = sorted(
                native_formats(device) | {name for name, native in apart.items() if native}
            )
    else:
        machine = {}
    if "keras" in sys.modules:  # who reads the records can tell that it was Keras that trained
        machine["keras"] = getattr(sys.modules["keras"], "__version__", "")
    return runner.started(session.request, str(session.policy), machine)
