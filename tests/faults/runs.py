"""Runs a row: step by step under `MixedPrecision`, under another policy, and as a plain script under `mezzo run`."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import mezzo
from faults.clean import CLEAN
from faults.models import Trainee
from faults.rows import FAULTS, Row
from mezzo.core import records
from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, StaticLossScale
from mezzo.core.overflow import OverflowReport
from mezzo.pytorch.run.session import run
from mezzo.runner.lifecycle import RunRequest

_FLOOR = DynamicLossScale().floor
_CODE = re.compile(r'`precision="([^"]+)"`')


class Turn(NamedTuple):
    number: int
    part: str
    result: Any


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def owners(
    trainee: Trainee, precision: str | Mapping[str, str], scale: Any, **options: Any
) -> dict[str, Any]:
    """A MixedPrecision for each part; `scale`: a loss scale, a dynamic one's first value, or None: the policy's."""
    if isinstance(scale, float):
        scale = DynamicLossScale(init=scale)
    of = dict.fromkeys(trainee.optimizers, precision) if isinstance(precision, str) else precision
    return {
        part: mezzo.MixedPrecision(trainee.models[part], optimizer, of[part], loss_scale=scale, **options)
        for part, optimizer in trainee.optimizers.items()
    }


def turns(trainee: Trainee, mps: dict[str, Any], steps: range) -> Iterator[Turn]:
    for number in steps:
        for part, compute in trainee.step(number):
            with mps[part].autocast():
                loss = compute()
            yield Turn(number, part, mps[part].step(loss))


def everything(trainee: Trainee, mps: dict[str, Any]) -> dict[str, Any]:
    """All that a training holds, copied: parameters, buffers, carried states, optimizers, scales, generator."""
    held: dict[str, Any] = {"generator": torch.get_rng_state(), "python": random.getstate()}
    held["numpy"] = torch.from_numpy(np.random.get_state(legacy=True)[1].astype(np.int64))  # type: ignore[index]
    for name, model in (*trainee.models.items(), *trainee.kept.items()):
        for path, module in model.named_modules():
            for key, value in module.__dict__.items():
                if isinstance(value, torch.Generator):
                    value = value.get_state()
                if isinstance(value, random.Random):
                    value = hash(value.getstate())
                if isinstance(value, np.random.Generator):
                    value = hash(str(value.bit_generator.state))
                if isinstance(value, (Tensor, int, list)):
                    kept = value.clone() if isinstance(value, Tensor) else value
                    held[f"{name} {path}.{key}"] = len(kept) if isinstance(kept, list) else kept
        for key, value in model.state_dict().items():
            held[f"{name} {key}"] = value.clone()
        for key, value in model.named_buffers():
            held[f"version of {name} {key}"] = value._version
    for part, optimizer in trainee.optimizers.items():
        held[f"scale of {part}"] = mps[part].loss_scale
        for number, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                held[f"{part} {number} {key}"] = value.clone() if isinstance(value, Tensor) else value
    return held


Ended = Callable[[Trainee, dict[str, Any]], Any]


def of_row(row: Row, ended: Ended | None = None, **options: Any) -> Iterator[Turn]:
    """Run a row; `ended` is called with the training and its MixedPrecisions; `options` replace the row's."""
    scale = None if "loss_scale=" in row.precision else row.scale
    seed(7)
    trainee = row.make()
    mps = owners(trainee, **{"precision": row.precision, "scale": scale, **row.options, **options})
    try:
        yield from turns(trainee, mps, range(row.planted))
        row.plant(trainee)
        yield from turns(trainee, mps, range(row.planted, row.acting.stop))
        if ended is not None:
            ended(trainee, mps)
    finally:
        for mp in mps.values():
            mp.close()


def policies(finding: OverflowReport) -> list[str]:
    named = [text for sentence in finding.remedies for text in _CODE.findall(sentence)]
    return list(dict.fromkeys(named))


def mends(row: Row, part: str, policy: str) -> bool:
    """Whether a fault's steps are taken under another policy, at the row's loss scale or at the smallest there is.

    The smallest because forward may be mended, and its gradients then be what a dynamic loss scale has to come down to.
    """
    precision = defaultdict(lambda: row.precision, {part: policy})
    constant = isinstance(mezzo.policy(policy).make_loss_scale(), StaticLossScale)
    for scale in [None] if constant else [row.scale, _FLOOR]:
        turns = of_row(row, precision=precision, scale=scale, trace=False)
        with contextlib.suppress(UsageError):  # a policy that this model refuses
            if not any(turn.result.skipped for turn in turns if turn.part == part):
                return True
    return False


_SCRIPT = """
import sys
from faults.runs import train
train(sys.argv[1])
"""


def train(name: str) -> None:
    """What the script does: the steps before a fault is planted, and those in which it acts."""
    row = next(row for row in (*FAULTS, *CLEAN) if row.name == name)
    seed(7)
    trainee = row.make()
    for number in range(row.acting.stop):
        if number == row.planted:
            row.plant(trainee)
        for part, losses in groupby(trainee.step(number), key=lambda each: each[0]):
            computing = [compute for _, compute in losses]
            for compute in computing:
                (compute() / len(computing)).backward()
            trainee.optimizers[part].step()
            for optimizer in trainee.optimizers.values():
                optimizer.zero_grad()


def launched(row: Row, folder: Path) -> list[records.Record]:
    """The records of a row's script under `mezzo run`, in this process, at a constant loss scale."""
    script, file = folder / "script.py", folder / "run.jsonl"
    script.write_text(_SCRIPT, encoding="utf-8")
    file.unlink(missing_ok=True)
    constant = "" if "loss_scale=" in row.precision else f",loss_scale={row.scale:.0f}"
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = run(RunRequest(str(script), (row.name,), records=file, policy=row.precision + constant))
    if status != 0:
        raise RuntimeError(f"{row.name}: the script ended with {status}: {said.getvalue()}")
    return list(records.read(file))
