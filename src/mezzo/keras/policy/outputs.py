"""Does a model hand its loss FP32? A Keras layer hands on what it computes in, the last one too.

Under `mixed_float16` a softmax that is the last layer gives a probability of 11 bits, and 0 for one under 2^-25:
Keras's losses compute in FP32, on what is left. So the last layer is given float32. What an output is made of is asked
of a trace of the model's call, not of what its layers say of themselves: a layer may well cast its result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend import compute_output_spec  # a trace on any backend; Keras has no public name for it

from mezzo.core.errors import UsageError
from mezzo.keras.dtypes import SIXTEEN_BITS, significant_bits
from mezzo.keras.policy.layers import check_is_layer, walk
from mezzo.keras.policy.plan_check import check_patterns
from mezzo.keras.policy.planned_name import plan_behind
from mezzo.keras.torch_buffers import torch_buffers_kept
from mezzo.scripts.patches import Patches


class SixteenBitOutputWarning(UserWarning):
    """A model hands its loss 16-bit values; the message has the line that mends it."""


@dataclass(frozen=True)
class Output:
    """A tensor that leaves a model.

    Args:
        name: the output's, or its place; empty for a model's only one.
        dtype: as Keras writes it.
        layer: the layer that made it; None where the model's own `call` did, or nobody knows.
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
        UsageError: no Keras model; an output is float16 or bfloat16, with the layer and the line that mends it; no
            batch was given where one is needed.
        UnknownNameError: the plan that the layer follows has a pattern that names no layer.
    """
    check_is_layer(model, "check_outputs")
    if x is None and inputs_of(model) is None:
        raise UsageError(
            f"check_outputs: {_told(model)} is subclassed or not built yet, so what it takes is not known. "
            "Give a batch: check_outputs(model, x)."
        )
    sixteen = [output for output in traced_outputs(model, x) if output.dtype in SIXTEEN_BITS]
    for output in sixteen:  # a misspelt pattern may be why, and would be handed on in the advice
        plan = plan_behind(getattr(output.layer, "dtype_policy", None))
        if plan is not None:
            check_patterns(model, plan)
    if sixteen:
        raise UsageError("\n".join(advice(model, output) for output in sixteen))


def traced_outputs(model: Any, x: Any = None) -> list[Output]:
    """Every tensor that a model gives, from a trace of its call, with the layer that made it.

    Args:
        model: a `keras.Model`.
        x: a batch of its inputs; None for a built Sequential or Functional model.
    """
    inputs = inputs_of(model) if x is None else keras.tree.map_structure(symbol, x)
    found: list[Output] = []

    def traced(inputs: Any) -> Any:
        made: dict[int, tuple[Any, Any]] = {}  # id -> tensor, kept lest its id is taken again, and the layer
        patches = Patches()
        patches.set(keras.layers.Layer, "__call__", _noting(keras.layers.Layer.__call__, model, made))
        try:
            outputs = model(inputs)
        finally:
            patches.undo()
        found[:] = [  # a trace may run twice
            Output(name, keras.backend.standardize_dtype(tensor.dtype), made.get(id(tensor), (None, None))[1])
            for name, tensor in named_leaves(model, outputs)
        ]
        return outputs

    _trace(model, traced, inputs)
    return found


def _trace(model: Any, call: Any, inputs: Any) -> None:
    if keras.backend.backend() != "torch":
        compute_output_spec(call, inputs)
        return
    # There Keras traces on PyTorch's "meta" device, on which it forgets to cast variables to what a layer computes in:
    # it says float32 of a Dense that gives float16. So two examples of zeros go through.
    import torch

    # Nothing that the call assigns to stays, nor what a PyTorch module draws.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        torch.no_grad(),
        keras.StatelessScope(),
        torch_buffers_kept(model),
        torch.random.fork_rng(devices=devices),
    ):
        call(keras.tree.map_structure(_zeros, inputs))


def _zeros(symbol: Any) -> Any:
    sizes = [size or _UNKNOWN_SIZE for size in symbol.shape]
    # Two examples: of one alone PyTorch's batch norm has no variance, and fails.
    return keras.ops.zeros([min(2, symbol.shape[0] or 2), *sizes[1:]] if sizes else [], symbol.dtype)


_UNKNOWN_SIZE = 64  # of images and sequences whose size is left open


def _noting(call: Any, model: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    def noting(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(layer, *args, **kwargs)
        if layer is not model:
            for tensor in keras.tree.flatten(outputs):
                made.setdefault(id(tensor), (tensor, layer))  # the innermost layer returns first
        return outputs

    return noting


def named_leaves(model: Any, outputs: Any) -> list[tuple[str, Any]]:
    """The tensors in what a model gives, each with its name: Keras's, a dictionary's key, or its place."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if hasattr(leaf, "dtype")]
    names = list(getattr(model, "output_names", None) or [])
    if isinstance(outputs, dict) and len(outputs) == len(leaves):
        names = sorted(outputs)  # the order in which Keras flattens a dictionary
    if len(leaves) == 1:
        names = [""]
    elif len(names) != len(leaves):
        names = [str(index) for index in range(len(leaves))]
    return list(zip(names, leaves, strict=True))


