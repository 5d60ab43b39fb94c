"""Keras 3 under the graph rewrite: Mezzo's loss scale for Keras; XLA and mixed policies are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from mezzo.core.policy_text import print_loss_scale
from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer
from mezzo.tensorflow.switch import SWITCH, refuse_policy, refuse_xla


@keras.saving.register_keras_serializable(package="mezzo")
class GraphRewriteOptimizer(LossScaleOptimizer):
    """`mezzo.keras.LossScaleOptimizer` that refuses XLA, and a mixed policy set after the rewrite."""

    rewrite: Any = None

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__
        rewrite = f", rewrite={self.rewrite}" if self.rewrite else ""
        return f"GraphRewriteOptimizer({inner}, loss_scale={print_loss_scale(self._loss_scale)}{rewrite})"

    def __getattr__(self, name: str) -> Any:
        fix = ". Of Keras 3, use scale_loss(loss) and apply(gradients, variables)" * name.startswith("get_")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{fix}")

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """As the parent's; raises UsageError under XLA, or with a mixed policy of Keras's."""
        refuse_xla()
        if SWITCH.is_on:
            refuse_policy("the optimizer of the graph rewrite")
        super().apply(grads, trainable_variables)
