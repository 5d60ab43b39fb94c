"""A loss scale in `tf.Variable`s: in an eager program, in a `tf.function`, and once for each graph of TF1.

The transition is `mezzo.core.loss_scale.advance`. This file holds its state in variables and takes one step: apply the
gradients or skip, advance the scale, and raise when the patience has run out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import tensorflow as tf

from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale, ScaleArrays, advance, check, on_host, start
from mezzo.core.policy_text import print_loss_scale
from mezzo.tensorflow.switch import in_xla, refuse_xla

Pairs = Sequence[tuple[Any, Any]]
"""Of a gradient (dense, `tf.IndexedSlices` or None) and its variable."""

_READS = "optimizer.loss_scale, optimizer.skipped_steps"


@dataclass(frozen=True)
class Held(ScaleArrays):
    """The variables of one graph, or of the eager program, each of shape (); types in `_VARIABLES`."""

    skipped_steps: Any
    last_step_skipped: Any


# Field -> name in checkpoints and graphs, and type. The first two are those of TensorFlow's and tf_keras's own
# loss-scale optimizers, so that their checkpoints load.
_VARIABLES = {
    "scale": ("current_loss_scale", tf.float32),
    "good_steps": ("good_steps", tf.int64),
    "overflows": ("overflows", tf.int32),
    "stuck": ("stuck", tf.int32),
    "skipped_steps": ("skipped_steps", tf.int64),
    "last_step_skipped": ("last_step_skipped", tf.bool),
}


class LossScaleVariables(tf.__internal__.tracking.Trackable):
    """The state of a loss scale, saved with the object that tracks this one, and the steps of an optimizer with it.

    There is one set of variables per graph of TF1, and one for eager programs and their `tf.function`s; `here()`
    returns the set of the place where it is called.
    """

    def __init__(self, pure: LossScale) -> None:
        self.pure = pure
        self._held: dict[Any, Held] = {}
        # The graphs in which a step was built, in order; None for the eager program.
        self._used: dict[Any, None] = {}
        self._loss_was_scaled = self._gradients_were_unscaled = False
        self.here()

    # The variables

    @property
    def scales(self) -> bool:
        """False for `NoLossScale`."""
        return not isinstance(self.pure, NoLossScale)

    def here(self, for_a_step: bool = False) -> Held:
        """The variables of the graph that is being built, or of the eager program; made when first asked for."""
        with tf.init_scope():
            graph = _graph()
            if for_a_step:
                self._used[graph] = None
            if graph not in self._held:
                self._held[graph] = self._make()
                for name, variable in self._by_name().items():
                    self._handle_deferred_dependencies(name=name, trackable=variable)
        return self._held[graph]

    def _make(self) -> Held:
        values = {"skipped_steps": 0, "last_step_skipped": False} | vars(start(self.pure))
        with tf.name_scope("loss_scale/"):
            return Held(
                **{
                    field: tf.compat.v1.Variable(
                        values[field],
                        name=name,
                        dtype=dtype,
                        trainable=False,
                        use_resource=True,
                        synchronization=tf.VariableSynchronization.AUTO,
                        aggregation=tf.VariableAggregation.NONE,  # every replica comes to the same values
                    )
                    for field, (name, dtype) in _VARIABLES.items()
                }
            )

    def _by_name(self) -> dict[str, Any]:
        held = self.here()
        return {name: getattr(held, field) for field, (name, _) in _VARIABLES.items()}

    def variables(self) -> list[Any]:
        """The variables of `here()`."""
        return list(self._by_name().values())

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return self._by_name() | super()._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        return self._by_name().get(name)

    # Reading them

    def read(self, what: str) -> Held:
        """The variables of `here()`, for reading `what`; none are made.

        Raises:
            UsageError: the steps are in another graph.
        """
        with tf.init_scope():
            graph = _graph()
        if graph in self._held and (graph in self._used or not self._used):
            return self._held[graph]
        others = [other for other in self._used or self._held if other is not None]
        where = f"{others[-1]!r}" if others else "the eager program"
        raise UsageError(
            f"{what}: this optimizer has its loss scale in {where}, and not here. Of a graph of TF1 read it there: "
            f"with graph.as_default(): session.run([{_READS}])."
        )

    def on_host(self, what: str) -> ScaleArrays:
        """The state as numbers, for `what`; synchronizes with the device.

        Raises:
            UsageError: not in an eager program.
        """
        held = self.read(what)
        if not tf.executing_eagerly():
            raise UsageError(
                f"{what} is for eager programs. In a graph of TF1 a Session reads it: session.run([{_READS}])."
            )
        return ScaleArrays(*(float(getattr(held, f.name).numpy()) for f in fields(ScaleArrays)))

    # A loss and its gradients

    def scaled_loss(self, loss: Any) -> Any:
        """S * loss in FP32 at least; of a function without arguments, a function."""
        self._loss_was_scaled = True
        if not self.scales:
            return loss
        if callable(loss):
            return lambda: self.scaled_loss(loss())
        loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < tf.float32.size:  # 65536 is infinite in FP16
            loss = tf.cast(loss, tf.float32)
        return loss * tf.cast(tf.convert_to_tensor(self.here(for_a_step=True).scale), loss.dtype)

    def unscaled(self, gradients: Sequence[Any]) -> list[Any]:
        """gradients * (1 / S), computed in FP32 at least, in the gradient's type; None stays None."""
        self._gradients_were_unscaled = True
        if not self.scales:
            return list(gradients)
        inv_scale = 1.0 / tf.convert_to_tensor(self.here(for_a_step=True).scale)
        return [None if gradient is None else _times(gradient, inv_scale) for gradient in gradients]

    def require_scaled(self) -> None:
        """Raise CallOrderError if the loss was never scaled, or the gradients never unscaled."""
        if not self.scales or (self._loss_was_scaled and self._gradients_were_unscaled):
            return
        fault = (
            "the gradients were unscaled, and the loss was never scaled: they are too small by the loss scale"
        )
        if self._loss_was_scaled:
            fault = "the loss was scaled, and the gradients were never unscaled: they are too large by the loss scale"
        elif not self._gradients_were_unscaled:
            fault = "the loss was never scaled, so that small gradients are lost in fp16"
        raise CallOrderError(
            f"apply_gradients: {fault}. Use optimizer.minimize(...); or take the gradients of "
            "optimizer.get_scaled_loss(loss) and apply optimizer.get_unscaled_gradients(gradients)."
        )

    # A step

    def step(self, grads_and_vars: Pairs, apply: Callable[[Pairs], Any]) -> Any:
        """Apply unscaled gradients, or skip the step if any of them is not finite on any replica.

        Raises:
            UsageError: called in a cross-replica context; or the rewrite is on, and XLA compiles this function.
            LossScaleCollapseError: eagerly, if the patience ran out; in a graph that is an `InvalidArgumentError` with
                the same message (XLA drops assertions: call `check()`).
        """
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

        def agreed(strategy: Any, gradients: list[Any]) -> Any:
            replicas = strategy.extended.call_for_each_replica
            each = replicas(lambda gradients: tf.cast(_bad(gradients), tf.float32), args=(gradients,))
            bad = strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None) > 0
            return self._apply_or_skip(
                bad, names, lambda: strategy.group(replicas(applied, args=(gradients,)))
            )

        return tf.distribute.get_replica_context().merge_call(agreed, args=(gradients,))

    def _apply_or_skip(self, bad: Any, names: Sequence[str], apply: Callable[[], Any]) -> Any:
        """One step; `bad` is bool, shape [n]: whose gradients are NaN or infinite, agreed over replicas."""
        held = self.here(for_a_step=True)
        found_inf = tf.reduce_any(bad)
        before = ScaleArrays(*(tf.convert_to_tensor(getattr(held, f.name)) for f in fields(ScaleArrays)))
        after = advance(self.pure, before, found_inf, tf)
        skipped = tf.convert_to_tensor(held.skipped_steps)
        applied = tf.cond(found_inf, lambda: tf.constant(False), lambda: _done(apply))
        assigned = [
            *(getattr(held, f.name).assign(getattr(after, f.name)) for f in fields(ScaleArrays)),
            held.skipped_steps.assign(skipped + tf.cast(found_inf, skipped.dtype)),
            held.last_step_skipped.assign(found_inf),
        ]
        collapsed = after.stuck >= getattr(self.pure, "patience", 1)
        if tf.executing_eagerly():
            if collapsed:
                raise self._error([name for name, flag in zip(names, bad.numpy()) if flag])
            return None
        with tf.control_dependencies([value for value in assigned if value is not None]):
            stopped = self._stop(collapsed, bad, names)
        return tf.group(applied, *assigned, stopped)

    def _stop(self, collapsed: Any, bad: Any, names: Sequence[str]) -> Any:
        """The assertion that ends a run in a graph whose patience has run out."""
        if in_xla():
            return tf.no_op()

        def raised() -> Any:
            which = tf.strings.reduce_join(tf.boolean_mask(tf.constant(list(names)), bad), separator=", ")
            told = tf.raw_ops.Assert(
                condition=tf.constant(False),
                data=[str(self._error()), "Gradients that are not finite:", which],
            )
            with tf.control_dependencies([told] if told is not None else []):
                return tf.constant(True)

        return tf.cond(collapsed, raised, lambda: tf.constant(False))

    def _error(self, names: Sequence[str] = ()) -> LossScaleCollapseError:
        patience = getattr(self.pure, "patience", 1)
        try:
            check(self.pure, ScaleArrays(self.pure.scale, 0, patience, patience))
        except LossScaleCollapseError as error:
            of = f"Gradients that are not finite: {', '.join(names)}." if names else ""
            return LossScaleCollapseError(str(error), of)
        raise AssertionError(f"{self.pure} has no patience that could run out")


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
        """S * loss, for `tf.GradientTape`; of a function, a function."""
        return self._scaled.scaled_loss(loss)

    scale_loss = get_scaled_loss

    def get_unscaled_gradients(self, grads: Any) -> list[Any]:
        """The gradients of a scaled loss times 1/S; None stays None."""
        return self._scaled.unscaled(list(grads))


def _graph() -> Any:
    """The graph that is being built; None in an eager program."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _done(apply: Callable[[], Any]) -> Any:
    """True, once what `apply` built has run: the branches of a cond must return alike."""
    done = [op for op in tf.nest.flatten(apply()) if isinstance(op, (tf.Operation, tf.Tensor))]
    with tf.control_dependencies(done):
        return tf.constant(True)


def _values(given: Any) -> Any:
    return given.values if isinstance(given, tf.IndexedSlices) else given


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    wide = tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype
    return tf.cast(tf.cast(gradient, wide) * tf.cast(factor, wide), gradient.dtype)


def _bad(gradients: Sequence[Any]) -> Any:
    """bool, shape [gradients that are not None]: which have a NaN or an infinity."""
    values = [tf.convert_to_tensor(_values(gradient)) for gradient in gradients if gradient is not None]
    if not values:
        raise UsageError(
            "apply_gradients: no variable has a gradient. Is the loss computed from the variables?"
        )
    real = [tf.abs(value) if value.dtype.is_complex else value for value in values]
    return tf.stack([tf.logical_not(tf.reduce_all(tf.math.is_finite(value))) for value in real])
