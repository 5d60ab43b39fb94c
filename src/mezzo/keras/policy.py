"""`mezzo.keras.set_policy`: one line puts a Keras script under a precision, before its model is made.

The naive code it equals, for a precision without patterns::

    keras.config.set_dtype_policy("mixed_float16")
    ...
    model.compile(mezzo.keras.LossScaleOptimizer(keras.optimizers.get(optimizer)), ...)

With patterns each layer is given its policy at its first build or call (`mezzo.keras.layers`). `compile` checks whether
the model follows the plan, if all its layers are known then; else the first loss does, when every layer has been called
and nothing has been learnt yet; of a model whose `train_step` never asks Keras for a loss, the end of the first step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
import weakref
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.trainers.trainer import Trainer  # what compile belongs to; Keras has no public name for it

from mezzo.core.errors import UsageError
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mezzo.core.policy_text import print_loss_scale
from mezzo.keras import checks, layers
from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer
from mezzo.keras.plan import SIXTEEN_BITS, KerasPlan, PlannedName, plan, plan_behind
from mezzo.scripts.patches import Patches

_PATCHES = Patches()
_Scaled = keras.optimizers.LossScaleOptimizer


def set_policy(precision: Any, *, loss_scale: LossScale | float | str | None = None) -> KerasPlan:
    """Set what every layer that is made from here on computes in, and the loss scale of what `compile` is given.

    It holds for layers made after it, in this thread, until it is called again; `set_policy("fp32")` undoes all of it.
    `model.compile` then wraps its optimizer in `mezzo.keras.LossScaleOptimizer` where the plan has a loss scale (not
    with ``auto_scale_loss=False``), and tells where the model does not follow the plan: a pattern that names no layer,
    a model made before the plan, an output that hands its loss 16 bits.

    Args:
        precision: ``bf16``, ``fp16``, ``fp32``, each with patterns (``fp16,module.head=fp32``), a `mezzo.Policy`, the
            path of a TOML file, or Keras's ``mixed_float16``, ``mixed_bfloat16``, ``float32``.
        loss_scale: in place of the precision's own: ``"dynamic"``, ``"none"``, a number, a loss scale's value.

    Returns:
        The plan; printed, it says which layers compute in what.

    Raises:
        UsageError: what Keras cannot do, or a name that does not exist, with the nearest one.
    """
    global _active
    made = plan(precision, loss_scale)
    _PATCHES.undo()
    _active = None
    _UNSEEN.clear()
    _CALLED.clear()
    if made.is_fp32:
        keras.config.set_dtype_policy("float32")
        return made
    keras.config.set_dtype_policy(keras.DTypePolicy(PlannedName(made.default, made)))
    if made.paths:
        layers.install(_PATCHES)
    if keras.backend.backend() == "torch":
        wrapper = keras.layers.TorchModuleWrapper
        _PATCHES.set(wrapper, "call", _in_its_format(wrapper.call))
    _active = made
    _PATCHES.set(Trainer, "compile", _compiling(Trainer.compile, made))
    for name in ("compute_loss", "_compute_loss"):  # Keras's steps call the second, a user's own the first
        _PATCHES.set(Trainer, name, _looking_first(getattr(Trainer, name)))
    _PATCHES.set(Trainer, "_aggregate_additional_loss", _in_fp32(Trainer._aggregate_additional_loss))
    _PATCHES.set(keras.Model, "__call__", _noting(keras.Model.__call__))
    _PATCHES.set(keras.Model, "make_train_function", _looking_after(keras.Model.make_train_function))
    return made


# compile


@dataclass(frozen=True)
class _Unseen:
    """A compiled model that is still to be checked: its plan, and whether its layers were checked already."""

    plan: KerasPlan
    checked: bool


_UNSEEN: WeakKeyDictionary[Any, _Unseen] = WeakKeyDictionary()
# Such a model -> what it was last called with, and what it gave: shapes and dtypes, no tensors.
_CALLED: WeakKeyDictionary[Any, tuple[Any, list[checks.Output]]] = WeakKeyDictionary()
# The active plan. Another one's functions may still be called, by a caller that kept them.
_active: KerasPlan | None = None


def _compiling(compile_model: Any, active: KerasPlan) -> Any:
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def compiling(model: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(model, *args, **kwargs).arguments if _active is active else None
        except TypeError:  # Keras says it
            given = None
        if given is None:
            compile_model(model, *args, **kwargs)
            return
        plan = plan_behind(model.dtype_policy) or active
        optimizer = keras.optimizers.get(given.get("optimizer", "rmsprop"))
        scaled = optimizer
        if _computes_in_16_bits(model) and given.get("auto_scale_loss", True):
            scaled = _scaled(optimizer, plan, _scale_for(model, plan))
            given["auto_scale_loss"] = False  # or Keras wraps it where the plan says none
        given["optimizer"] = scaled
        _UNSEEN.pop(model, None)
        known = _is_known(model)
        if known:
            checks.check_plan(model, plan)
        del given[next(iter(given))]  # the model: methods may call it self
        compile_model(model, **given)
        # As Keras does with its own wrapper: a saved model holds the optimizer that was given, and loads without Mezzo.
        model._compile_config.config["optimizer"] = optimizer
        if not (known and _look_at_outputs(model)):
            _UNSEEN[model] = _Unseen(plan, checked=known)

    return compiling


def _scale_for(model: Any, plan: KerasPlan) -> LossScale:
    """The plan's loss scale; a dynamic one for layers in float16 under a plan that has none."""
    foreign = "mixed_float16" not in plan.policies and any(
        layer.compute_dtype == "float16" for _, layer in layers.walk(model)
    )
    return DynamicLossScale() if foreign and isinstance(plan.loss_scale, NoLossScale) else plan.loss_scale


