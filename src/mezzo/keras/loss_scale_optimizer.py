"""Loss scaling for any Keras optimizer, on the TensorFlow, JAX and PyTorch backends.

One step, with S the scale that the loss was multiplied by::

    gradients = [float32(g) / S for g in gradients]
    found_inf = any gradient is NaN or infinite, on any replica
    if not found_inf:
        inner_optimizer.apply(gradients)        # clipping, weight decay, averages, accumulation: all unscaled
    loss_scale = loss_scale.next(found_inf)     # core.loss_scale is the specification
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import keras

from mezzo.core import loss_scale as transition
from mezzo.core.errors import CallOrderError, LossScaleCollapseError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale, ScaleArrays, StaticLossScale
from mezzo.core.policy_text import as_loss_scale, print_loss_scale
from mezzo.keras.gradients import apply_or_keep, is_traced, reading_is_free, step_on_all_replicas, unscale

# Bound now: a script or a plugin may put another class in this attribute.
_Keras: Any = keras.optimizers.LossScaleOptimizer

LOOK_EVERY = 50  # steps between checks of the patience on accelerators of PyTorch: each makes the host wait

_REPORTS = ("raise", "warn", "ignore")  # of gradients that were not scaled
# Variables of Keras's wrapper, and the first of ours: iteration, learning_rate, step_counter, dynamic_scale.
_KERAS_OWN = 4
_UNBUILT_INNER = 2  # variables of an inner optimizer before its first step: iteration, learning_rate
# The state that Keras's optimizer has too: its variables' names, in its order, so that what it saved can be loaded.
_KERAS_STATE = {"good_steps": "step_counter", "scale": "dynamic_scale"}
_NAMES_SHOWN = 100


@keras.saving.register_keras_serializable(package="mezzo")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Wraps a Keras optimizer: scales the loss, unscales the gradients, skips steps whose gradients are not finite.

    ::

        model.compile(mezzo.keras.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), "mse")

    `compile` and Keras's callbacks treat it as Keras's own `LossScaleOptimizer`, from which it inherits.

    Args:
        inner_optimizer: the `keras.optimizers.Optimizer` that takes the steps. Clipping, weight decay, averages (EMA)
            and gradient accumulation are set on it, and act on unscaled gradients.
        initial_scale: `init` of the dynamic loss scale, under Keras's name; None leaves 2^16.
        dynamic_growth_steps: its `growth_interval`, under Keras's name; None leaves 2000.
        loss_scale: ``"dynamic"``, what a policy may say (``"dynamic(init=1024,hysteresis=2)"``, ``"none"``,
            ``"2**10"``), a number, or a `DynamicLossScale`, `StaticLossScale` or `NoLossScale` of `mezzo`.
        on_unscaled: if gradients are applied although the scale was never read: "raise", "warn" or "ignore".
        name: of this optimizer.
        **kwargs: not used: give Keras's arguments for optimizers to the inner one.

    A skipped step leaves no trace in trainable weights or inner optimizer; `iterations` counts the others. (The moving
    statistics of a `BatchNormalization`, which the forward pass assigns, stay assigned.) If `patience` steps in a row
    are skipped at the floor, `LossScaleCollapseError` is raised: at once in eager steps; by an assertion in a
    `tf.function` (`InvalidArgumentError`; none under XLA); every 50th step with PyTorch on an accelerator; at the end
    of `fit`; and by `check`.

    Raises:
        UsageError: the inner optimizer is not one, or has a loss scale already; an invalid loss scale.
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
        if isinstance(inner_optimizer, _Keras) or not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"inner_optimizer is {inner_optimizer!r}. Give one without a loss scale, such as "
                "keras.optimizers.Adam(1e-3)."
            )
        constant = inner_optimizer.loss_scale_factor
        if constant is not None:
            warnings.warn(
                f"loss_scale_factor={constant!r} of the inner optimizer is ignored: this class scales the loss. "
                f"To keep that constant, use LossScaleOptimizer(..., loss_scale={constant!r}).",
                stacklevel=2,
            )
        first = _loss_scale_of(loss_scale, initial_scale, dynamic_growth_steps)
        if on_unscaled not in _REPORTS:
            raise UsageError(f"on_unscaled is {on_unscaled!r}. Use one of {', '.join(map(repr, _REPORTS))}.")
        interval = getattr(first, "growth_interval", None)
        super().__init__(inner_optimizer, initial_scale, interval, name=name, **kwargs)
        self._loss_scale = first
        self._patience: int | None = getattr(first, "patience", None)
        self._on_unscaled = on_unscaled
        self._scale_was_read = on_unscaled == "ignore"
        begin = vars(first.arrays())
        for field in [*_KERAS_STATE, *(name for name in begin if name not in _KERAS_STATE)]:
            dtype = "float32" if isinstance(begin[field], float) else "int"
            setattr(self, f"_{field}", self._scalar(_KERAS_STATE.get(field, field), begin[field], dtype))
        self.step_counter = self._good_steps
        self.skipped_steps = self._scalar("skipped_steps", 0)
        self.last_step_skipped = self._scalar("last_step_skipped", 0)
        self.bad_gradients: Any = None
        self._until_check = 0

    def __repr__(self) -> str:
        inner, scale = type(self.inner_optimizer).__name__, print_loss_scale(self._loss_scale)
        return f"LossScaleOptimizer({inner}, loss_scale={scale!r})"

    def _scalar(self, name: str, value: float, dtype: str = "int") -> Any:
        first = keras.initializers.Constant(value)
        return self.add_variable((), first, dtype, aggregation="only_first_replica", name=name)

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the variables, the inner optimizer's too, for these trainable ones."""
        variables = list(var_list)
        if self.bad_gradients is None:
            self.bad_gradients = self.add_variable(
                (len(variables),), "zeros", "int", aggregation="only_first_replica", name="bad_gradients"
            )
        self.inner_optimizer.build(variables)
        super(_Keras, self).build(variables)

    @property
    def scale(self) -> Any:
        """The loss scale S for the next loss: an FP32 variable of shape ().

        Raises:
            CallOrderError: JAX is compiling a function in which S would be a constant.
        """
        self._scale_was_read = True
        if not isinstance(self._loss_scale, (NoLossScale, StaticLossScale)):
            self._check_not_baked_in("optimizer.stateless_scale_loss(optimizer_variables, loss)")
        return self._scale

    @property
    def dynamic_scale(self) -> Any:
        """Keras's name of `scale`."""
        return self.scale

    @property
    def initial_scale(self) -> float:
        """The first S, as a number."""
        self._scale_was_read = True
        return float(self._loss_scale.arrays().scale)

    @initial_scale.setter
    def initial_scale(self, value: float | None) -> None:
        """Nothing: Keras's constructor sets it, and the loss scale has it already."""

    def scale_loss(self, loss: Any) -> Any:
        """The loss times S, in FP32 if it was narrower; raises as `scale` does."""
        return keras.ops.multiply(loss, self.scale)  # in the wider of both formats: the scale is FP32

    def stateless_scale_loss(self, optimizer_variables: Sequence[Any], loss: Any) -> Any:
        """The loss times S, given the values of `optimizer.variables` in its order: for compiled JAX steps.

        Raises:
            UsageError: the number of values is wrong.
        """
        if len(optimizer_variables) != len(self.variables):
            raise UsageError(
                f"{len(optimizer_variables)} values were given for {len(self.variables)} optimizer variables. "
                "Call optimizer.build(model.trainable_variables), then pass the values of all optimizer.variables, in "
                "their order."
            )
        self._scale_was_read = True
        place = next(at for at, variable in enumerate(self.variables) if variable is self._scale)
        return keras.ops.multiply(loss, optimizer_variables[place])

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Unscale the gradients and let the inner optimizer take the step, unless one of them is not finite.

        Args:
            grads: gradients of the scaled loss; None where a variable has none.
            trainable_variables: all or some of those that the optimizer was built for; None means all.

        Raises:
            CallOrderError: the scale was never read; JAX is compiling a function in which the optimizer's variables
                would be constants; the call is outside the replicas of a strategy.
            LossScaleCollapseError: the patience ran out (see the class).
        """
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise UsageError("The optimizer is not built. Call apply(grads, variables).")
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(variables) != len(grads):
            raise UsageError(
                f"{len(grads)} gradients were given for {len(variables)} trainable variables. Give one gradient per "
                "variable, None where there is none."
            )
        self._check_variables_are_known(variables)
        self._check_not_baked_in("optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)")
        if not self._scale_was_read and not isinstance(self._loss_scale, NoLossScale):
            self._report_unscaled()
        if all(gradient is None for gradient in grads):
            self.inner_optimizer.apply(grads, variables)  # which says so
        elif keras.backend.backend() == "tensorflow":
            step_on_all_replicas(grads, variables, self._examine, self._conclude, self.inner_optimizer.apply)
        else:
            unscaled, bad = self._examine(grads, variables)
            self._conclude(lambda: self.inner_optimizer.apply(unscaled, variables), bad)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """`apply` on values: the trainable variables' and the optimizer's after the step. JAX and PyTorch."""
        return super(_Keras, self).stateless_apply(optimizer_variables, grads, trainable_variables)

    def _check_not_baked_in(self, instead: str) -> None:
        """Raise `CallOrderError` if JAX is compiling a function in which the scale is read as a constant."""
        if keras.backend.backend() != "jax" or is_traced(self._scale.value):
            return
        import jax

        # A product of two constants is a tracer only while a program is recorded: `jax.grad` alone computes it at once.
        if is_traced(jax.numpy.multiply(jax.numpy.float32(1), 1)):
            raise CallOrderError(
                "inside a function that JAX compiles, the optimizer's variables are constants: the loss scale would "
                f"never change. Pass the optimizer's variables to the function and use {instead}."
            )

    def _report_unscaled(self) -> None:
        message = (
            "The loss was not scaled, so the update would be too small: apply() divides gradients by the loss scale "
            f"{transition.power_text(self._loss_scale.arrays().scale)}. Take gradients of optimizer.scale_loss(loss); "
            "in a compiled JAX step, of optimizer.stateless_scale_loss(optimizer_variables, loss). If they are scaled "
            "otherwise, construct LossScaleOptimizer(..., on_unscaled='ignore')."
        )
        if self._on_unscaled == "raise":
            raise CallOrderError(message)
        self._scale_was_read = True
        warnings.warn(message, stacklevel=3)

    def _examine(self, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """The unscaled gradients; and int [trainable variables], 1 where one is not finite."""
        accumulates = bool(self.inner_optimizer.gradient_accumulation_steps)
        unscaled, flags = unscale(grads, variables, self._scale.value, in_variables_format=accumulates)
        each: list[Any] = [None] * len(self._trainable_variables)
        for variable, flag in zip(variables, flags):
            each[self._get_variable_index(variable)] = flag
        none = keras.ops.zeros_like(next(flag for flag in flags if flag is not None))
        stacked = keras.ops.stack([none if flag is None else flag for flag in each])
        return unscaled, keras.ops.cast(stacked, self.bad_gradients.dtype)

    def _conclude(self, step: Callable[[], None], bad: Any) -> None:
        """Take the step, or skip it if `bad`, int [trainable variables], is above 0 anywhere; advance the scale."""
        found_inf = keras.ops.any(bad > 0)
        apply_or_keep(self.inner_optimizer, step, found_inf)
        one = keras.ops.cast(found_inf, self.skipped_steps.dtype)
        after = self._loss_scale.advance(self._arrays(), found_inf, keras.ops)
        bad_now = keras.ops.where(found_inf, keras.ops.minimum(bad, 1), self.bad_gradients.value)
        skipped = self.skipped_steps.value + one
        ours = (self.skipped_steps, skipped), (self.last_step_skipped, one), (self.bad_gradients, bad_now)
        for variable, value in (*self._state(after), *ours):
            self.assign(variable, value)
        if self._patience is not None:
            self._check_if_due(found_inf)

    def check(self) -> None:
        """Raise `LossScaleCollapseError` if `patience` steps in a row were skipped at the floor, or under a constant
        scale. It names the variables whose gradients are not finite. Synchronizes with the device.
        """
        pure: Any = self._loss_scale
        if self._patience is None or (stuck := int(_number(self._stuck))) < self._patience:
            return
        flags = [] if self.bad_gradients is None else self.bad_gradients.numpy()
        bad = [_path(variable) for variable, flag in zip(self._trainable_variables, flags) if flag]
        whose = ", ".join(bad) or "unknown variables (the state was loaded)"
        error = LossScaleCollapseError(f"gradients of {whose} are NaN or infinite: {pure.collapsed(stuck)}")
        raise error.going_on("optimizer.reset_loss_scale()")

    def _check_if_due(self, found_inf: Any) -> None:
        """Check the patience where the host has waited for this step anyway, else rarely; in a graph assert it."""
        backend = keras.backend.backend()
        if backend == "tensorflow":
            import tensorflow as tf

            due = not tf.inside_function()
            if not due:
                pure: Any = self._loss_scale
                names = [_path(variable) for variable in self._trainable_variables]
                shown = ", ".join(names[:_NAMES_SHOWN] + ["..."] * (len(names) > _NAMES_SHOWN))
                text = (
                    f"LossScaleCollapseError: {pure.collapsed(self._patience)} optimizer.check() gives details. A 1 "
                    f"marks a gradient that is not finite, of these variables: {shown}:"
                )
                fine, data = self._stuck.value < self._patience, [text, self.bad_gradients.value]
                tf.debugging.Assert(fine, data, summarize=_NAMES_SHOWN)  # XLA drops it
        elif backend == "jax":
            due = not is_traced(found_inf)
        elif not (due := reading_is_free(found_inf)):
            import torch

            if not torch.compiler.is_compiling():
                self._until_check = (self._until_check or LOOK_EVERY) - 1
                due = not self._until_check
        if due:
            self.check()

    def machine(self) -> LossScale:
        """The loss scale as a value of `mezzo`, with its current state. Synchronizes with the device."""
        return transition.on_host(self._loss_scale, self._arrays(_number))

    def reset_loss_scale(self) -> None:
        """Set the loss scale back to what the constructor was given."""
        for variable, value in self._state(self._loss_scale.arrays()):
            variable.assign(value)

    def _arrays(self, of: Callable[[Any], Any] = lambda variable: variable.value) -> ScaleArrays:
        begin = self._loss_scale.arrays()
        return replace(begin, **{name: of(getattr(self, f"_{name}")) for name in vars(begin)})

    def _state(self, held: ScaleArrays) -> list[tuple[Any, Any]]:
        """Each variable of the loss scale, and its value in these arrays."""
        return [(getattr(self, f"_{name}"), value) for name, value in vars(held).items()]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """The end of `fit`: the inner optimizer's averages become the weights, and the patience is checked."""
        on_jax = keras.backend.backend() == "jax"
        if on_jax and not all(map(_has_value, [*var_list, *self.variables])):
            return  # Keras calls this also when a step failed
        self.inner_optimizer.finalize_variable_values(var_list)
        if on_jax and self.inner_optimizer.use_ema:
            _give_own_buffers(var_list, self.inner_optimizer.variables)
        self.check()

    def load_own_variables(self, store: Any) -> None:
        """Load what this class (also before its first step) or Keras's LossScaleOptimizer saved; a scale beyond the
        bounds becomes the bound.
        """
        own, inner, saved = self._variables, self.inner_optimizer.variables, len(store.keys())
        # Before the first step there are only scalars.
        if self.built and saved == len(own) - 1 + _UNBUILT_INNER and not store[str(saved - 1)].shape:
            own, inner = [one for one in own if one is not self.bad_gradients], inner[:_UNBUILT_INNER]
        elif saved == _KERAS_OWN + len(inner):
            for variable in own[_KERAS_OWN:]:
                variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
            own = own[:_KERAS_OWN]
        if saved != len(own) + len(inner):
            super().load_own_variables(store)  # which warns
            return
        for at, variable in enumerate([*own, *inner]):
            variable.assign(store[str(at)])
        self._scale.assign(self._loss_scale.allowed(_number(self._scale)))

    def get_config(self) -> dict[str, Any]:
        """The settings, without state; if Keras's own optimizer has names for all of them, in its names."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **_setting_of(self._loss_scale),
            **({} if self._on_unscaled == "raise" else {"on_unscaled": self._on_unscaled}),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """The optimizer of a configuration, ours or that of Keras's own LossScaleOptimizer."""
        return super().from_config(dict(config), custom_objects)  # Keras takes the inner optimizer out of it


