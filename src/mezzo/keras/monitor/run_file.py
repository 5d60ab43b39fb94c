"""Where a `fit`'s records go, and how they begin: what is trained, in which formats, on what."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from mezzo.core.errors import MezzoError, UsageError
from mezzo.core.policy_text import print_loss_scale
from mezzo.core.records import RunStarted
from mezzo.keras.machine import describe
from mezzo.keras.policy.plan import POLICIES, plan
from mezzo.scripts.journal import now_text

_WORDS = {keras_name: word for word, keras_name in POLICIES.items()}


def new_file(folder: Path) -> Path:
    """An empty file ``FOLDER/runs/fit001.jsonl``, or the next number that is free.

    Raises:
        UsageError: it can't be made.
    """
    runs = folder / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = runs / f"fit{number:03}.jsonl"
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        why = (
            "it, or one above it, is a file"
            if isinstance(error, (FileExistsError, NotADirectoryError))
            else error
        )
        raise UsageError(
            f"PrecisionMonitor({str(folder)!r}): no records can be written there: {why}. Name a folder, new or not."
        ) from error


def started(model: Any) -> RunStarted:
    """The first record of a model's training."""
    return RunStarted(
        script=sys.argv[0] or "(interactive)",
        argv=sys.argv[1:],
        policy=precision_of(model),
        seed_offset=0,
        nudged=False,
        machine=describe(keras.backend.backend()),
        started=now_text(),
    )


def precision_of(model: Any) -> str:
    """A compiled model's precision in Mezzo's words: of most of its layers, of the others, the loss scale."""
    policies = {layer.path or layer.name: layer.dtype_policy.name for layer in _with_variables(model)}
    default = Counter(policies.values()).most_common(1)[0][0] if policies else model.dtype_policy.name
    words = [_WORDS.get(default, default)]
    words += [f"module.{path}={_WORDS.get(name, name)}" for path, name in policies.items() if name != default]
    scale = _loss_scale(model.optimizer)
    text = ",".join([*words, *([f"loss_scale={scale}"] if scale else [])])
    try:
        return plan(text).precision
    except MezzoError:  # float16 throughout, a quantised layer, a name that can't stand in a policy
        return text


def _loss_scale(optimizer: Any) -> str:
    """As a policy writes it; empty where there is none."""
    if hasattr(optimizer, "machine"):
        return print_loss_scale(optimizer._machine)  # as it was given, whatever state it has come to
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        settings = (optimizer.initial_scale, optimizer.dynamic_growth_steps)
        return "dynamic(init={:.17g},growth_interval={})".format(*settings)
    factor = getattr(optimizer, "loss_scale_factor", None)
    return f"{factor:.17g}" if factor else ""


def _with_variables(model: Any) -> Iterator[Any]:
    for layer in model._flatten_layers(include_self=True):
        if layer._trainable_variables:
            yield layer