def _scaled(optimizer: Any, plan: KerasPlan, loss_scale: LossScale) -> Any:
    """The optimizer in Mezzo's loss scale, if there is to be one."""
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
    found = [layer for _, layer in layers.walk(model)] or [model]
    return any(
        layer.compute_dtype in SIXTEEN_BITS or (plan_behind(layer.dtype_policy) and not layer.built)
        for layer in (*found, *([] if _is_known(model) else [model]))
    )


def _is_known(model: Any) -> bool:
    """Whether every layer of a model has been made and called, as far as can be told before it runs."""
    if checks.inputs_of(model) is not None:
        return True
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def _look_at_outputs(model: Any) -> bool:
    """Warn of 16-bit outputs that a loss reads; False if they can't be told yet."""
    if checks.inputs_of(model) is None:
        return False
    if not any(tensor.dtype in SIXTEEN_BITS for tensor in keras.tree.flatten(model.outputs)):
        return False  # as layers say of themselves: the first loss tells
    try:
        found = checks.traced_outputs(model)
    except Exception:  # it takes what can't be guessed (a size that is left open): the first loss tells
        return False
    checks.warn_of_outputs(model, found)
    return True


# The first step


def _looking_first(compute_loss: Any) -> Any:
    signature = inspect.signature(compute_loss)

    @functools.wraps(compute_loss)
    def looking(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model in _UNSEEN:
            given = signature.bind(model, *args, **kwargs).arguments
            if not _is_on_meta(given.get("y_pred")):
                unseen = _UNSEEN.pop(model)
                _CALLED.pop(model, None)
                _look(model, unseen, given.get("x"), _outputs(model, given.get("y_pred")))
        return compute_loss(model, *args, **kwargs)

    return looking


def _noting(call: Any) -> Any:
    @functools.wraps(call)
    def noting(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = super(keras.Model, model).__call__(*args, **kwargs)  # whatever has replaced it since
        if model in _UNSEEN and args and not _is_on_meta(made):
            with contextlib.suppress(Exception):  # what it takes may be anything
                _CALLED[model] = keras.tree.map_structure(checks.symbol, args[0]), _outputs(model, made)
        return made

    return noting


_LOOKS = "_mezzo_looks"


def _looking_after(make: Any) -> Any:
    """Of `make_train_function`: the function that it made checks the model when its first call is over."""

    @functools.wraps(make)
    def making(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = super(keras.Model, model).make_train_function(*args, **kwargs)
        function = model.train_function
        if model not in _UNSEEN or function is None or hasattr(function, _LOOKS):
            return made
        to_model = weakref.ref(model)

        @functools.wraps(function)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            model = to_model()
            if model in _UNSEEN:
                _look(model, _UNSEEN.pop(model), *_CALLED.pop(model, (None, [])))
            return made

        setattr(stepping, _LOOKS, True)
        model.train_function = stepping
        return made

    return making


def _in_fp32(aggregate: Any) -> Any:
    """What `add_loss` was given in 16 bits is summed in FP32; TensorFlow would not add it to a loss in FP32 at all."""

    @functools.wraps(aggregate)
    def summing(model: Any, loss: Any) -> Any:
        if keras.backend.standardize_dtype(loss.dtype) in SIXTEEN_BITS:
            loss = keras.ops.cast(loss, "float32")
        return aggregate(model, loss)

    return summing


def _is_on_meta(y_pred: Any) -> bool:
    """Whether this is Keras's trace on PyTorch's "meta" device, whose dtypes are not those of a step."""
    return keras.backend.backend() == "torch" and any(
        getattr(leaf, "is_meta", False) for leaf in keras.tree.flatten(y_pred)
    )


def _outputs(model: Any, made: Any) -> list[checks.Output]:
    return [
        checks.Output(name, keras.backend.standardize_dtype(tensor.dtype))
        for name, tensor in checks.named_leaves(model, made)
    ]


def _look(model: Any, unseen: _Unseen, x: Any, found: list[checks.Output]) -> None:
    if not unseen.checked:
        checks.check_plan(model, unseen.plan)
    if x is not None and any(output.dtype in SIXTEEN_BITS for output in found):
        # For the layers' names. A model may be called in ways that can't be known; what it gave is known without.
        with contextlib.suppress(Exception):
            found = checks.traced_outputs(model, x)
    checks.warn_of_outputs(model, found)


# PyTorch's own modules in a Keras model

_WORDS = {"float16": "Half", "bfloat16": "BFloat16"}  # how PyTorch's errors name them


def _in_its_format(call: Any) -> Any:
    """A `TorchModuleWrapper` calls its module under `torch.autocast`, on FP32 parameters, in its layer's format.

    Keras casts the inputs alone: under `mixed_float16` a `torch.nn.Linear` would fail on the two dtypes.
    """
    import torch

    @functools.wraps(call)
    def in_its_format(layer: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = layer.compute_dtype
        kind = _device_kind(layer)
        # A planned FP32 layer inside another module's autocast is FP32 all the same.
        around = plan_behind(layer.dtype_policy) is not None and torch.is_autocast_enabled(kind)
        if dtype not in _WORDS and not around:
            return call(layer, *args, **kwargs)
        with torch.autocast(kind, dtype=getattr(torch, dtype), enabled=dtype in _WORDS):
            try:
                return call(layer, *args, **kwargs)
            except RuntimeError as error:
                if dtype not in _WORDS or not re.search(rf"\b{_WORDS[dtype]}\b", str(error)):
                    raise
                raise UsageError(
                    f"the PyTorch module {type(layer.module).__name__} in the layer {layer.name!r} cannot compute in "
                    f"{dtype} on {kind}, not with torch.autocast either: {error}. Leave this layer in FP32: "
                    f'set_policy("...,module.{layer.name}=fp32") before the model is made.'
                ) from error

    return in_its_format


def _device_kind(layer: Any) -> str:
    """Where the module is; not where Keras makes tensors, which is nowhere ("meta") while it traces."""
    for tensor in (*layer.module.parameters(), *layer.module.buffers()):
        return str(tensor.device.type)
    import torch
    from keras.src.backend.torch.core import get_device  # Keras has no public name for it

    kind = torch.device(get_device()).type
    return "cpu" if kind == "meta" else kind
