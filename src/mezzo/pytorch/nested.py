"""The tensors in a call's arguments or results, in lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A value whose tensors, or objects of another `kind`, in lists, tuples and dicts changed, in new containers."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, change, kind) for item in value])
    if type(value) in (list, tuple) or hasattr(value, "n_sequence_fields"):  # the latter: torch.return_types
        return type(value)([mapped(item, change, kind) for item in value])
    if isinstance(value, deque):
        return deque([mapped(item, change, kind) for item in value], value.maxlen)
    if isinstance(value, dict):
        new = copy.copy(value)
        for name, item in value.items():
            new[name] = mapped(item, change, kind)
        return new
    return value


def tensors(value: Any, depth: int = 6, *, objects: bool = False) -> Iterator[Tensor]:
    """The tensors in a value: itself, or in lists, tuples, dicts and dataclasses; `objects`: in any object."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, (list, tuple, deque)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif not isinstance(value, (type, nn.Module)) and hasattr(value, "__dict__"):
        items = vars(value).values() if objects or hasattr(value, "__dataclass_fields__") else ()
    if depth:
        for item in items:
            yield from tensors(item, depth - 1, objects=objects)
