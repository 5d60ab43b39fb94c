"""A loss scale in `tf.Variable`s: in an eager program, in a `tf.function`, and once for each graph of TF1.

The machine is `mezzo.core.loss_scale`; here is only where its four numbers live, and one step: skip or apply, move
on, and stop with a message when the patience has run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import tensorflow as tf

from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import LossScale, NoLossScale, ScaleArrays, advance, check, on_host, start
from mezzo.tensorflow.xla import in_xla


@dataclass(frozen=True)
class Held(ScaleArrays):
    """The variables of one graph, or of the eager program, each of shape (): the machine's four, and two that count.

    Args:
        good_steps: int64 here, as in tf_keras's checkpoints.
        skipped_steps: int64, steps skipped so far.
        last_step_skipped: bool, whether the last step was.
    """

    skipped_steps: Any
    last_step_skipped: Any


# Field -> name in a checkpoint and in a graph, and type. The first two are those of TensorFlow's and tf_keras's own
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
    """The moving parts of a loss scale, saved with whatever tracks this object.

    A variable belongs to a graph, so there is a set of them for each graph of TF1 in which this is used, and one for
    eager programs and their `tf.function`s; `here()` is the one that counts where it is called.

    Args:
        pure: the loss scale, with the state to begin with.

    Raises:
        UsageError: the loss scale has no form on arrays.
    """

    def __init__(self, pure: LossScale) -> None:
        self.pure = pure
        self._held: dict[Any, Held] = {}
        self._scale_read: dict[Any, Any] = {}  # graph -> S, one tensor for whoever reads it
        self._used: dict[
            Any, None
        ] = {}  # the graphs with a part of a step, in order; None for the eager program
        self.here()

    @property
    def scales(self) -> bool:
        """Whether there is anything to do: False for `NoLossScale`."""
        return not isinstance(self.pure, NoLossScale)

    def here(self) -> Held:
        """The variables of the graph that is being built, or of the eager program; made when first asked for."""
        with tf.init_scope():
            graph = _graph()
            if graph not in self._held:
                self._held[graph] = self._make()
                if graph is not None and not tf.distribute.has_strategy():
                    self._scale_read[graph] = tf.convert_to_tensor(self._held[graph].scale)
                for field, variable in self._named(self._held[graph]):
                    self._handle_deferred_dependencies(name=_VARIABLES[field][0], trackable=variable)
        return self._held[graph]

    def _here_for_a_step(self) -> Held:
        """The variables of `here()`, where a loss is scaled, gradients are unscaled or a step is taken."""
        with tf.init_scope():
            self._used[_graph()] = None
        return self.here()

    def read(self, what: str) -> Held:
        """The variables of `here()` for who reads `what` of them; none are made.

        Raises:
            UsageError: this graph, or the eager program, has none, or no part of a step: another one has.
        """
        with tf.init_scope():
            graph = _graph()
        if graph in self._held and (graph in self._used or not self._used):
            return self._held[graph]
        here = "the eager program" if graph is None else f"{graph!r}"
        others = [other for other in self._used or self._held if other is not None]
        if not others:
            raise UsageError(
                f"{what}: it is read in {here}, and this optimizer has its loss scale in the eager program, and none "
                "here before it computes or applies gradients here. Call optimizer.minimize(loss) first, or leave the "
                "graph."
            )
        raise UsageError(
            f"{what}: it is read in {here}, and this optimizer has its loss scale in {others[-1]!r}. Read it there: "
            "with graph.as_default(): session.run([optimizer.loss_scale, optimizer.skipped_steps])."
        )

    def _make(self) -> Held:
        begin = start(self.pure)
        values = {"skipped_steps": 0, "last_step_skipped": False} | vars(begin)
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

    @staticmethod
    def _named(held: Held) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(held, field.name)) for field in fields(held))

    def variables(self) -> list[Any]:
        """The variables of `here()`."""
        return [variable for _, variable in self._named(self.here())]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        mine = {_VARIABLES[field][0]: variable for field, variable in self._named(self.here())}
        return mine | super()._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        mine = {_VARIABLES[field][0]: variable for field, variable in self._named(self.here())}
        return mine.get(name)

    def scale(self) -> Any:
        """S for the next step, to scale or unscale by: FP32 tensor, shape ()."""
        return tf.convert_to_tensor(self._here_for_a_step().scale)

    def scale_to_read(self) -> Any:
        """S for the next step, for whoever asks from outside: in a graph of TF1 the same tensor each time.

        Raises:
            UsageError: see `read`.
        """
        held = self.read("loss_scale")
        known = None if tf.executing_eagerly() else self._scale_read.get(_graph())
        return tf.convert_to_tensor(held.scale) if known is None else known

    def step(self, bad: Any, names: Sequence[str], apply: Callable[[], Any]) -> Any:
        """Apply the gradients, or skip them if any is not finite, and advance the scale.

        The naive code it equals::

            found_inf = any(bad)
            if not found_inf:
                apply()
            pure = pure.next(Observation(found_inf))

        In a graph the patience's end is an `InvalidArgumentError` of TensorFlow's with the same message; in a function
        that XLA compiles assertions are not run, and `check()` says it.

        Args:
            bad: bool, shape [n]: whose gradients are NaN or infinite, agreed over replicas.
            names: of those n variables.
            apply: applies the gradients; its operations are built inside a branch.

        Returns:
            An operation that does all of it, in a graph; None in an eager program.

        Raises:
            LossScaleCollapseError: eagerly, if the patience ran out.
        """
        held = self._here_for_a_step()
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

    def machine(self) -> LossScale:
        """The pure loss scale on the host; waits for the device.

        Raises:
            UsageError: a graph is being built, whose variables only a Session reads; or see `read`.
        """
        return on_host(self.pure, self._on_host("machine()"))

    def check(self) -> None:
        """Raise if the patience ran out; waits for the device.

        Raises:
            LossScaleCollapseError: it did.
            UsageError: a graph is being built, whose variables only a Session reads; or see `read`.
        """
        check(self.pure, self._on_host("check()"))

    def _on_host(self, what: str) -> ScaleArrays:
        held = self.read(what)
        if not tf.executing_eagerly():
            raise UsageError(
                f"{what} is for eager programs, outside of a tf.function, and a graph is being built here. Of a graph "
                "of TF1 a Session reads it: session.run([optimizer.loss_scale, optimizer.skipped_steps])."
            )
        return ScaleArrays(*(float(getattr(held, f.name).numpy()) for f in fields(ScaleArrays)))


def _graph() -> Any:
    """The graph that is being built; None in an eager program."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _done(apply: Callable[[], Any]) -> Any:
    """True, once what `apply` built has run: the branches of a cond must return alike."""
    done = [op for op in tf.nest.flatten(apply()) if isinstance(op, (tf.Operation, tf.Tensor))]
    with tf.control_dependencies(done):
        return tf.constant(True)
