"""Keras 3 under the graph rewrite: Mezzo's loss scale for Keras, and a word if XLA keeps the rewrite out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from mezzo.core.errors import CallOrderError
from mezzo.core.loss_scale import NoLossScale
from mezzo.core.policy_text import print_loss_scale
from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer
from mezzo.tensorflow.conflicts import refuse_mixed_layers, refuse_policy_after, refuse_xla
from mezzo.tensorflow.loss_scale_variables import OwnResults

_OF_KERAS_2 = ("get_scaled_loss", "get_unscaled_gradients")


@keras.saving.register_keras_serializable(package="mezzo")
class GraphRewriteOptimizer(LossScaleOptimizer):
    """`mezzo.keras.LossScaleOptimizer` that says what keeps the rewrite out: XLA, or a mixed policy set after it."""

    rewrite: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scaled_losses = OwnResults()

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__
        told = f", rewrite={self.rewrite}" if self.rewrite else ""
        return f"GraphRewriteOptimizer({inner}, loss_scale={print_loss_scale(self._machine)}{told})"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_KERAS_2:
            raise AttributeError(
                f"{name} is Keras 2's. An optimizer of Keras 3 unscales in apply, so write: "
                "loss = optimizer.scale_loss(loss) under the tape, and "
                "optimizer.apply(tape.gradient(loss, variables), variables)."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def build(self, var_list: Sequence[Any]) -> None:
        """As the parent's, if no layer of these variables has a mixed policy (else UsageError)."""
        refuse_policy_after("keras", self.rewrite, self._machine)
        refuse_mixed_layers(var_list, self.rewrite, self._machine)
        super().build(var_list)

    def scale_loss(self, loss: Any) -> Any:
        """As the parent's, of a loss that is not scaled yet (else CallOrderError)."""
        refuse_policy_after("keras", self.rewrite, self._machine)
        if loss in self._scaled_losses:
            raise CallOrderError(
                "the loss is scaled twice: scale_loss was given what it had returned, and the gradients would be too "
                "large by the loss scale. Leave out the second optimizer.scale_loss(...)."
            )
        scaled = super().scale_loss(loss)
        if not isinstance(self._machine, NoLossScale):
            self._scaled_losses.remember(scaled)
        return scaled

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """As the parent's, unless XLA compiles the function while the rewrite is on (UsageError)."""
        refuse_policy_after("keras", self.rewrite, self._machine)
        refuse_xla()
        self._scaled_losses.forget()
        super().apply(grads, trainable_variables)
