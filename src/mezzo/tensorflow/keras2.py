"""Keras 2 (`tf_keras`): its optimizers, new and legacy, with Mezzo's loss scale.

Both classes inherit from tf_keras's own loss-scale optimizers, so `compile`, `fit`, callbacks and custom loops take
them. The parent is constructed with a constant scale, which nothing reads: every method that does is overridden here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision.loss_scale_optimizer import LossScaleOptimizer as LegacyParent
from tf_keras.src.mixed_precision.loss_scale_optimizer import LossScaleOptimizerV3 as Parent

from mezzo.core.loss_scale import DynamicLossScale, LossScale
from mezzo.core.policy_text import as_loss_scale, print_loss_scale
from mezzo.tensorflow.loss_scale_variables import LossScaleVariables, ScaleReads

_STATE = "mezzo_loss_scale"


class _Scaled(ScaleReads):
    _legacy = False

    def __init__(self, inner_optimizer: Any, loss_scale: LossScale | float | str = "dynamic") -> None:
        scaled = LossScaleVariables(cast(LossScale, as_loss_scale(loss_scale, "LossScaleOptimizer")))
        super().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)  # type: ignore[call-arg]
        self._scaled = scaled
        self._track_trackable(scaled, "loss_scale")  # type: ignore[attr-defined]

    @property
    def dynamic(self) -> bool:
        return isinstance(self._scaled.pure, DynamicLossScale)

    @property
    def initial_scale(self) -> float:
        pure = self._scaled.pure
        return pure.init if isinstance(pure, DynamicLossScale) else pure.scale

    def get_config(self) -> dict[str, Any]:
        inner = tf_keras.optimizers.serialize(self.inner_optimizer)  # type: ignore[attr-defined]
        return {"inner_optimizer": inner, "loss_scale": print_loss_scale(self._scaled.pure)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        inner = config["inner_optimizer"]
        if isinstance(inner, dict):
            inner = tf_keras.optimizers.deserialize(
                inner, custom_objects=custom_objects, use_legacy_optimizer=cls._legacy
            )
        return cls(inner, config["loss_scale"])


def _with_gradients(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    return [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]


@tf_keras.saving.register_keras_serializable(package="mezzo")
class LossScaleOptimizer(_Scaled, Parent):
    """A `tf_keras.optimizers.Optimizer` with Mezzo's loss scale."""

    __init__ = tf.__internal__.tracking.no_automatic_dependency_tracking(_Scaled.__init__)

    def apply_gradients(
        self, grads_and_vars: Any, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Apply unscaled gradients, or skip the step; `iterations` counts the steps that were not skipped."""
        self._scaled.require_scaled()
        pairs = list(grads_and_vars)
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
        pairs = _with_gradients(pairs)
        inner = self.inner_optimizer
        aggregate = kwargs.pop("experimental_aggregate_gradients", True) and not skip_gradients_aggregation
        if pairs and aggregate and not (inner._run_with_dtensor or inner._mesh):
            # Before the check: a NaN of one replica is then all's.
            pairs = list(inner.aggregate_gradients(pairs))
        self._scaled.step(pairs, partial(inner.apply_gradients, skip_gradients_aggregation=True, **kwargs))
        return self.iterations

    def save_own_variables(self, store: Any) -> None:
        """The inner optimizer's variables, and the loss scale's state."""
        super().save_own_variables(store)
        state = self._scaled.variables()
        store[_STATE] = tf.stack([tf.cast(variable, tf.float64) for variable in state]).numpy()

    def load_own_variables(self, store: Any) -> None:
        """What `save_own_variables` saved; of a file without a loss scale's state, the rest."""
        saved = {key: store[key] for key in store.keys()}  # noqa: SIM118  (an h5 group)
        state = saved.pop(_STATE, None)
        super().load_own_variables(saved)
        if state is not None:
            for variable, value in zip(self._scaled.variables(), state[()]):
                variable.assign(tf.cast(value, variable.dtype))


@tf_keras.saving.register_keras_serializable(package="mezzo")
class LegacyLossScaleOptimizer(_Scaled, LegacyParent):
    """A `tf_keras.optimizers.legacy.Optimizer` with Mezzo's loss scale; in Sessions of TF1 too."""

    _legacy = True

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """As `LossScaleOptimizer.apply_gradients`."""
        self._scaled.require_scaled()
        pairs = _with_gradients(grads_and_vars)
        inner = self.inner_optimizer
        if pairs and experimental_aggregate_gradients:
            pairs = list(inner._aggregate_gradients(inner._transform_unaggregated_gradients(pairs)))
        apply = partial(inner.apply_gradients, name=name, experimental_aggregate_gradients=False)
        return self._scaled.step(pairs, apply)
