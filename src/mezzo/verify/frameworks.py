"""The frameworks whose scripts are compared: how a child of each is started, and how its precisions are read.

All that differs between them stands in this table; nothing else of `mezzo compare` asks which framework it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mezzo.core.errors import unknown_name
from mezzo.core.policy import policy
from mezzo.keras.plan import plan
from mezzo.pytorch.launch.storage import check
from mezzo.verify.children import LAUNCH
from mezzo.verify.finished import FinishedRun


@dataclass(frozen=True)
class Precision:
    """What a precision's name stands for: two of one fingerprint are the same; and whether it is FP32, the baseline."""

    fingerprint: str
    is_fp32: bool


@dataclass(frozen=True)
class Framework:
    """One framework.

    Args:
        name: the word of `--framework`.
        launch: the command that runs a request's file.
        read: a precision's name -> what it stands for. Raises UsageError for what no unmodified script can be run
            with.
        packages: those whose versions decide the runs.
        untrained: what is told of a script that recorded no loss, after its name.
        mistaken: why an FP32 run is not this framework's, and what to do; None where it is.
        emulates: whether Mezzo itself computes in a format that the device lacks; else the framework does, in its way.
        guessed: the same of a script's text, for a run that died without a record; None where nothing speaks for it.
    """

    name: str
    launch: tuple[str, ...]
    read: Callable[[str], Precision]
    packages: tuple[str, ...]
    untrained: str
    mistaken: Callable[[FinishedRun], str | None]
    emulates: bool
    guessed: Callable[[str], str | None] = lambda text: None


def framework(name: str) -> Framework:
    """The framework of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in FRAMEWORKS:
        raise unknown_name("framework", name, FRAMEWORKS, where="--framework: ")
    return FRAMEWORKS[name]


def _of_pytorch(name: str) -> Precision:
    value = policy(name)
    check(value)
    return Precision(value.fingerprint(), value.is_fp32)


def _of_keras(name: str) -> Precision:
    value = plan(name)
    return Precision(value.precision, value.is_fp32)


def _is_keras(run: FinishedRun) -> str | None:
    """A run as PyTorch's in which only Keras trained: on its torch backend it calls backward, and steps itself."""
    if run.updates or "keras" not in run.machine:
        return None
    return "trains with Keras: give --framework keras"


def _looks_like_keras(text: str) -> str | None:
    imported = set(re.findall(r"^[ \t]*(?:import|from)[ \t]+(keras|tensorflow|torch)\b", text, re.MULTILINE))
    if not imported or "torch" in imported:
        return None
    return f"imports {' and '.join(sorted(imported))} and not torch. If it trains with Keras, give --framework keras"


def _is_not_keras(run: FinishedRun) -> str | None:
    if run.losses or "keras" in run.machine:
        return None
    if "tf_keras" in run.machine:
        return (
            "trains with Keras 2 (tf_keras), which --framework keras does not run. Use Keras 3: import keras, or leave "
            "TF_USE_LEGACY_KERAS unset"
        )
    if "torch" in run.machine:
        return "makes no Keras model, and imports torch: leave --framework keras out"
    if "tensorflow" in run.machine:
        return "makes no Keras model: --framework keras compares scripts that train with Keras, not TensorFlow alone"
    return "makes no Keras model. Compare a script that trains one, or leave --framework keras out"


def _table(rows: Iterable[Framework]) -> dict[str, Framework]:
    return {row.name: row for row in rows}


FRAMEWORKS = _table(
    (
        Framework(
            "pytorch",
            LAUNCH,
            _of_pytorch,
            ("torch",),
            "ended without a call of backward(), so it has no loss to compare. Compare a script that trains; one that "
            "only evaluates, or trains in other processes, has none here.",
            _is_keras,
            True,
            _looks_like_keras,
        ),
        Framework(
            "keras",
            (sys.executable, "-m", "mezzo.keras.run"),
            _of_keras,
            ("keras", "tensorflow", "jax", "torch"),
            "ended without a training step that Mezzo sees (fit or train_on_batch), so it has no loss to compare. Put "
            "the step of a loop of its own into train_step of its keras.Model and call model.fit; a script that only "
            "evaluates, or trains in other processes, has no loss here.",
            _is_not_keras,
            False,
        ),
    )
)
