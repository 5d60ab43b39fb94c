"""Runs a trainee step by step under `MixedPrecision`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mezzo
from faults.models import Trainee
from faults.rows import PLANTED, Fault
from mezzo.core.loss_scale import DynamicLossScale

Compute = Callable[[], Tensor]
Around = Callable[[str, Any, Compute], Tensor]


@dataclass(frozen=True)
class Turn:
    """One call of `mp.step`.

    Args:
        number: of the step.
        part: whose.
        result: what `step` returned.
    """

    number: int
    part: str
    result: Any


def seed(number: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def owners(
    trainee: Trainee, precision: str | Mapping[str, str], scale: Any, **options: Any
) -> dict[str, Any]:
    """A MixedPrecision for each part of a trainee.

    Args:
        trainee: what is trained.
        precision: the policy, or that of each part.
        scale: a loss scale, the first value of a dynamic one, or None for the policy's own.
        options: of MixedPrecision.
    """
    if isinstance(scale, float):
        scale = DynamicLossScale(init=scale)
    of = dict.fromkeys(trainee.optimizers, precision) if isinstance(precision, str) else precision
    return {
        part: mezzo.MixedPrecision(trainee.models[part], optimizer, of[part], loss_scale=scale, **options)
        for part, optimizer in trainee.optimizers.items()
    }


def plainly(part: str, mp: Any, compute: Compute) -> Tensor:
    """The loss as a loop computes it."""
    with mp.autocast():
        return compute()


def turns(trainee: Trainee, mps: dict[str, Any], steps: range, around: Around = plainly) -> Iterator[Turn]:
    """Train, and give each call of `mp.step`.

    Args:
        trainee: what is trained.
        mps: of each part.
        steps: their numbers.
        around: computes a loss inside its part's region.
    """
    for number in steps:
        for part, compute in trainee.step(number):
            mp = mps[part]
            yield Turn(number, part, mp.step(around(part, mp, compute)))


def everything(trainee: Trainee, mps: dict[str, Any]) -> dict[str, Any]:
    """All that a training holds, copied: parameters, buffers, carried states, optimizers, scales, generator."""
    held: dict[str, Any] = {"generator": torch.get_rng_state(), "python": random.getstate()}
    held["numpy"] = torch.from_numpy(np.random.get_state(legacy=True)[1].astype(np.int64))  # type: ignore[index]
    for name, model in (*trainee.models.items(), *trainee.kept.items()):
        for path, module in model.named_modules():
            for key, value in module.__dict__.items():
                if isinstance(value, Tensor):
                    held[f"{name} {path}.{key}"] = value.clone()
                elif isinstance(value, torch.Generator):
                    held[f"{name} {path}.{key}"] = value.get_state()
                elif isinstance(value, int):
                    held[f"{name} {path}.{key}"] = value
                elif isinstance(value, list):
                    held[f"{name} {path}.{key}"] = len(value)
        for key, value in model.state_dict().items():
            held[f"{name} {key}"] = value.clone()
    for part, optimizer in trainee.optimizers.items():
        held[f"scale of {part}"] = mps[part].loss_scale
        for number, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                held[f"{part} {number} {key}"] = value.clone() if isinstance(value, Tensor) else value
    return held


def options_of(fault: Fault) -> dict[str, Any]:
    """Precision and scale of a fault's run, as `owners` takes them."""
    own_scale = "loss_scale=" in fault.precision
    return {"precision": fault.precision, "scale": None if own_scale else fault.scale, **fault.options}


def acting(fault: Fault) -> range:
    """The steps in which a fault acts."""
    first = PLANTED + fault.delay
    return range(first, first + fault.repeats)


def of_fault(
    fault: Fault,
    around: Around = plainly,
    before: int = 0,
    ended: Callable[[Trainee, dict[str, Any]], Any] | None = None,
    **options: Any,
) -> Iterator[Turn]:
    """Run a fault: good steps, then those in which it acts.

    Args:
        fault: the row.
        around: computes a loss in the steps in which the fault acts.
        before: more good steps, for a loss scale to find its place.
        ended: called with the training and its parts' MixedPrecisions once the last step is over.
        options: in place of the row's.
    """
    seed(7)
    trainee = fault.make()
    mps = owners(trainee, **{**options_of(fault), **options})
    try:
        yield from turns(trainee, mps, range(-before, PLANTED))
        fault.plant(trainee)
        acts = acting(fault)
        yield from turns(trainee, mps, range(PLANTED, acts.start))
        yield from turns(trainee, mps, acts, around)
        if ended is not None:
            ended(trainee, mps)
    finally:
        for mp in mps.values():
            mp.close()
