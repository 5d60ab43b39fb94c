"""A loss scale in `tf.Variable`s: in an eager program, in a `tf.function`, and once for each graph of TF1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale, ScaleArrays, check, on_host
from mezzo.core.policy_text import print_loss_scale
from mezzo.tensorflow.switch import in_xla, refuse_xla

_READS = "optimizer.loss_scale, optimizer.skipped_steps"


# In addition to the state of the loss scale.
_OWN = {"skipped_steps": 0, "last_step_skipped": False}
# Names in checkpoints and graphs, and types. Those of the first two fields are TensorFlow's and tf_keras's, so that
# checkpoints of their loss-scale optimizers load. Other fields have their own name; counters are int32, numbers FP32.
_NAMES = {"scale": "current_loss_scale"}
_TYPES = {"good_steps": tf.int64, "skipped_steps": tf.int64, "last_step_skipped": tf.bool}


class LossScaleVariables(tf.__internal__.tracking.Trackable):
    """The state of a loss scale, one set of variables for each graph of TF1 and one for eager programs."""

    def __init__(self, pure: LossScale) -> None:
        self.pure = pure
        self._first = pure.arrays()
        self._held: dict[Any, SimpleNamespace] = {}
        # The graphs in which a step was built, in order; None for the eager program.
        self._used: dict[Any, None] = {}
        self.loss_was_scaled = self.gradients_were_unscaled = False
        self.scales = not isinstance(pure, NoLossScale)
        self.here()

    def here(self, for_a_step: bool = False) -> SimpleNamespace:
        """The variables, each of shape (), of this graph or of the eager program; made when first asked for."""
        with tf.init_scope():
            graph = _graph()
            if for_a_step:
                self._used[graph] = None
            if graph not in self._held:
                self._held[graph] = self._make()
                for name, variable in self._by_name().items():
                    self._handle_deferred_dependencies(name=name, trackable=variable)
        return self._held[graph]

    def _make(self) -> SimpleNamespace:
        made: dict[str, Any] = vars(self._first) | _OWN
        with tf.name_scope("loss_scale/"):  # not aggregated: every replica comes to the same values
            for field, value in made.items():
                dtype = _TYPES.get(field, tf.float32 if isinstance(value, float) else tf.int32)
                kind: dict[str, Any] = {"name": _NAMES.get(field, field), "dtype": dtype, "trainable": False}
                made[field] = tf.compat.v1.Variable(value, use_resource=True, **kind)
        return SimpleNamespace(**made)

    def _by_name(self) -> dict[str, Any]:
        return {_NAMES.get(field, field): variable for field, variable in vars(self.here()).items()}

    def variables(self) -> list[Any]:
        """The variables of `here()`."""
        return list(self._by_name().values())

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return self._by_name() | super()._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        return self._by_name().get(name)

    def read(self, what: str) -> SimpleNamespace:
        """The variables of `here()`, for reading `what`; a UsageError if the steps are in another graph."""
        with tf.init_scope():
            graph = _graph()
        if graph in self._held and (graph in self._used or not self._used):
            return self._held[graph]
        others = [other for other in self._used or self._held if other is not None]
        where = f"{others[-1]!r}" if others else "the eager program"
        raise UsageError(
            f"{what}: the loss scale of this optimizer is in {where}. Read it there, for a graph of TF1 with "
            f"graph.as_default(): session.run([{_READS}])."
        )

    def on_host(self, what: str) -> ScaleArrays:
        """The state as numbers, for `what`; a UsageError outside of an eager program. Synchronizes with the device."""
        held = self.read(what)
        if not tf.executing_eagerly():
            raise UsageError(f"{what} needs an eager program. In a graph of TF1 use session.run([{_READS}]).")
        return self._state(lambda name: float(getattr(held, name).numpy()))

    def _state(self, of: Callable[[str], Any]) -> ScaleArrays:
        return replace(self._first, **{name: of(name) for name in vars(self._first)})

    def require_scaled(self) -> None:
        """Raise CallOrderError if the loss was never scaled, or the gradients never unscaled."""
        if not self.scales or (self.loss_was_scaled and self.gradients_were_unscaled):
            return
        fault = "the loss was never scaled, so that small gradients are lost in fp16"
        if self.loss_was_scaled:
            fault = "the loss was scaled, and the gradients were never unscaled: they are too large by the loss scale"
        elif self.gradients_were_unscaled:
            fault = "the gradients were unscaled, and the loss was never scaled: they are too small by the loss scale"
        raise CallOrderError(
            f"apply_gradients: {fault}. Use optimizer.minimize(...); or take the gradients of "
            "optimizer.get_scaled_loss(loss) and apply optimizer.get_unscaled_gradients(gradients)."
        )

    def step(self, grads_and_vars: Sequence[tuple[Any, Any]], apply: Callable[[Any], Any]) -> Any:
        """Apply unscaled gradients, or skip the step; raises LossScaleCollapseError, or its like in a graph."""
        if tf.distribute.in_cross_replica_context():
            raise UsageError(
                "apply_gradients was called in a cross-replica context. Call it in the function that "
                "strategy.run(...) runs on each replica."
            )
        refuse_xla()
        gradients, variables = ([pair[place] for pair in grads_and_vars] for place in (0, 1))

        def applied(gradients: list[Any]) -> Any:
            return apply(list(zip(gradients, variables)))

        if not self.scales:
            return apply(grads_and_vars)
        names = [getattr(var, "name", str(var)) for grad, var in grads_and_vars if grad is not None]
        if not tf.distribute.has_strategy():
            return self._apply_or_skip(_bad(gradients), names, lambda: applied(gradients))

        def agreed(strategy: Any, grads: list[Any]) -> Any:
            replicas = strategy.extended.call_for_each_replica
            each = replicas(lambda grads: tf.cast(_bad(grads), tf.float32), args=(grads,))
            bad = strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None) > 0
            return self._apply_or_skip(bad, names, lambda: strategy.group(replicas(applied, args=(grads,))))

        return tf.distribute.get_replica_context().merge_call(agreed, args=(gradients,))

    def _apply_or_skip(self, bad: Any, names: Sequence[str], apply: Callable[[], Any]) -> Any:
        """One step; `bad` is bool, shape [n]: whose gradients are NaN or infinite, agreed over replicas."""
        held = self.here(for_a_step=True)
        found_inf = tf.reduce_any(bad)
        before = self._state(lambda name: tf.convert_to_tensor(getattr(held, name)))
        after = self.pure.advance(before, found_inf, tf)
        skipped = tf.convert_to_tensor(held.skipped_steps)
        applied = tf.cond(found_inf, lambda: tf.constant(False), lambda: _done(apply))
        values = vars(after) | {
            "skipped_steps": skipped + tf.cast(found_inf, skipped.dtype),
            "last_step_skipped": found_inf,
        }
        assigned = [getattr(held, name).assign(value) for name, value in values.items()]
        pure: Any = self.pure  # which is not NoLossScale here
        said, whose = str(pure.collapsed(pure.patience)), "Gradients that are not finite:"
        if tf.executing_eagerly():
            if after.stuck >= pure.patience:
                bad_names = ", ".join(name for name, flag in zip(names, bad.numpy()) if flag)
                raise LossScaleCollapseError(said, f"{whose} {bad_names}.")
            return None
        if in_xla():
            return tf.group(applied, *assigned)
        with tf.control_dependencies(assigned):
            which = tf.strings.reduce_join(tf.boolean_mask(tf.constant(list(names)), bad), separator=", ")
            checked = tf.debugging.Assert(after.stuck < pure.patience, [said, whose, which])
        return tf.group(applied, *assigned, checked)


class ScaleReads:
    """The loss-scale interface of the optimizers of TF1 and of Keras 2, which hold the state as `_scaled`."""

    _scaled: LossScaleVariables
    rewrite: Any = None  # what enable_mixed_precision_graph_rewrite decided, if it made the optimizer

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__  # type: ignore[attr-defined]
        rewrite = f", rewrite={self.rewrite}" if self.rewrite else ""
        return f"{type(self).__name__}({inner}, loss_scale={print_loss_scale(self._scaled.pure)}{rewrite})"

    @property
    def loss_scale(self) -> Any:
        """S for the next step: FP32 tensor, shape ()."""
        scale = self._scaled.read("loss_scale").scale
        # In a graph the variable, so that reading adds no op.
        return tf.convert_to_tensor(scale) if tf.executing_eagerly() else scale

    @property
    def skipped_steps(self) -> Any:
        """Steps skipped so far: int64 variable of the graph that is being built, shape ()."""
        return self._scaled.read("skipped_steps").skipped_steps

    @property
    def last_step_skipped(self) -> Any:
        """Whether the last step was skipped: bool variable, shape ()."""
        return self._scaled.read("last_step_skipped").last_step_skipped

    def machine(self) -> LossScale:
        """The loss scale as a value of `mezzo`, in an eager program; synchronizes with the device."""
        return on_host(self._scaled.pure, self._scaled.on_host("machine()"))

    def check(self) -> None:
        """Raise LossScaleCollapseError if the patience ran out, in an eager program; synchronizes with the device."""
        check(self._scaled.pure, self._scaled.on_host("check()"))

    def get_scaled_loss(self, loss: Any) -> Any:
        """S * loss in FP32 at least, for `tf.GradientTape`; of a function without arguments, a function."""
        self._scaled.loss_was_scaled = True
        if not self._scaled.scales:
            return loss
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < tf.float32.size:  # 65536 is infinite in FP16
            loss = tf.cast(loss, tf.float32)
        return loss * tf.cast(tf.convert_to_tensor(self._scaled.here(for_a_step=True).scale), loss.dtype)

    scale_loss = get_scaled_loss

    def get_unscaled_gradients(self, grads: Any) -> list[Any]:
        """The gradients of a scaled loss times 1/S, computed in FP32 at least, in their types; None stays None."""
        self._scaled.gradients_were_unscaled = True
        if not self._scaled.scales:
            return list(grads)
        inv_scale = 1.0 / tf.convert_to_tensor(self._scaled.here(for_a_step=True).scale)
        return [None if gradient is None else _times(gradient, inv_scale) for gradient in grads]


def _graph() -> Any:
    """The graph that is being built; None in an eager program."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _done(apply: Callable[[], Any]) -> Any:
    """True, once what `apply` built has run: the branches of a cond must return alike."""
    done = [op for op in tf.nest.flatten(apply()) if isinstance(op, (tf.Operation, tf.Tensor))]
    with tf.control_dependencies(done):
        return tf.constant(True)


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    wide = tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype
    return tf.cast(tf.cast(gradient, wide) * tf.cast(factor, wide), gradient.dtype)


def _bad(gradients: Sequence[Any]) -> Any:
    """bool, shape [gradients that are not None]: which have a NaN or an infinity."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        raise UsageError("apply_gradients: no variable has a gradient. Is the loss computed from them?")
    values = [tf.convert_to_tensor(one.values if isinstance(one, tf.IndexedSlices) else one) for one in given]
    real = [tf.abs(value) if value.dtype.is_complex else value for value in values]
    return tf.stack([tf.logical_not(tf.reduce_all(tf.math.is_finite(value))) for value in real])
