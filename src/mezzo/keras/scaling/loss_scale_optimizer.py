"""Loss scaling for any Keras optimizer, on the TensorFlow, JAX and PyTorch backends: `mezzo.keras.LossScaleOptimizer`.

One step, with S the scale that the loss was multiplied by::

    gradients = [float32(g) / S for g in gradients]
    found_inf = any gradient is NaN or infinite, on any replica
    if not found_inf:
        inner_optimizer.apply(gradients)        # clipping, weight decay, averages, accumulation: all unscaled
    loss_scale = loss_scale.next(found_inf)     # core.loss_scale is the specification

It is a `keras.optimizers.LossScaleOptimizer`, so that `compile` and Keras's callbacks see what they look for. Of what
Keras's does, it keeps the arguments that are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from mezzo.core import loss_scale as scale_machine
from mezzo.core.errors import LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, ScaleArrays
from mezzo.core.scale_numbers import power_text
from mezzo.keras.scaling import fit_end
from mezzo.keras.scaling.apply_or_keep import apply_or_keep
from mezzo.keras.scaling.gradients import unscale
from mezzo.keras.scaling.machine_setting import machine_of, setting_of
from mezzo.keras.scaling.patience import Looks, assert_in_graph, patience_of
from mezzo.keras.scaling.saved_state import allowed, is_keras_state, load_keras_state
from mezzo.keras.scaling.scale_use import ScaleUse, check_not_baked_in

# By its name of now: a script or a plugin may put another class in the place of that attribute.
_Keras: Any = keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable(package="mezzo")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Wraps an optimizer: scales the loss, unscales the gradients, leaves out steps that are not finite.

    Args:
        inner_optimizer: the `keras.optimizers.Optimizer` that takes the steps. Clipping, weight decay, averages (EMA)
            and gradient accumulation are set on it, and act on unscaled gradients.
        initial_scale: of the dynamic machine: the first S. Keras's name for `init`; None leaves 2^16.
        dynamic_growth_steps: of the dynamic machine: good steps in a row that let S grow. Keras's name for
            `growth_interval`; None leaves 2000.
        loss_scale: ``"dynamic"``, what a policy may say (``"dynamic(init=1024,hysteresis=2)"``, ``"none"``,
            ``"2**10"``), a number, or a `DynamicLossScale`, `StaticLossScale` or `NoLossScale` of `mezzo`.
        on_unscaled: what to do where gradients are applied and nobody ever asked for the scale: "raise", "warn" or
            "ignore".
        name: of this optimizer.
        **kwargs: none: Keras's arguments for any optimizer belong to the inner one.

    A step whose gradients are not finite leaves no trace in trainable weights or inner optimizer; `iterations` counts
    the others. (What layers write on the way forward is written: the moving statistics of a `BatchNormalization`.)
    If steps are skipped at the floor `patience` times in a row, `LossScaleCollapseError` is raised: at once where steps
    are taken eagerly; by an assertion in a `tf.function` (`InvalidArgumentError`; none under XLA); every 50th step with
    PyTorch on an accelerator; at the end of `fit` everywhere; whenever `check` is called.

    Raises:
        UsageError: an inner optimizer that is none, or wraps one for a loss scale already; a loss scale that is none.
        ValueError: arguments that belong to the inner optimizer.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        loss_scale: LossScale | float | str | dict[str, Any] = "dynamic",
        on_unscaled: str = "raise",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check_inner(inner_optimizer)
        machine = machine_of(loss_scale, initial_scale, dynamic_growth_steps)
        use = ScaleUse(on_unscaled)
        super().__init__(
            inner_optimizer, initial_scale, getattr(machine, "growth_interval", None), name=name, **kwargs
        )
        self._machine, self._use = machine, use
        begin = scale_machine.start(machine)
        # The first two in the order in which Keras's own has them, for what it saved.
        self.step_counter = self._scalar("step_counter", begin.good_steps)
        self._scale = self._scalar("dynamic_scale", begin.scale, "float32")
        self._overflows = self._scalar("overflows", begin.overflows)
        self._stuck = self._scalar("stuck", begin.stuck)
        self.skipped_steps = self._scalar("skipped_steps", 0)
        self.last_step_skipped = self._scalar("last_step_skipped", 0)
        self.bad_gradients: Any = None
        self._looks = Looks()

    def _scalar(self, name: str, value: float, dtype: str = "int") -> Any:
        # All replicas write the same.
        return self.add_variable(
            (), keras.initializers.Constant(value), dtype, aggregation="only_first_replica", name=name
        )

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the variables, the inner optimizer's too, for these trainable ones.

        Raises:
            UsageError: JAX, where an optimizer steps all of its variables or none, and the inner one has others.
        """
        variables = list(var_list)
        built = len(getattr(self.inner_optimizer, "_trainable_variables", ()))
        if self.inner_optimizer.built and built != len(variables) and keras.backend.backend() == "jax":
            raise UsageError(
                f"{type(self.inner_optimizer).__name__} was built for {built} trainable variables, and now "
                f"{len(variables)} are trained: layers were frozen or thawed since. Make a new optimizer, and compile "
                "with that."
            )
        if self.bad_gradients is None:
            self.bad_gradients = self.add_variable(
                (len(variables),), "zeros", "int", aggregation="only_first_replica", name="bad_gradients"
            )
        self.inner_optimizer.build(variables)
        super(_Keras, self).build(variables)

    # What the loss is multiplied by

    @property
    def scale(self) -> Any:
        """S for the next loss: an FP32 variable of shape ().

        Raises:
            CallOrderError: JAX is compiling a function in which S would be a constant.
        """
        self._use.asked()
        if isinstance(self._machine, DynamicLossScale):
            check_not_baked_in(self._scale, "optimizer.stateless_scale_loss(optimizer_variables, loss)")
        return self._scale

    @property
    def dynamic_scale(self) -> Any:
        """Keras's name for `scale`."""
        return self.scale

    @property
    def initial_scale(self) -> float:
        """The first S, as a number."""
        self._use.asked()
        return float(scale_machine.start(self._machine).scale)

    @initial_scale.setter
    def initial_scale(self, value: float | None) -> None:
        if hasattr(self, "_machine"):
            raise UsageError(
                f"initial_scale = {value!r}: the first scale is settled when the optimizer is made. "
                "Give it to LossScaleOptimizer(initial_scale=...)."
            )

    def scale_loss(self, loss: Any) -> Any:
        """The loss times S, in FP32 if it was narrower (a loss of 1 in fp16 times 2^16 is infinite).

        Raises:
            CallOrderError: JAX is compiling a function in which S would be a constant.
        """
        return keras.ops.multiply(loss, self.scale)  # in the wider of both formats: the scale is FP32

    def stateless_scale_loss(self, optimizer_variables: Sequence[Any], loss: Any) -> Any:
        """The loss times the S that is among these values of the optimizer's variables: for compiled JAX steps.

        Args:
            optimizer_variables: the values of `optimizer.variables`, in its order.
            loss: shape ().

        Raises:
            UsageError: there are not as many.
        """
        if len(optimizer_variables) != len(self.variables):
            raise UsageError(
                f"{len(optimizer_variables)} values were given for {len(self.variables)} optimizer variables. "
                "Build the optimizer, optimizer.build(model.trainable_variables), and hand over the values of all of "
                "optimizer.variables, in its order."
            )
        self._use.asked()
        place = next(at for at, variable in enumerate(self._variables) if variable is self._scale)
        return keras.ops.multiply(loss, optimizer_variables[place])

    # The step

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Unscale the gradients and let the inner optimizer take the step, unless one of them is not finite.

        Args:
            grads: gradients of the scaled loss; None where a variable has none.
            trainable_variables: what they are of, all or some of those the optimizer was built for; None means all.

        Raises:
            CallOrderError: nobody ever asked for the scale; JAX is compiling a function in which the optimizer's
                variables would be constants; the call is outside the replicas of a strategy.
            LossScaleCollapseError: the patience ran out (see the class).
        """
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise UsageError(
                    "apply(grads) cannot know which variables the gradients are of. Call apply(grads, variables), "
                    "or optimizer.build(variables) first."
                )
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(variables) != len(grads):
            raise UsageError(f"{len(grads)} gradients were given for {len(variables)} trainable variables")
        self._check_variables_are_known(variables)
        check_not_baked_in(
            self._scale, "optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)"
        )
        if not isinstance(self._machine, NoLossScale):
            self._use.check_scaled(power_text(scale_machine.start(self._machine).scale))
        if all(gradient is None for gradient in grads):
            self.inner_optimizer.apply(grads, variables)  # which says so
        elif keras.backend.backend() == "tensorflow":
            from mezzo.keras.scaling.replicas import step_on_all

            step_on_all(grads, variables, self._examine, self._conclude, self.inner_optimizer.apply)
        else:
            unscaled, bad = self._examine(grads, variables)
            self._conclude(lambda: self.inner_optimizer.apply(unscaled, variables), bad)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """`apply` on values: returns the trainable variables' and the optimizer's after the step. JAX and PyTorch.

        Raises:
            ValueError: the TensorFlow backend, where Keras has none; no `build` before; a wrong number of values.
        """
        return super(_Keras, self).stateless_apply(optimizer_variables, grads, trainable_variables)

    def _examine(self, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """The unscaled gradients; and int [trainable variables], 1 where one is not finite."""
        unscaled, flags = unscale(
            grads,
            variables,
            self._scale.value,
            in_variables_format=bool(self.inner_optimizer.gradient_accumulation_steps),
        )
        each: list[Any] = [None] * len(self._trainable_variables)
        for variable, flag in zip(variables, flags):
            each[self._get_variable_index(variable)] = flag
        some = next(flag for flag in flags if flag is not None)
        none = keras.ops.zeros_like(some)
        stacked = keras.ops.stack([none if flag is None else flag for flag in each])
        return unscaled, keras.ops.cast(stacked, self.bad_gradients.dtype)

    def _conclude(self, step: Callable[[], None], bad: Any) -> None:
        """Take the step or leave it, and move the loss scale.

        Args:
            step: the inner optimizer's.
            bad: int [trainable variables], above 0 where a gradient is not finite, on any replica.
        """
        found_inf = keras.ops.any(bad > 0)
        apply_or_keep(self.inner_optimizer, step, found_inf)
        one = keras.ops.cast(found_inf, self.skipped_steps.dtype)
        after = scale_machine.advance(self._machine, self._arrays(), found_inf, keras.ops)
        for variable, value in (
            (self._scale, after.scale),
            (self.step_counter, after.good_steps),
            (self._overflows, after.overflows),
            (self._stuck, after.stuck),
            (self.skipped_steps, self.skipped_steps.value + one),
            (self.last_step_skipped, one),
            (
                self.bad_gradients,
                keras.ops.where(found_inf, keras.ops.minimum(bad, 1), self.bad_gradients.value),
            ),
        ):
            self.assign(variable, value)
        if patience_of(self._machine) is None:
            return
        if self._looks.due(found_inf):
            self.check()
        names = [_path(variable) for variable in self._trainable_variables]
        assert_in_graph(self._machine, self._stuck.value, self.bad_gradients.value, names)

    # Patience

    def check(self) -> None:
        """Nothing, unless the patience ran out; waits for the device.

        Raises:
            LossScaleCollapseError: `patience` steps in a row were skipped at the floor, or under a constant scale. It
                names the variables whose gradients are not finite.
        """
        patience = patience_of(self._machine)
        if patience is None or _number(self._stuck) < patience:
            return
        try:
            scale_machine.check(self._machine, self._arrays(_number))
        except LossScaleCollapseError as error:
            whose = ", ".join(self._bad_names()) or "no variable, as it was loaded"
            collapse = LossScaleCollapseError(f"gradients that are not finite, those of {whose}: {error}")
            raise collapse.going_on("call optimizer.reset_loss_scale()") from None

    def _bad_names(self) -> list[str]:
        if self.bad_gradients is None:
            return []
        flags = self.bad_gradients.numpy()
        return [_path(variable) for variable, flag in zip(self._trainable_variables, flags) if flag]

    # State

    def machine(self) -> LossScale:
        """The loss scale as a value of `mezzo`, with the state it has now; waits for the device."""
        return scale_machine.on_host(self._machine, self._arrays(_number))

    def reset_loss_scale(self) -> None:
        """Start the loss scale anew, as it was given to the constructor."""
        begin = scale_machine.start(self._machine)
        for variable, value in (
            (self._scale, begin.scale),
            (self.step_counter, begin.good_steps),
            (self._overflows, begin.overflows),
            (self._stuck, begin.stuck),
        ):
            variable.assign(value)

    def _arrays(self, of: Callable[[Any], Any] = lambda variable: variable.value) -> ScaleArrays:
        return ScaleArrays(*map(of, (self._scale, self.step_counter, self._overflows, self._stuck)))

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """The end of `fit`: the inner optimizer's averages become the weights, and the patience is looked at.

        Of a `fit` that fails already, the error is let through.

        Raises:
            LossScaleCollapseError: as `check`.
        """
        if fit_end.finalize(self.inner_optimizer, var_list, self._stuck):
            self.check()

    def load_own_variables(self, store: Any) -> None:
        """Take over what this class saved, or Keras's own LossScaleOptimizer around the same inner optimizer.

        A scale beyond this machine's bounds becomes the bound; a constant scale stays what it was set to.
        """
        own, inner = self._variables, self.inner_optimizer.variables
        if is_keras_state(store, len(own), len(inner)):
            load_keras_state(own, inner, store)
        else:
            super().load_own_variables(store)
        self._scale.assign(allowed(self._machine, _number(self._scale)))

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same optimizer from: settings, no state.

        Where Keras's own optimizer has a word for all that is set, it is Keras's configuration, which it can read.
        """
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        unscaled = self._use.on_unscaled
        return {
            "name": self.name,
            "inner_optimizer": inner,
            **setting_of(self._machine),
            **({} if unscaled == "raise" else {"on_unscaled": unscaled}),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """The optimizer of a configuration, ours or that of Keras's own LossScaleOptimizer."""
        settings = dict(config)
        inner = keras.saving.deserialize_keras_object(
            settings.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **settings)


def _number(variable: Any) -> float:
    return float(variable.numpy())  # of a variable of several replicas too


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)  # a tf.Variable has no path


def _check_inner(inner: Any) -> None:
    if isinstance(inner, _Keras):
        raise UsageError(
            f"the inner optimizer is a {type(inner).__name__}: the loss would be scaled twice. "
            "Hand over the optimizer that it wraps, its .inner_optimizer."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise UsageError(
            f"the inner optimizer is {inner!r}. Give a keras.optimizers.Optimizer, for instance "
            "keras.optimizers.Adam(1e-3); keras.optimizers.get(name) makes one from its name."
        )
    if inner.loss_scale_factor is not None:
        warnings.warn(
            f"loss_scale_factor={inner.loss_scale_factor!r} of the inner optimizer is switched off: the scale of "
            "LossScaleOptimizer stands in its place. "
            f"For that constant, give loss_scale={inner.loss_scale_factor!r} here.",
            stacklevel=3,
        )
