"""A loss scale around an optimizer of TF1: itself one, for Sessions, for `tf.function`s and eagerly."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import LossScale
from mezzo.tensorflow.loss_scale_variables import LossScaleVariables, ScaleReads


class LossScaleOptimizer(
    ScaleReads, tf.__internal__.tracking.DelegatingTrackableMixin, tf.compat.v1.train.Optimizer
):
    """A `tf.compat.v1.train.Optimizer` that scales the loss, unscales the gradients and skips steps that overflow.

    Checkpoints hold the inner optimizer's state and the loss scale: those of the plain optimizer load here, and back.
    """

    def __init__(self, optimizer: Any, loss_scale: LossScale) -> None:
        self._optimizer = optimizer
        tf.compat.v1.train.Optimizer.__init__(self, optimizer._use_locking, optimizer.get_name())
        tf.__internal__.tracking.DelegatingTrackableMixin.__init__(self, optimizer)
        self._scaled = LossScaleVariables(loss_scale)
        self._track_trackable(self._scaled, "loss_scale")

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer that was given."""
        return self._optimizer

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The inner optimizer's pairs of gradient and variable, for the scaled loss and unscaled."""
        pairs = self._optimizer.compute_gradients(self.get_scaled_loss(loss), *args, **kwargs)
        gradients = self.get_unscaled_gradients([gradient for gradient, _ in pairs])
        return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Apply unscaled gradients, as `compute_gradients` returns them, or skip the step."""
        self._scaled.require_scaled()
        pairs = list(grads_and_vars)
        _refuse_references([variable for _, variable in pairs])
        variables = [variable for gradient, variable in pairs if gradient is not None]
        if self._scaled.scales and variables and not tf.distribute.has_strategy():
            # Inside the branch the names of Adam's powers would begin with the branch's, and no checkpoint would load.
            with tf.init_scope():
                self._optimizer._create_slots(variables)
        return self._scaled.step(
            pairs, lambda pairs: self._optimizer.apply_gradients(pairs, global_step, name, **kwargs)
        )

    def get_slot(self, var: Any, name: str) -> Any:
        """The inner optimizer's slot."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """The names of the inner optimizer's slots."""
        return list(self._optimizer.get_slot_names())

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def _restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer._restore_slot_variable(*args, **kwargs)

    def variables(self) -> list[Any]:
        """The inner optimizer's variables, then the loss scale's."""
        return [*self._optimizer.variables(), *self._scaled.variables()]


def _refuse_references(variables: list[Any]) -> None:
    """A skipped step is a branch, and `tf.cond` of today cannot update TF1's reference variables inside one."""
    if tf.executing_eagerly() or not tf.compat.v1.control_flow_v2_enabled():
        return
    old = [variable.name for variable in variables if not hasattr(variable, "handle")]
    if old:
        raise UsageError(
            f"apply_gradients: {', '.join(map(repr, old))} is a reference variable of TF1, which cannot be updated "
            "inside a branch of today's tf.cond. Leave out use_resource=False of the variable or its variable_scope, "
            "or tf.compat.v1.disable_resource_variables(), whichever made it; or call "
            "tf.compat.v1.disable_control_flow_v2() as well, as tf.compat.v1.disable_v2_behavior() does."
        )
