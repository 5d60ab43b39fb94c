"""`mezzo.keras.set_policy`: one line, before the model is made, sets the precision of a Keras script.

`compile` checks whether the model follows the plan, if all its layers are known by then; otherwise the first call after
it does, which also checks whether the loss is given 16 bits: a Keras layer returns its compute dtype, the last one too.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.trainers.trainer import Trainer  # what compile belongs to; Keras has no public name for it

from mezzo.core.errors import UnknownNameError, UsageError, checks_keywords
from mezzo.core.formats import named
from mezzo.core.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mezzo.core.policy_text import print_loss_scale
from mezzo.keras import layers
from mezzo.keras.loss_scale_optimizer import LossScaleOptimizer
from mezzo.keras.plan import NAMES, SIXTEEN_BITS, KerasPlan, PlannedName, plan, plan_behind
from mezzo.runner.patches import Patches

_PATCHES = Patches()
# Compiled models that were not called since -> their plan, and whether it was checked.
_UNSEEN: WeakKeyDictionary[Any, tuple[KerasPlan, bool]] = WeakKeyDictionary()


class PolicyWarning(UserWarning):
    """A model, or a layer that a pattern matches, does not follow the active policy; the message says why."""


class SixteenBitOutputWarning(UserWarning):
    """The loss reads 16-bit values of a model; the message contains the line that fixes it."""


def warn(text: str, kind: type[Warning]) -> None:
    """Warn; `mezzo.keras.run` replaces this by a note."""
    warnings.warn(text, kind, stacklevel=4)


@checks_keywords
def set_policy(precision: Any, *, loss_scale: LossScale | float | str | None = None) -> KerasPlan:
    """Set the compute format of layers made afterwards, and the loss scale of models compiled afterwards.

    It applies in this thread until the next call; `set_policy("fp32")` undoes it. `model.compile` then wraps its
    optimizer in `mezzo.keras.LossScaleOptimizer` if the policy has a loss scale (not with ``auto_scale_loss=False``),
    and reports a model that does not follow the policy: a pattern that matches no layer, a model made before the call,
    a 16-bit output. Naive code, for a precision without patterns::

        keras.config.set_dtype_policy("mixed_float16")
        ...
        model.compile(mezzo.keras.LossScaleOptimizer(keras.optimizers.get(optimizer)), ...)

    Args:
        precision: ``bf16``, ``fp16``, ``fp32``, each with patterns (``fp16,module.head=fp32``), a `mezzo.Policy`, the
            path of a TOML file, or Keras's ``mixed_float16``, ``mixed_bfloat16``, ``float32``.
        loss_scale: instead of the precision's own: ``"dynamic"``, ``"none"``, a number, a loss scale of `mezzo`.

    Returns:
        The plan; `print` shows the format of each group of layers.

    Raises:
        UsageError: a key that Keras cannot apply, or an unknown name, with the nearest one.
    """
    made = plan(precision, loss_scale)
    _PATCHES.undo()
    _UNSEEN.clear()
    if made.is_fp32:
        keras.config.set_dtype_policy("float32")
        return made
    keras.config.set_dtype_policy(keras.DTypePolicy(PlannedName(made.default, made)))
    if made.paths:
        layers.install(_PATCHES)
    if keras.backend.backend() == "torch":
        wrapper = keras.layers.TorchModuleWrapper
        _PATCHES.set(wrapper, "call", _in_its_format(wrapper.call))
    _PATCHES.set(Trainer, "compile", _compiling(Trainer.compile, made))
    _PATCHES.set(Trainer, "_aggregate_additional_loss", _in_fp32(Trainer._aggregate_additional_loss))
    _PATCHES.set(keras.Model, "__call__", _looking_first(keras.Model.__call__))
    return made


def _compiling(compile_model: Any, active: KerasPlan) -> Any:
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def compiling(model: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(model, *args, **kwargs)
        given = bound.arguments
        plan = plan_behind(model.dtype_policy) or active
        optimizer = given["optimizer"] = keras.optimizers.get(given.get("optimizer", "rmsprop"))
        if _computes_in_16_bits(model) and given.get("auto_scale_loss", True):
            given["optimizer"] = _scaled(optimizer, model, plan)
            given["auto_scale_loss"] = False  # or Keras wraps it where the plan says none
        known = _is_known(model)
        if known:
            check_plan(model, plan)
        _UNSEEN[model] = plan, known
        compile_model(*bound.args, **bound.kwargs)
        # As Keras does with its own wrapper: a saved model holds the optimizer that was given, and loads without Mezzo.
        model._compile_config.config["optimizer"] = optimizer

    return compiling


def _scaled(optimizer: Any, model: Any, plan: KerasPlan) -> Any:
    """The optimizer with the plan's loss scale; a dynamic one for layers in float16 under a plan that has none."""
    loss_scale = plan.loss_scale
    foreign = "mixed_float16" not in plan.policies and isinstance(loss_scale, NoLossScale)
    if foreign and any(layer.compute_dtype == "float16" for _, layer in layers.walk(model)):
        loss_scale = DynamicLossScale()
    if optimizer is None or isinstance(loss_scale, NoLossScale) or isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        warn(
            f"set_policy({plan.precision!r}): compile received Keras's own LossScaleOptimizer and keeps it. To use "
            "Mezzo's, give compile the inner optimizer, or mezzo.keras.LossScaleOptimizer(optimizer, "
            f'loss_scale="{print_loss_scale(loss_scale)}").',
            UserWarning,
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
    graph = model if hasattr(model, "_inputs_struct") else getattr(model, "_functional", None)
    if getattr(graph, "_inputs_struct", None) is not None:  # a built Sequential or Functional model
        return True
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def check_plan(model: Any, plan: KerasPlan) -> None:
    """Warn where a model whose layers are all known does not follow the plan; raise where a pattern names no layer."""
    known = list(layers.walk(model))
    if not any(plan_behind(layer.dtype_policy) is plan for _, layer in known):
        # The patterns are not about layers with policies of their own (from a file, say).
        if known and all(layer.compute_dtype not in SIXTEEN_BITS for _, layer in known):
            warn(
                f"no layer of the model {model.name!r} computes in 16 bits under set_policy({plan.precision!r}): the "
                "layers were made before set_policy, or with dtype=. Make the model after set_policy, in the same "
                "thread. keras.utils.clear_session() resets the policy.",
                PolicyWarning,
            )
        return
    for path, layer in known:
        pattern, name = plan.decision(path)
        if pattern and plan_behind(layer.dtype_policy) is None and layer.dtype_policy.name != name:
            warn(
                f"set_policy({plan.precision!r}): module.{pattern} matches the layer {path!r}, which keeps the policy "
                f"{layer.dtype_policy.name}: it was made with dtype=, or before set_policy. Make it after set_policy "
                "without dtype=, or remove the pattern.",
                PolicyWarning,
            )
    paths = [path for path, _ in known]
    for pattern in plan.unmatched([*paths, *layers.paths_under(plan)]):
        ends = ["/".join(path.split("/")[at:]) for path in paths for at in range(path.count("/") + 1)]
        wanted = pattern.replace(".", "/").replace("*", "").strip("/")
        near = difflib.get_close_matches(wanted, ends, n=1, cutoff=0)
        raise UnknownNameError(
            f"set_policy({plan.precision!r}): module.{pattern} matches no layer of the model {model.name!r}. Did you "
            f"mean {near[0]!r}? mezzo.keras.layer_policies(model) prints all layers. If the pattern is for another "
            "model, make and call that model before you compile this one."
        )


def warn_of_outputs(model: Any, outputs: Any, plan: KerasPlan) -> None:
    """Warn of each 16-bit output that the model's loss reads; outputs are named by Keras, by a key, or by place."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if hasattr(leaf, "dtype")]
    # A Sequential or Functional model knows the layer that makes each output.
    layers_of = list(getattr(getattr(model, "_functional", None) or model, "output_names", None) or [])
    if len(layers_of) != len(leaves):
        layers_of = ["LAYER"] * len(leaves)
    names = [str(index) if layer == "LAYER" else layer for index, layer in enumerate(layers_of)]
    if len(leaves) == 1:
        names = [""]
    elif isinstance(outputs, dict) and len(outputs) == len(leaves):
        names = sorted(map(str, outputs))  # the order in which Keras flattens a dictionary
    loss = getattr(model, "loss", None)
    losses = [loss] * len(names)
    if isinstance(loss, dict) and set(loss) <= set(names):
        losses = [loss.get(name) for name in names]
    elif isinstance(loss, (list, tuple)) and len(loss) == len(names):
        losses = list(loss)
    for name, leaf, layer, its_loss in zip(names, leaves, layers_of, losses):
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        if its_loss is None or dtype not in SIXTEEN_BITS:
            continue
        pattern = f"module.{layer}=fp32"
        # A layer with a dtype of its own keeps it, whatever the policy says.
        by_policy = f', or set_policy("{plan.precision},{pattern}") before the model is made'
        warn(
            f"{f'output {name!r}' if name else 'the output'} of the model {model.name!r} is {dtype}: the loss reads "
            f"values with {named(NAMES[dtype]).nmant + 1} significant bits. Make the layer of this output float32: "
            f'dtype="float32" at the layer{"" if pattern in plan.precision.split(",") else by_policy}.',
            SixteenBitOutputWarning,
        )


def _looking_first(call: Any) -> Any:
    @functools.wraps(call)
    def looking(model: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super(keras.Model, model).__call__(*args, **kwargs)
        # Keras traces on PyTorch's "meta" device with other dtypes than those of a step.
        on_meta = any(getattr(leaf, "is_meta", False) for leaf in keras.tree.flatten(outputs))
        if model in _UNSEEN and not on_meta:
            plan, known = _UNSEEN.pop(model)
            if not known:
                check_plan(model, plan)
            warn_of_outputs(model, outputs, plan)
        return outputs

    return looking


def _in_fp32(aggregate: Any) -> Any:
    """Sum 16-bit values of `add_loss` in FP32; TensorFlow would not add them to a loss in FP32 at all."""

    @functools.wraps(aggregate)
    def summing(model: Any, loss: Any) -> Any:
        if keras.backend.standardize_dtype(loss.dtype) in SIXTEEN_BITS:
            loss = keras.ops.cast(loss, "float32")
        return aggregate(model, loss)

    return summing


def _in_its_format(call: Any) -> Any:
    """Call a wrapped PyTorch module under `torch.autocast` in its layer's format: Keras casts the inputs alone."""
    import torch
    from keras.src.backend.torch.core import get_device  # Keras has no public name for it

    @functools.wraps(call)
    def in_its_format(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # The module's device; if it has no tensors, Keras's, which is "meta" while it traces.
        tensors = (*layer.module.parameters(), *layer.module.buffers())
        kind = tensors[0].device.type if tensors else torch.device(get_device()).type.replace("meta", "cpu")
        low = layer.compute_dtype in SIXTEEN_BITS
        # A planned FP32 layer inside another module's autocast is FP32 all the same.
        if not low and not (plan_behind(layer.dtype_policy) and torch.is_autocast_enabled(kind)):
            return call(layer, *args, **kwargs)
        with torch.autocast(kind, dtype=getattr(torch, layer.compute_dtype), enabled=low):
            try:
                return call(layer, *args, **kwargs)
            except RuntimeError as error:
                if not low or not any(word in str(error) for word in ("Half", "BFloat16")):
                    raise
                raise UsageError(
                    f"the PyTorch module {type(layer.module).__name__} in the layer {layer.name!r} cannot compute in "
                    f'{layer.compute_dtype}: {error}. Keep it in FP32: set_policy("...,module.{layer.name}=fp32").'
                ) from error

    return in_its_format
