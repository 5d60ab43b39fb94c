"""What every optimizer of this room does with a loss and its gradients: scale, unscale, agree, and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mezzo.core.errors import CallOrderError, UsageError
from mezzo.core.loss_scale import LossScale
from mezzo.tensorflow.loss_scale_variables import LossScaleVariables
from mezzo.tensorflow.own_results import OwnResults
from mezzo.tensorflow.xla import refuse_xla

_LOOP = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(compute_loss())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""


class ScaledGradients:
    """A loss scale at work between a loss and an optimizer.

    Args:
        loss_scale: the loss scale, with the state to begin with.
        own: the method that computes gradients which need no unscaling, for the message to whoever went without.
    """

    def __init__(self, loss_scale: LossScale, own: str) -> None:
        self.variables = LossScaleVariables(loss_scale)
        self._own = own
        self._loss_was_scaled = False
        self._gradients_were_unscaled = False
        self._scaled_losses, self._unscaled_gradients = OwnResults(), OwnResults()

    @property
    def pure(self) -> LossScale:
        """The loss scale's settings."""
        return self.variables.pure

    def scaled_loss(self, loss: Any) -> Any:
        """S * loss in FP32 at least; of a callable, a callable.

        Args:
            loss: a floating-point tensor of any shape, or a function without arguments that returns one.

        Raises:
            CallOrderError: it is scaled already; of a function when it is called.
        """
        self._loss_was_scaled = True
        if callable(loss):
            return lambda: self._times_scale(loss())
        return self._times_scale(loss)

    def _times_scale(self, loss: Any) -> Any:
        if not self.variables.scales:
            return loss
        if loss in self._scaled_losses:
            raise CallOrderError(
                "the loss is scaled twice: get_scaled_loss was given what it had returned, and the gradients would be "
                "too large by the loss scale. Leave out the second get_scaled_loss; to optimizer.minimize(...) and "
                f"optimizer.{self._own}(...) give the loss unscaled, since they scale it themselves."
            )
        loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < tf.float32.size:  # 65536 is infinite in FP16
            loss = tf.cast(loss, tf.float32)
        scaled = loss * tf.cast(self.variables.scale(), loss.dtype)
        self._scaled_losses.remember(scaled)
        return scaled

    def unscaled(self, gradients: Sequence[Any]) -> list[Any]:
        """gradients * (1 / S), computed in FP32 at least, each of its own type; None stays None.

        Raises:
            CallOrderError: one of them is unscaled already.
        """
        self._gradients_were_unscaled = True
        if not self.variables.scales:
            return list(gradients)
        if any(gradient in self._unscaled_gradients for gradient in gradients):
            raise CallOrderError(
                "the gradients are unscaled twice: get_unscaled_gradients was given what it had returned, and they "
                "would be too small by the loss scale. Leave out the second get_unscaled_gradients; what "
                f"optimizer.{self._own}(...) returns is unscaled already."
            )
        inv_scale = 1.0 / self.variables.scale()
        unscaled = [None if gradient is None else _scaled(gradient, inv_scale) for gradient in gradients]
        for gradient in unscaled:
            self._unscaled_gradients.remember(gradient)
        return unscaled

    def require_scaled(self) -> None:
        """Nothing, if whoever applies gradients has had the loss scaled and the gradients unscaled.

        Raises:
            CallOrderError: one of the two was never done.
        """
        if not self.variables.scales or (self._loss_was_scaled and self._gradients_were_unscaled):
            return
        if self._loss_was_scaled:
            fault = "the loss was scaled, and the gradients were never unscaled: they are too large by the loss scale"
        elif self._gradients_were_unscaled:
            fault = "the gradients were unscaled, and the loss was never scaled: they are too small by the loss scale"
        else:
            fault = "the loss was never scaled, so that small gradients are lost in fp16"
        way = f"Use optimizer.minimize(...) or optimizer.{self._own}(...), or write:{_LOOP}"
        raise CallOrderError(f"apply_gradients: {fault}. {way}")

    def step(
        self, grads_and_vars: Sequence[tuple[Any, Any]], apply: Callable[[list[tuple[Any, Any]]], Any]
    ) -> Any:
        """Apply unscaled gradients, or skip the step if any of them is not finite on any replica.

        Args:
            grads_and_vars: pairs of an unscaled gradient (dense, `tf.IndexedSlices` or None) and its variable.
            apply: applies such pairs; called in this replica's context.

        Returns:
            What `LossScaleVariables.step` does; without a loss scale what `apply` returns.

        Raises:
            UsageError: called in a cross-replica context; or the rewrite is on, and XLA compiles this function.
            LossScaleCollapseError: eagerly, if the patience ran out.
        """
        if tf.distribute.in_cross_replica_context():
            raise UsageError(
                "apply_gradients was called in a cross-replica context. Call it in the function that "
                "strategy.run(...) runs on each replica."
            )
        refuse_xla()
        self._scaled_losses.forget()
        self._unscaled_gradients.forget()
        gradients, variables = ([pair[place] for pair in grads_and_vars] for place in (0, 1))

        def applied(gradients: list[Any]) -> Any:
            return apply(list(zip(gradients, variables)))

        if not self.variables.scales:
            return applied(gradients)
        names = [getattr(variable, "name", str(variable)) for variable in variables]
        used = [name for name, gradient in zip(names, gradients) if gradient is not None]
        if not tf.distribute.has_strategy():
            return self.variables.step(_bad(gradients), used, lambda: applied(gradients))

        def agreed(strategy: Any, gradients: list[Any]) -> Any:
            each = strategy.extended.call_for_each_replica(
                lambda gradients: tf.cast(_bad(gradients), tf.float32), args=(gradients,)
            )
            bad = strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None) > 0
            return self.variables.step(
                bad,
                used,
                lambda: strategy.group(strategy.extended.call_for_each_replica(applied, args=(gradients,))),
            )

        return tf.distribute.get_replica_context().merge_call(agreed, args=(gradients,))


def _scaled(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    wide = tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype
    return tf.cast(tf.cast(gradient, wide) * tf.cast(factor, wide), gradient.dtype)


def _bad(gradients: Sequence[Any]) -> Any:
    """bool, shape [gradients that are not None]: which have a NaN or an infinity."""
    flags = []
    for gradient in gradients:
        if gradient is None:
            continue
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
        values = tf.abs(values) if values.dtype.is_complex else values
        flags.append(tf.logical_not(tf.reduce_all(tf.math.is_finite(values))))
    if not flags:
        raise UsageError(
            "apply_gradients: no variable has a gradient. Is the loss computed from the variables?"
        )
    return tf.stack(flags)
