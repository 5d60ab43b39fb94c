"""PyTorch's own modules in a Keras model: they compute in the format of their layer's policy, on FP32 parameters.

Keras casts what a `TorchModuleWrapper` is given to what the layer computes in, and hands the module its parameters as
they are: under `mixed_float16` a `torch.nn.Linear` fails on the two dtypes. Under a plan its call runs in
`torch.autocast` instead, which casts the parameters for each operation; so their gradients are FP32.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import keras

from mezzo.core.errors import UsageError
from mezzo.keras.policy.planned_name import plan_behind
from mezzo.scripts.patches import Patches

_WORDS = {"float16": "Half", "bfloat16": "BFloat16"}  # how PyTorch's errors name them


def watch(patches: Patches) -> None:
    """From here on wrapped modules compute in their layer's format, until the patches are undone."""
    if keras.backend.backend() == "torch":
        wrapper = keras.layers.TorchModuleWrapper
        patches.set(wrapper, "call", _in_its_format(wrapper.call))


def _in_its_format(call: Any) -> Any:
    import torch

    @functools.wraps(call)
    def in_its_format(layer: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = layer.compute_dtype
        kind = _device_kind(layer)
        if dtype not in _WORDS:
            # A planned FP32 layer inside another module's autocast is FP32 all the same.
            around = plan_behind(layer.dtype_policy) is not None and torch.is_autocast_enabled(kind)
            if not around:
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
