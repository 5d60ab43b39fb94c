"""What TF1's and Keras 2's wrapped optimizers both tell of their loss scale."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import LossScale
from mezzo.tensorflow.scaled_gradients import ScaledGradients


class ScaleReads:
    """For a class that holds its `ScaledGradients` as `_scaled`."""

    _scaled: ScaledGradients

    @property
    def skipped_steps(self) -> Any:
        """Steps skipped so far: int64 variable of the graph that is being built, shape ()."""
        return self._scaled.variables.read("skipped_steps").skipped_steps

    @property
    def last_step_skipped(self) -> Any:
        """Whether the last step was skipped: bool variable, shape ()."""
        return self._scaled.variables.read("last_step_skipped").last_step_skipped

    def machine(self) -> LossScale:
        """The pure loss scale on the host, in an eager program; waits for the device."""
        return self._scaled.variables.machine()

    def check(self) -> None:
        """Raise LossScaleCollapseError if the patience ran out, in an eager program; waits for the device."""
        self._scaled.variables.check()

    def get_unscaled_gradients(self, grads: Any) -> list[Any]:
        """The gradients of a scaled loss times 1/S; None stays None.

        Raises:
            CallOrderError: they are unscaled already.
            UsageError: no list of gradients.
        """
        if grads is None or tf.is_tensor(grads):
            what = "None" if grads is None else "one tensor"
            raise UsageError(
                f"get_unscaled_gradients: grads is {what}; give a list of gradients, one for each variable, such as "
                "tape.gradient(scaled_loss, [variable]) returns."
            )
        return self._scaled.unscaled(list(grads))
