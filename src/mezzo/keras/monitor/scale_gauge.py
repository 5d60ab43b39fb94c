"""ScaleGauge: what an optimizer tells of its steps and its loss scale, taken between two batches and read later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from mezzo.keras.monitor import during_fit


class Reading(NamedTuple):
    """What the optimizer held between two batches.

    Args:
        scale: by which the next loss is multiplied.
        counter: of Mezzo's optimizer, the steps skipped so far; of Keras's, its steps since it last changed the scale.
        bad: of Mezzo's optimizer, for each of the model's variables whether its gradient in the last step that was
            skipped was not finite.
        iterations: steps that were taken, micro-steps of gradient accumulation among them, modulo 2^20.
    """

    scale: float
    counter: int = 0
    bad: tuple[bool, ...] = ()
    iterations: int = 0


_MODULO = 2**20
"""What is taken travels as FP32, which is exact so far."""


class ScaleGauge:
    """Of one optimizer: Mezzo's loss scale, Keras's, a constant `loss_scale_factor`, or none; and whether it steps.

    Args:
        model: compiled.
        optimizer: that it was compiled with, or one beside it.
        name: of the model's attribute that holds it.

    Attributes:
        moves: whether it has a loss scale that it changes itself.
    """

    def __init__(self, model: Any, optimizer: Any, name: str = "optimizer") -> None:
        self._model = model
        self._optimizer = optimizer
        self.name = name
        self._mezzos = hasattr(optimizer, "skipped_steps")
        self.moves = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        factor = getattr(optimizer, "loss_scale_factor", None)
        self._iterations = getattr(_inner(optimizer), "_iterations", None)
        taken = 0 if self._iterations is None else int(keras.ops.convert_to_numpy(self._iterations.value))
        self._first = Reading(
            self._scale_now() if self.moves else float(factor or 1.0), iterations=taken % _MODULO
        )

    @property
    def optimizer(self) -> Any:
        """That it looks at."""
        return self._optimizer

    @property
    def is_scaled(self) -> bool:
        """Whether there is any loss scale."""
        return self.moves or self._first.scale != 1.0

    def take(self) -> Any:
        """What the optimizer holds now, on the device; None where it has nothing yet. Nobody waits."""
        if self._iterations is None or not self._optimizer.built:
            return None
        held = []
        if self.moves:
            # By name: to ask Mezzo's optimizer for its scale says that the loss is multiplied by it.
            known = {one.name: one for one in self._optimizer.variables[: len(self._optimizer._variables)]}
            names = ("skipped_steps", "bad_gradients") if self._mezzos else ("step_counter",)
            held = [known[name] for name in ("dynamic_scale", *names)]
        taken, *others = during_fit.values(self._model, [self._iterations, *held])
        parts = [
            keras.ops.reshape(keras.ops.cast(value, "float32"), (-1,)) for value in (taken % _MODULO, *others)
        ]
        return keras.ops.concatenate(parts)

    def read(self, taken: Sequence[Any]) -> list[Reading]:
        """What was taken, as numbers; waits for the device once."""
        known = [one for one in taken if one is not None]
        rows = iter(np.asarray(keras.ops.convert_to_numpy(keras.ops.stack(known))).tolist() if known else ())
        return [self._first if one is None else self._reading(next(rows)) for one in taken]

    def stepped(self, before: Reading, after: Reading) -> bool:
        """Whether it took or skipped any step in between."""
        if self._iterations is None:  # nobody can tell
            return True
        if self.moves and not self._mezzos and (after.scale == 0 or math.isinf(after.scale)):
            return True  # Keras's optimizer, lost: a skipped step leaves no trace
        return before._replace(bad=()) != after._replace(bad=())

    def skipped(self, before: Reading, after: Reading, steps: int) -> int:
        """How many of so many steps were skipped; for Keras's optimizer and several steps, at least so many."""
        if not self.moves:
            return 0
        if self._mezzos:
            return max(0, min(steps, after.counter - before.counter))
        if steps == 1:  # its counter begins anew where the scale is doubled, and where a step is skipped
            return int(after.counter == 0 and not after.scale > before.scale)
        if 0 < after.scale < before.scale < math.inf:
            return min(steps, round(math.log2(before.scale / after.scale)))
        return int(after.scale < before.scale)

    def bad(self, after: Reading) -> list[str]:
        """Paths of the variables whose gradients were not finite in the last skipped step; empty where nobody knows."""
        variables = self._model.trainable_variables
        if after.bad and len(after.bad) != len(variables):  # an optimizer of some of them
            variables = getattr(self._optimizer, "_trainable_variables", ())
        if len(after.bad) != len(variables):
            return []
        return [one.path for one, is_bad in zip(variables, after.bad) if is_bad]

    def _scale_now(self) -> float:
        """Of an optimizer that may have no variables yet."""
        if self._mezzos:
            return float(self._optimizer.machine().scale)
        return float(self._optimizer.initial_scale)

    def _reading(self, row: Sequence[float]) -> Reading:
        taken, *others = row
        if not self.moves:
            return self._first._replace(iterations=int(taken))
        return Reading(others[0], int(others[1]), tuple(bool(one) for one in others[2:]), int(taken))


def gauges_of(model: Any) -> list[ScaleGauge]:
    """One for the optimizer of `compile`, the first, and one for each other that the model holds in an attribute.

    Args:
        model: compiled; an attribute may be a list, a tuple or a dict of optimizers as well.
    """
    found = [ScaleGauge(model, model.optimizer)]
    known = {id(model.optimizer), id(_inner(model.optimizer))}
    others = [(name, one) for key, held in _attributes(model) for name, one in _optimizers(key, held)]
    inside = {id(one.inner_optimizer) for _, one in others if hasattr(one, "inner_optimizer")}
    for name, one in others:
        if id(one) not in known | inside:
            known.add(id(one))
            found.append(ScaleGauge(model, one, name))
    return found


def _attributes(model: Any) -> list[tuple[str, Any]]:
    """The user's: TensorFlow keeps books of its own in those that begin with `_self_`."""
    return [(name, held) for name, held in vars(model).items() if not name.startswith("_self_")]


def _optimizers(name: str, held: Any) -> list[tuple[str, Any]]:
    if isinstance(held, keras.optimizers.Optimizer):
        return [(name, held)]
    each: Any = ()
    if isinstance(held, (list, tuple)):
        each = enumerate(held)
    elif isinstance(held, dict):
        each = held.items()
    return [(f"{name}_{key}", one) for key, one in each if isinstance(one, keras.optimizers.Optimizer)]


def _inner(optimizer: Any) -> Any:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer
