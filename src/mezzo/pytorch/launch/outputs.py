"""What a model returns, with its 16-bit tensors as FP32: the script sees the types it always saw."""

from __future__ import annotations

import copy
import dataclasses
import types
from typing import Any

import torch
from torch import Tensor

_LOWERED = (torch.bfloat16, torch.float16)


def to_fp32(value: Any) -> Any:
    """`value` with each bf16 or fp16 tensor in it replaced by `tensor.float()`; the value itself where
    there is none.

    Looks into dicts (and their subclasses, such as a library's `ModelOutput`), lists, tuples, named tuples,
    dataclasses, `types.SimpleNamespace` and `torch.distributions`. A container is copied, shallowly, only
    if a tensor in it changes. FP32, FP64, integer and complex tensors pass as they are, and so does every
    other object.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOWERED else value
    kind = type(value)
    if kind is tuple or kind is list:
        parts = [to_fp32(item) for item in value]
        return kind(parts) if _any_changed(value, parts) else value
    if kind is dict:
        items = {key: to_fp32(item) for key, item in value.items()}
        return items if _any_changed(value.values(), items.values()) else value
    return _other(value)


def _other(value: Any) -> Any:
    if isinstance(value, dict):
        new = {key: to_fp32(item) for key, item in value.items()}
        if not _any_changed(value.values(), new.values()):
            return value
        result = copy.copy(value)
        for key, item in new.items():
            if item is not value[key]:
                result[key] = item  # a ModelOutput sets the attribute of the same name as well
        return result
    if isinstance(value, tuple):
        parts = [to_fp32(item) for item in value]
        if not _any_changed(value, parts):
            return value
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, list):
        parts = [to_fp32(item) for item in value]
        if not _any_changed(value, parts):
            return value
        listed = copy.copy(value)
        listed[:] = parts
        return listed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_attributes(value, [f.name for f in dataclasses.fields(value)])
    if isinstance(value, (types.SimpleNamespace, torch.distributions.Distribution)):
        return _with_attributes(value, list(vars(value)))
    return value


def _with_attributes(value: Any, names: list[str]) -> Any:
    changed = {}
    for name in names:
        old = getattr(value, name, None)
        new = to_fp32(old)
        if new is not old:
            changed[name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # a frozen dataclass, too
    return result


def _any_changed(before: Any, after: Any) -> bool:
    return any(a is not b for a, b in zip(before, after))
