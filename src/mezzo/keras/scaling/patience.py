"""When an optimizer looks at the patience of its loss scale, and what says that it ran out where Python is not asked.

A look makes the host wait for the device, unless it has waited for this step already. So it is taken:

- TensorFlow and JAX, eagerly: at every step; which of two branches to take was a question to the host anyway.
- TensorFlow in a `tf.function`: by an assertion in the graph. XLA drops assertions.
- PyTorch on a CPU: at every step. On an accelerator: at every 50th.
- Everywhere: at the end of `fit`, and when somebody calls `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from mezzo.core.loss_scale import DynamicLossScale, LossScale
from mezzo.core.scale_numbers import power_text
from mezzo.keras.scaling.apply_or_keep import reading_is_free

LOOK_EVERY = 50
"""Steps between two looks where a look makes the host wait: PyTorch on an accelerator."""

_NAMES_SHOWN = 100


class Looks:
    """Counts the steps of one optimizer between looks."""

    def __init__(self) -> None:
        self._left = LOOK_EVERY

    def due(self, found_inf: Any) -> bool:
        """Whether to look after this step.

        Args:
            found_inf: the step's, as a tensor: where it is, and whether it has a value yet.
        """
        backend = keras.backend.backend()
        if backend == "tensorflow":
            import tensorflow as tf

            return not tf.inside_function()
        if backend == "jax":
            import jax

            return not isinstance(found_inf, jax.core.Tracer)
        if backend != "torch" or reading_is_free(found_inf):
            return True
        if _recording():
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._left = LOOK_EVERY
        return True


def _recording() -> bool:
    import torch

    return torch.compiler.is_compiling()


def assert_in_graph(machine: LossScale, stuck: Any, bad_gradients: Any, names: Sequence[str]) -> None:
    """In a `tf.function`, an assertion that the patience has not run out; elsewhere nothing.

    Args:
        machine: the loss scale, as it was given. One without a patience asserts nothing.
        stuck: how many steps in a row were skipped at the floor, or under a constant scale; shape ().
        bad_gradients: [variables], 1 where a gradient was not finite.
        names: of the variables.
    """
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    patience = patience_of(machine)
    if patience is None or not tf.inside_function():
        return
    smallest = isinstance(machine, DynamicLossScale)
    held = "as small as it gets" if smallest else f"constant at {power_text(machine.scale)}"
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    tf.debugging.Assert(
        stuck < patience,
        [
            f"LossScaleCollapseError: {patience} steps in a row were skipped, with the loss scale {held}. "
            f"optimizer.check() says more. A 1 marks a gradient that is not finite; the variables are {shown}:",
            bad_gradients,
        ],
        summarize=_NAMES_SHOWN,
    )


def patience_of(machine: LossScale) -> int | None:
    """The machine's patience; None where it has no end."""
    return getattr(machine, "patience", None)