def inputs_of(model: Any) -> Any:
    """The symbolic inputs of a built Sequential or Functional model, else None."""
    graph = model if hasattr(model, "_inputs_struct") else getattr(model, "_functional", None)
    return getattr(graph, "_inputs_struct", None)


def read_by_a_loss(model: Any, names: Iterable[str]) -> set[str]:
    """Those of a compiled model's outputs that its loss reads."""
    names = list(names)
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        return (
            {name for name in names if loss.get(name) is not None} if set(loss) <= set(names) else set(names)
        )
    if isinstance(loss, (list, tuple)) and len(loss) == len(names):
        return {name for name, each in zip(names, loss, strict=True) if each is not None}
    return set() if loss is None else set(names)


def advice(model: Any, output: Output) -> str:
    """What is wrong with a 16-bit output and the line that mends it."""
    bits = significant_bits(output.dtype)
    lost = ", and under 2^-25 they are 0" if output.dtype == "float16" else ""
    layer = output.layer
    which = f"output {output.name!r}" if output.name else "the output"
    told = (
        f"{which} of {_told(model)} is {output.dtype}: a loss sees values of {bits} significant bits{lost}."
    )
    if layer is None:
        return (
            f'{told} Give the layer that makes it dtype="float32", or cast it: keras.ops.cast(y, "float32").'
        )
    mend = f"{told} Make its layer float32: {_constructor(layer)}"
    plan = plan_behind(layer.dtype_policy)
    # Not what the layer says: one of Keras's own without a build has no path unless the plan has patterns.
    path = next((path for path, each in walk(model) if each is layer), None)
    if plan is None or path is None or plan.policy_for(path) == "float32":
        return f"{mend}."
    pattern = path.removeprefix(
        f"{model.name}/"
    )  # which may be numbered: another one of the same kind is not this one
    return f'{mend}, or set_policy("{plan.in_fp32(pattern)}") before the model is made.'


def _constructor(layer: Any) -> str:
    kind = type(layer)
    where = "keras.layers." if kind.__module__.startswith("keras.") else ""
    try:
        config = layer.get_config()
    except NotImplementedError:  # Keras's word for a layer whose arguments it does not know
        config = {}
    first = next((config[key] for key in _FIRST.get(kind.__name__, ()) if key in config), None)
    argument = repr(first) if isinstance(first, (int, str)) else "..."
    return f'{where}{kind.__name__}({argument}, dtype="float32", name="{layer.name}")'


# Class of a usual last layer -> its one argument that has no default.
_FIRST = {"Dense": ("units",), "Activation": ("activation",)}


def symbol(value: Any) -> Any:
    """The shape and dtype of an array, as a `keras.KerasTensor`."""
    if not hasattr(value, "shape"):
        value = keras.ops.convert_to_numpy(value)
    return keras.KerasTensor(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))


def _told(model: Any) -> str:
    return f"the model {model.name!r}"
