"""ScaleGauge: what an optimizer tells of its loss scale, taken between two batches and read later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from mezzo.keras import during_fit


class Reading(NamedTuple):
    """What the optimizer held between two batches.

    Args:
        scale: by which the next loss is multiplied.
        counter: of Mezzo's optimizer, the steps skipped so far; of Keras's, its steps since it last changed the scale.
        bad: of Mezzo's optimizer, for each of the model's variables whether its gradient in the last step that was
            skipped was not finite.
    """

    scale: float
    counter: int = 0
    bad: tuple[bool, ...] = ()


class ScaleGauge:
    """Of a model's optimizer: Mezzo's loss scale, Keras's, a constant `loss_scale_factor`, or none.

    Args:
        model: compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizer = model.optimizer
        self._mezzos = hasattr(self._optimizer, "skipped_steps")
        self.moves = isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer)
        factor = getattr(self._optimizer, "loss_scale_factor", None)
        self._first = Reading(self._scale_now() if self.moves else float(factor or 1.0))

    @property
    def is_scaled(self) -> bool:
        """Whether there is any loss scale."""
        return self.moves or self._first.scale != 1.0

    def take(self) -> Any:
        """What the optimizer holds now, on the device; None where it has nothing yet. Nobody waits."""
        if not self.moves or not self._optimizer.built:
            return None
        # By name: to ask Mezzo's optimizer for its scale says that the loss is multiplied by it.
        known = {one.name: one for one in self._optimizer.variables[: len(self._optimizer._variables)]}
        names = ("skipped_steps", "bad_gradients") if self._mezzos else ("step_counter",)
        held = during_fit.values(self._model, [known[name] for name in ("dynamic_scale", *names)])
        parts = [keras.ops.reshape(keras.ops.cast(value, "float32"), (-1,)) for value in held]
        return keras.ops.concatenate(parts)

    def read(self, taken: Sequence[Any]) -> list[Reading]:
        """What was taken, as numbers; waits for the device once."""
        known = [one for one in taken if one is not None]
        rows = iter(np.asarray(keras.ops.convert_to_numpy(keras.ops.stack(known))).tolist() if known else ())
        return [self._first if one is None else self._reading(next(rows)) for one in taken]

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
        if len(after.bad) != len(variables):
            return []
        return [one.path for one, is_bad in zip(variables, after.bad) if is_bad]

    def _scale_now(self) -> float:
        """Of an optimizer that may have no variables yet."""
        if self._mezzos:
            return float(self._optimizer.machine().scale)
        return float(self._optimizer.initial_scale)

    @staticmethod
    def _reading(row: Sequence[float]) -> Reading:
        return Reading(row[0], int(row[1]), tuple(bool(one) for one in row[2:]))
