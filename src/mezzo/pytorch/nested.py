"""The tensors in a call's arguments or results, in lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A value whose tensors, or objects of another `kind`, inside its containers are changed, in new containers."""
    return changed(value, change, kind, True)


def changed(value: Any, change: Callable[[Any], Any], kind: type = object, copies: bool = False) -> Any:
    """A value with each tensor or object of a `kind` inside its containers changed; itself if none is, or `copies`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [changed(item, change, kind, copies) for item in value]
        if not copies and all(new is old for new, old in zip(parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, (dict, list, deque)):
        before: Mapping[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
        setter: Any = type(value).__setitem__  # a ModelOutput's sets the attribute of the same name as well
    elif before := _attributes(value):
        setter = object.__setattr__  # also for a frozen dataclass
    else:
        return change(value) if isinstance(value, kind) else value
    after = {key: changed(old, change, kind, copies) for key, old in before.items()}
    if not copies and all(new is before[key] for key, new in after.items()):
        return value
    if type(value) is dict:
        return after
    result = copy.copy(value)
    for key, new in after.items():  # also what is unchanged: Dynamo's copy of a ModelOutput has no items
        setter(result, key, new)
    return result


def tensors(value: Any, depth: int = 6, *, objects: bool = False) -> Iterator[Tensor]:
    """The tensors in a value: itself, or in containers, those of `changed` and mappings; `objects`: in any object."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, (list, tuple, deque)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif not isinstance(value, (type, nn.Module)) and hasattr(value, "__dict__"):
        items = (vars(value) if objects else _attributes(value)).values()
    if depth:
        for item in items:
            yield from tensors(item, depth - 1, objects=objects)


def _attributes(value: Any) -> dict[str, Any]:
    """Those of a dataclass, a namespace or a distribution; of anything else none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return vars(value) if isinstance(value, (types.SimpleNamespace, torch.distributions.Distribution)) else {}
