"""Does a model follow its plan: does every pattern name a layer, and does the loss get FP32 values?

A Keras layer returns its compute dtype, the last one too. Under `mixed_float16` a final softmax gives probabilities of
11 bits, and 0 for one under 2^-25; Keras's losses compute in FP32 from those. So the last layer should be float32. The
dtypes of outputs come from a trace of the model's call, not from the layers' policies: a layer may cast its result.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend import compute_output_spec  # a trace on any backend; Keras has no public name for it

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.formats import named
from mezzo.keras.layers import check_is_layer, paths_under, walk
from mezzo.keras.plan import NAMES, SIXTEEN_BITS, KerasPlan, plan_behind
from mezzo.runner.patches import Patches


class PolicyWarning(UserWarning):
    """A model, or a layer that a policy names, does not follow the active policy; the message says why."""


class SixteenBitOutputWarning(UserWarning):
    """A model hands its loss 16-bit values; the message has the line that fixes it."""


def warn(text: str, kind: type[Warning]) -> None:
    """Warn; `mezzo.keras.run` replaces this by a note."""
    warnings.warn(text, kind, stacklevel=4)


def check_plan(model: Any, plan: KerasPlan) -> None:
    """Warn where a model whose layers are all known does not follow the plan.

    Raises:
        UnknownNameError: a pattern names no layer of this model, nor of another one made under the same plan; the
            message has the nearest layer's path.

    Warns:
        PolicyWarning: no layer computes in 16 bits; or a layer that a pattern names has a policy of its own.
    """
    layers = list(walk(model))
    if not any(plan_behind(layer.dtype_policy) is plan for _, layer in layers):
        # The patterns are not about layers with policies of their own (from a file, say).
        if layers and all(layer.compute_dtype not in SIXTEEN_BITS for _, layer in layers):
            warn(
                f"no layer of the model {model.name!r} computes in 16 bits under set_policy({plan.precision!r}): its "
                "layers were made before set_policy, or have a dtype of their own. Make the model after set_policy, in "
                "the same thread; keras.utils.clear_session() forgets the policy.",
                PolicyWarning,
            )
        return
    for path, layer in layers:
        pattern, name = plan.decision(path)
        if pattern and plan_behind(layer.dtype_policy) is None and layer.dtype_policy.name != name:
            warn(
                f"set_policy({plan.precision!r}): module.{pattern} names the layer {path!r}, which has the policy "
                f"{layer.dtype_policy.name} of its own and keeps it: it was given a dtype, or made before set_policy. "
                "Make it after set_policy and without a dtype, or leave the pattern out.",
                PolicyWarning,
            )
    check_patterns(model, plan)


def check_patterns(model: Any, plan: KerasPlan) -> None:
    """Raise `UnknownNameError` if a pattern names no layer of this model, nor of another one made under the plan."""
    known = [path for path, _ in walk(model)]
    for pattern in plan.unmatched([*known, *paths_under(plan)]):
        ends = ["/".join(path.split("/")[at:]) for path in known for at in range(path.count("/") + 1)]
        wanted = pattern.replace(".", "/").replace("*", "").strip("/")
        near = difflib.get_close_matches(wanted, ends, n=1, cutoff=0)
        raise UnknownNameError(
            f"set_policy({plan.precision!r}): module.{pattern} names no layer of the model {model.name!r}. Did you "
            f"mean {near[0]!r}? mezzo.keras.layer_policies(model) prints all layers. A pattern for another model needs "
            "that model made, and called once, before this one is compiled."
        )


# Outputs


@dataclass(frozen=True)
class Output:
    """A tensor that leaves a model.

    Args:
        name: the output's, or its place; empty for a model's only one.
        dtype: as Keras writes it.
        layer: the layer that made it; None where the model's own `call` did, or it is not known.
    """

    name: str
    dtype: str
    layer: Any = None


def check_outputs(model: Any, x: Any = None) -> None:
    """Raise if a floating output of a model is 16 bits.

    Args:
        model: a `keras.Model`.
        x: a batch of its inputs (arrays, or what has a shape and a dtype); needed unless the model is Sequential or
            Functional and built. Nothing is computed with it.

    Raises:
        UsageError: not a Keras model; an output is float16 or bfloat16, with the layer and the line that fixes it; no
            batch was given where one is needed.
        UnknownNameError: the plan that the layer follows has a pattern that names no layer.
    """
    check_is_layer(model, "check_outputs")
    if x is None and inputs_of(model) is None:
        raise UsageError(
            f"check_outputs: the model {model.name!r} is subclassed or not built yet, so its inputs are not known. "
            "Give a batch: check_outputs(model, x)."
        )
    sixteen = [output for output in traced_outputs(model, x) if output.dtype in SIXTEEN_BITS]
    for output in sixteen:  # a misspelt pattern may be the cause
        plan = plan_behind(getattr(output.layer, "dtype_policy", None))
        if plan is not None:
            check_patterns(model, plan)
    if sixteen:
        raise UsageError("\n".join(advice(model, output) for output in sixteen))


def warn_of_outputs(model: Any, found: list[Output]) -> None:
    """Warn of each 16-bit output that the model's loss reads."""
    loss, names = getattr(model, "loss", None), [output.name for output in found]
    read = set() if loss is None else set(names)
    if isinstance(loss, dict) and set(loss) <= set(names):
        read = {name for name in names if loss.get(name) is not None}
    elif isinstance(loss, (list, tuple)) and len(loss) == len(names):
        read = {name for name, each in zip(names, loss) if each is not None}
    for output in found:
        if output.name in read and output.dtype in SIXTEEN_BITS:
            warn(advice(model, output), SixteenBitOutputWarning)


