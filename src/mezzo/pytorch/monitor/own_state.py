"""State that a module keeps in attributes of its own: numbers, tensors, containers, generators of random numbers."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = (int, float, bool, type(None), Tensor)
_CONTAINERS = (list, dict, set, deque)


def changeable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of what a call may change; nothing of `nn.Module`'s own, and no private containers."""
    for name, value in module.__dict__.items():
        if isinstance(value, _VALUES) and not isinstance(value, nn.Parameter):
            if name != "training":
                yield name, value
        elif (type(value) in _CONTAINERS and not name.startswith("_")) or _is_generator(value):
            yield name, value


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def copied(value: Any) -> Any:
    """What `put_back` needs to make a value what it is now."""
    if type(value) in _CONTAINERS:
        return value.copy()
    if isinstance(value, Tensor):
        return value.detach() if value.grad_fn is not None else value
    if isinstance(value, (torch.Generator,)) or hasattr(value, "get_state"):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if hasattr(value, "bit_generator") else value


def put_back(module: nn.Module, name: str, was: Any, copy: Any) -> None:
    """Let an attribute be what it was, the same object with the same content."""
    module.__dict__[name] = was
    if type(was) in (list, deque):
        was.clear()
        was.extend(copy)
    elif type(was) in (dict, set):
        was.clear()
        was.update(copy)
    elif isinstance(was, torch.Generator) or hasattr(was, "set_state"):
        was.set_state(copy)
    elif isinstance(was, random.Random):
        was.setstate(copy)
    elif hasattr(was, "bit_generator"):
        was.bit_generator.state = copy


def same(was: Any, copy: Any, now: Any) -> bool:
    """Whether an attribute still is, and holds, what it was."""
    if isinstance(now, Tensor):
        return isinstance(was, Tensor) and was.data_ptr() == now.data_ptr()
    if was is not now and (type(now) in _CONTAINERS or _is_generator(now)):
        return False
    if type(now) in (list, deque):
        return len(copy) == len(now) and all(one is other for one, other in zip(copy, now))
    if type(now) in (dict, set):
        return len(copy) == len(now) and all(one in now for one in copy)
    if _is_generator(now):
        return False  # drawn from or not: its state is small
    return bool(was == now)
