"""What `model.compile` does under a plan: the loss scale around the optimizer, and a look at whether the plan holds.

Of a model whose layers are all known the look is at `compile`; else at the first loss, when every layer has been called
and nothing has been learnt yet; of a model whose `train_step` never asks Keras for a loss, when the first step is over.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.trainers.trainer import Trainer  # what compile belongs to; Keras has no public name for it

from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mezzo.core.policy_text import print_loss_scale
from mezzo.keras.dtypes import SIXTEEN_BITS
from mezzo.keras.policy import outputs
from mezzo.keras.policy.layers import walk
from mezzo.keras.policy.plan import KerasPlan
from mezzo.keras.policy.plan_check import check_plan
from mezzo.keras.policy.planned_name import plan_behind
from mezzo.scripts.patches import Patches

_Scaled = keras.optimizers.LossScaleOptimizer


@dataclass(frozen=True)
class _Unseen:
    """A compiled model that is still to be looked at: its plan, and whether its layers were looked at already."""

    plan: KerasPlan
    checked: bool


_UNSEEN: WeakKeyDictionary[Any, _Unseen] = WeakKeyDictionary()
# Such a model -> what it was last called with, and what it gave: shapes and dtypes, no tensors.
_CALLED: WeakKeyDictionary[Any, tuple[Any, list[outputs.Output]]] = WeakKeyDictionary()


# The plan in force. Another one's functions may still be called, by someone who replaced them and calls them in turn.
_in_force: KerasPlan | None = None


def watch(patches: Patches, in_force: KerasPlan) -> None:
    """From here on `compile` acts under a plan: the model's own, or this one; until the patches are undone."""
    global _in_force
    _in_force = in_force
    patches.set(Trainer, "compile", _compiling(Trainer.compile, in_force))
    for name in ("compute_loss", "_compute_loss"):  # Keras's steps call the second, a user's own the first
        patches.set(Trainer, name, _first_looking(getattr(Trainer, name)))
    patches.set(Trainer, "_aggregate_additional_loss", _in_fp32(Trainer._aggregate_additional_loss))
    patches.set(keras.Model, "__call__", _noting(keras.Model.__call__))
    patches.set(keras.Model, "make_train_function", _looking_after(keras.Model.make_train_function))


def leave() -> None:
    """No plan is in force."""
    global _in_force
    _in_force = None
    _UNSEEN.clear()
    _CALLED.clear()


