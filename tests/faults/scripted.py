"""A row as a script that knows nothing of Mezzo: `train(name)` is plain PyTorch, as `mezzo run` would find it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from faults.clean import CLEAN, Clean
from faults.models import Trainee
from faults.rows import FAULTS, PLANTED, Fault
from faults.runs import acting, seed
from mezzo.core import records
from mezzo.pytorch.launch.runner import run
from mezzo.scripts.runner import RunRequest

_SCRIPT = """
import sys
from faults.scripted import train
train(sys.argv[1])
"""


def _steps(trainee: Trainee, numbers: range) -> Iterator[None]:
    for number in numbers:
        for part, losses in groupby(trainee.step(number), key=lambda each: each[0]):
            computing = [compute for _, compute in losses]
            for compute in computing:
                (compute() / len(computing)).backward()
            trainee.optimizers[part].step()
            for optimizer in trainee.optimizers.values():
                optimizer.zero_grad()
        yield


def train(name: str) -> None:
    """What the script does: a fault's good steps and those in which it acts, or a clean run's steps."""
    row: Any = next(row for row in (*FAULTS, *CLEAN) if row.name == name)
    seed(7)
    trainee = row.make()
    if isinstance(row, Clean):
        if row.plant is not None:
            row.plant(trainee)
        list(_steps(trainee, range(row.steps)))
        return
    list(_steps(trainee, range(PLANTED)))
    row.plant(trainee)
    list(_steps(trainee, range(PLANTED, acting(row).stop)))


def can_be_one(row: Fault | Clean) -> bool:
    """Whether the row is the same thing in a script: no weights or clipping of MixedPrecision's, a scale that stays."""
    options = row.options.keys() - {"accumulate"}
    return not options and (row.scale < 2.0**20 if isinstance(row, Fault) else row.scale == 2.0**24)


def launched(row: Fault | Clean, folder: Path) -> list[records.Record]:
    """The records of a row's script under `mezzo run`, in this process, at a constant loss scale.

    Args:
        row: what is trained.
        folder: where script and records are written.
    """
    script, file = folder / "script.py", folder / "run.jsonl"
    script.write_text(_SCRIPT, encoding="utf-8")
    file.unlink(missing_ok=True)
    precision = row.precision if isinstance(row, Fault) else "fp16"
    if "loss_scale=" not in precision:
        precision += f",loss_scale={row.scale:.0f}"
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = run(RunRequest(str(script), (row.name,), records=file, policy=precision))
    if status != 0:
        raise RuntimeError(f"{row.name}: the script ended with {status}: {said.getvalue()}")
    return list(records.read(file))