def _number(variable: Any) -> float:
    return float(variable.numpy())  # of a variable of several replicas too


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)  # a tf.Variable has no path


def _loss_scale_of(
    loss_scale: LossScale | float | str | dict[str, Any] | None, init: float | None, interval: int | None
) -> LossScale:
    given: dict[str, Any] = {"init": init, "growth_interval": interval}
    given = {name: value for name, value in given.items() if value is not None}
    if loss_scale is None or (given and loss_scale != "dynamic"):
        raise UsageError(
            f"LossScaleOptimizer: loss_scale is {loss_scale!r}. Give 'none' for no loss scale; initial_scale and "
            "dynamic_growth_steps set a dynamic one: 'dynamic(init=1024,growth_interval=100)' says both."
        )
    if isinstance(loss_scale, dict):
        return transition.from_state_dict(loss_scale)
    if given:
        return DynamicLossScale(**given)
    return cast(LossScale, as_loss_scale(loss_scale, "LossScaleOptimizer"))


def _setting_of(loss_scale: LossScale) -> dict[str, Any]:
    """The constructor's arguments for this loss scale: Keras's two where they suffice."""
    if isinstance(loss_scale, DynamicLossScale):
        init, interval = loss_scale.init, loss_scale.growth_interval
        if loss_scale == DynamicLossScale(init=init, growth_interval=interval):
            return {"initial_scale": init, "dynamic_growth_steps": interval}
    return {"loss_scale": loss_scale.state_dict()}


def _give_own_buffers(variables: Sequence[Any], others: Sequence[Any]) -> None:
    """Copy shared buffers: Keras makes the average's buffer the weight's, and the next `fit` would donate it twice."""
    import jax.numpy as jnp

    held = {id(one.value) for one in others}
    for variable in variables:
        if id(variable.value) in held:
            variable.assign(jnp.array(variable.value, copy=True))


def _has_value(variable: Any) -> bool:
    """Whether a JAX variable holds a value: a trainer takes them out, and a failed step has given them away."""
    value = variable._value
    return value is not None and not value.is_deleted()