def traced_outputs(model: Any, x: Any = None) -> list[Output]:
    """Every tensor that a model gives, from a trace of its call, with the layer that made it.

    Args:
        model: a `keras.Model`.
        x: a batch of its inputs; None for a built Sequential or Functional model.
    """
    inputs = inputs_of(model) if x is None else keras.tree.map_structure(_symbol, x)
    found: list[Output] = []

    def traced(inputs: Any) -> Any:
        outputs, found[:] = call_noting_layers(model, lambda: model(inputs))  # a trace may run twice
        return outputs

    if keras.backend.backend() != "torch":
        compute_output_spec(traced, inputs)
        return found
    # There Keras traces on PyTorch's "meta" device, where it does not cast variables to the layer's compute dtype: it
    # says float32 of a Dense that gives float16. So two examples of zeros go through the model, and everything that they
    # assign is restored: variables by the scope, buffers of PyTorch modules here. (By Keras's list of layers: PyTorch
    # does not see those that a model keeps in a Python list.)
    import torch

    buffers = {id(buffer): buffer for layer in model._flatten_layers() for buffer in layer.buffers()}
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            with keras.StatelessScope():
                traced(keras.tree.map_structure(_zeros, inputs))
        finally:
            for buffer, before in kept:
                if not torch.equal(buffer, before):  # an expanded one can't be written to
                    buffer.copy_(before)
    return found


def call_noting_layers(model: Any, call: Callable[[], Any]) -> tuple[Any, list[Output]]:
    """The result of a call of a model; and each tensor in it with its name (Keras's, a dictionary's key, or its place)."""
    made: dict[
        int, tuple[Any, Any]
    ] = {}  # id -> the tensor, kept so that its id is not reused, and the layer
    patches = Patches()
    patches.set(keras.layers.Layer, "__call__", _noting(keras.layers.Layer.__call__, model, made))
    try:
        outputs = call()
    finally:
        patches.undo()
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if hasattr(leaf, "dtype")]
    names = list(getattr(model, "output_names", None) or [])
    if isinstance(outputs, dict) and len(outputs) == len(leaves):
        names = sorted(map(str, outputs))  # the order in which Keras flattens a dictionary
    if len(leaves) == 1:
        names = [""]
    elif len(names) != len(leaves):
        names = [str(index) for index in range(len(leaves))]
    dtypes = [str(getattr(leaf.dtype, "name", leaf.dtype)).rpartition(".")[2] for leaf in leaves]
    layers = [made.get(id(leaf), (None, None))[1] for leaf in leaves]
    return outputs, [Output(*each) for each in zip(names, dtypes, layers, strict=True)]


def _zeros(symbol: Any) -> Any:
    sizes = [size or 64 for size in symbol.shape]  # of images and sequences whose size is left open
    # Two examples: of one alone PyTorch's batch norm has no variance, and fails.
    return keras.ops.zeros([min(2, symbol.shape[0] or 2), *sizes[1:]] if sizes else [], symbol.dtype)


def _noting(call: Any, model: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    def noting(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(layer, *args, **kwargs)
        if isinstance(layer, keras.layers.Dropout) and args:  # which passes on what another layer made
            layer = made.get(id(args[0]), (None, layer))[1]
        if layer is not model:
            for tensor in keras.tree.flatten(outputs):
                made.setdefault(id(tensor), (tensor, layer))  # the innermost layer returns first
        return outputs

    return noting


def inputs_of(model: Any) -> Any:
    """The symbolic inputs of a built Sequential or Functional model, else None."""
    graph = model if hasattr(model, "_inputs_struct") else getattr(model, "_functional", None)
    return getattr(graph, "_inputs_struct", None)


def advice(model: Any, output: Output) -> str:
    """What is wrong with a 16-bit output and the line that fixes it."""
    which = f"output {output.name!r}" if output.name else "the output"
    fault = (
        f"{which} of the model {model.name!r} is {output.dtype}: a loss sees values of "
        f"{named(NAMES[output.dtype]).nmant + 1} significant bits."
    )
    layer = output.layer
    if layer is None:
        return (
            f'{fault} Give the layer that makes it dtype="float32", or cast it: keras.ops.cast(y, "float32").'
        )
    fix = f'{fault} Make its layer float32: {type(layer).__name__}(..., dtype="float32", name="{layer.name}")'
    plan = plan_behind(layer.dtype_policy)
    # Not `layer.path`: a Keras layer without a build has none unless the plan has patterns.
    path = next((path for path, each in walk(model) if each is layer), None)
    if plan is None or path is None or plan.policy_for(path) == "float32":
        return f"{fix}."
    pattern = path.removeprefix(f"{model.name}/")  # a model's name may be numbered
    return f'{fix}, or set_policy("{plan.in_fp32(pattern)}") before the model is made.'


def _symbol(value: Any) -> Any:
    """The shape and dtype of an array, as a `keras.KerasTensor`."""
    if not hasattr(value, "shape"):
        value = keras.ops.convert_to_numpy(value)
    return keras.KerasTensor(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))