def _compiling(compile_model: Any, in_force: KerasPlan) -> Any:
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def compiling(model: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(model, *args, **kwargs).arguments if _in_force is in_force else None
        except TypeError:  # Keras says it
            given = None
        if given is None:
            compile_model(model, *args, **kwargs)
            return
        plan = plan_behind(model.dtype_policy) or in_force
        optimizer = keras.optimizers.get(given.get("optimizer", "rmsprop"))
        scaled = optimizer
        if _computes_in_16_bits(model) and given.get("auto_scale_loss", True):
            scaled = _scaled(optimizer, plan, _scale_for(model, plan))
            given["auto_scale_loss"] = False  # or Keras wraps it where the plan says none
        given["optimizer"] = scaled
        _UNSEEN.pop(model, None)
        known = _is_known(model)
        if known:
            check_plan(model, plan)
        del given[next(iter(given))]  # the model: methods may call it self
        compile_model(model, **given)
        # As Keras does with its own wrapper: a saved model holds the optimizer that was given, and loads without Mezzo.
        model._compile_config.config["optimizer"] = optimizer
        if not (known and _look_at_outputs(model)):
            _UNSEEN[model] = _Unseen(plan, checked=known)

    return compiling


def _scale_for(model: Any, plan: KerasPlan) -> LossScale:
    """The plan's loss scale; a dynamic one for layers in float16 that are not of a plan that has any."""
    foreign = "mixed_float16" not in plan.policies and any(
        layer.compute_dtype == "float16" for _, layer in walk(model)
    )
    return DynamicLossScale() if foreign and isinstance(plan.loss_scale, NoLossScale) else plan.loss_scale


def _scaled(optimizer: Any, plan: KerasPlan, loss_scale: LossScale) -> Any:
    """The optimizer in Mezzo's loss scale, if there is to be one."""
    from mezzo.keras.scaling.loss_scale_optimizer import LossScaleOptimizer

    if optimizer is None or isinstance(loss_scale, NoLossScale) or isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if isinstance(optimizer, _Scaled):
        warnings.warn(
            f"set_policy({plan.precision!r}): compile was given Keras's own LossScaleOptimizer, which stays as it is. "
            f"For Mezzo's, give compile the optimizer inside it, or write mezzo.keras.LossScaleOptimizer(optimizer, "
            f'loss_scale="{print_loss_scale(loss_scale)}").',
            UserWarning,
            stacklevel=3,
        )
        return optimizer
    return LossScaleOptimizer(optimizer, loss_scale=loss_scale)


def _computes_in_16_bits(model: Any) -> bool:
    """Whether any layer does, or may: one that takes its policy from a plan when it is built."""
    layers = [layer for _, layer in walk(model)] or [model]
    return any(
        layer.compute_dtype in SIXTEEN_BITS or (plan_behind(layer.dtype_policy) and not layer.built)
        for layer in (*layers, *([] if _is_known(model) else [model]))
    )


def _is_known(model: Any) -> bool:
    """Whether every layer of a model has been made and called, as far as one can tell before it runs."""
    if outputs.inputs_of(model) is not None:
        return True
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def _look_at_outputs(model: Any) -> bool:
    """Warn of 16-bit outputs that a loss reads; False if they can't be told yet."""
    if outputs.inputs_of(model) is None:
        return False
    if not any(tensor.dtype in SIXTEEN_BITS for tensor in keras.tree.flatten(model.outputs)):
        return False  # as layers say of themselves: the first loss tells
    try:
        found = outputs.traced_outputs(model)
    except Exception:  # it takes what one cannot guess (a size that is left open): the first loss tells
        return False
    _warn(model, found)
    return True


def _warn(model: Any, found: list[outputs.Output]) -> None:
    read = outputs.read_by_a_loss(model, [output.name for output in found])
    for output in found:
        if output.name in read and output.dtype in SIXTEEN_BITS:
            warnings.warn(outputs.advice(model, output), outputs.SixteenBitOutputWarning, stacklevel=4)


def _first_looking(compute_loss: Any) -> Any:
    signature = inspect.signature(compute_loss)

    @functools.wraps(compute_loss)
    def looking(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model in _UNSEEN:
            given = signature.bind(model, *args, **kwargs).arguments
            if not _is_only_pretended(given.get("y_pred")):
                unseen = _UNSEEN.pop(model)
                _CALLED.pop(model, None)
                _look(model, unseen, given.get("x"), _outputs(model, given.get("y_pred")))
        return compute_loss(model, *args, **kwargs)

    return looking


def _noting(call: Any) -> Any:
    @functools.wraps(call)
    def noting(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = super(keras.Model, model).__call__(*args, **kwargs)  # whoever has replaced it since
        if model in _UNSEEN and args and not _is_only_pretended(made):
            with contextlib.suppress(Exception):  # what it takes may be anything
                _CALLED[model] = keras.tree.map_structure(outputs.symbol, args[0]), _outputs(model, made)
        return made

    return noting


def _looking_after(make: Any) -> Any:
    """Of `make_train_function`: the function that it made looks at the model when its first call is over."""

    @functools.wraps(make)
    def making(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = super(keras.Model, model).make_train_function(*args, **kwargs)
        function = model.train_function
        if model in _UNSEEN and function is not None and not hasattr(function, _LOOKS):
            model.train_function = _stepping(model, function)
        return made

    return making


_LOOKS = "_mezzo_looks"


def _stepping(model: Any, function: Any) -> Any:
    to_model = weakref.ref(model)

    @functools.wraps(function)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        model = to_model()
        if model in _UNSEEN:
            _look(model, _UNSEEN.pop(model), *_CALLED.pop(model, (None, [])))
        return made

    setattr(stepping, _LOOKS, True)
    return stepping


def _in_fp32(aggregate: Any) -> Any:
    """What `add_loss` was given in 16 bits is summed in FP32; TensorFlow would not add it to a loss in FP32 at all."""

    @functools.wraps(aggregate)
    def summing(model: Any, loss: Any) -> Any:
        if keras.backend.standardize_dtype(loss.dtype) in SIXTEEN_BITS:
            loss = keras.ops.cast(loss, "float32")
        return aggregate(model, loss)

    return summing


def _is_only_pretended(y_pred: Any) -> bool:
    """Whether this is Keras's trace on PyTorch's "meta" device, whose dtypes are not those of a step."""
    return keras.backend.backend() == "torch" and any(
        getattr(leaf, "is_meta", False) for leaf in keras.tree.flatten(y_pred)
    )


def _outputs(model: Any, made: Any) -> list[outputs.Output]:
    return [
        outputs.Output(name, keras.backend.standardize_dtype(tensor.dtype))
        for name, tensor in outputs.named_leaves(model, made)
    ]


def _look(model: Any, unseen: _Unseen, x: Any, found: list[outputs.Output]) -> None:
    if not unseen.checked:
        check_plan(model, unseen.plan)
    if x is not None and any(output.dtype in SIXTEEN_BITS for output in found):
        # For the layers' names. A model may be called in ways that one cannot know; what it gave is known without.
        with contextlib.suppress(Exception):
            found = outputs.traced_outputs(model, x)
    _warn(model, found)
