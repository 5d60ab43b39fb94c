"""Outputs of cheap ops that backward recomputes from the op's input (``recompute=gelu``), which the op saves anyway.

What autograd saves passes the hooks below: a tensor in the memory that a remembered op has written is replaced by that
op's call, which gives the same bits. Only in eager mode: a compiler decides by itself what it saves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mezzo.pytorch.kernels.packing import Versioned
from mezzo.pytorch.kernels.plain import is_plain

Action = Callable[..., Any]


@dataclass(slots=True)
class _Made:
    """How an op's output was made: `call` makes it again from `inputs`. Its address is unique only while it lives."""

    storage: weakref.ref[torch.UntypedStorage]
    call: Callable[[], Tensor]
    inputs: tuple[Versioned, ...]
    version: int


@dataclass(slots=True)
class _Recomputed:
    """A tensor that was not saved: the output that it is a part of, and which part."""

    made: _Made
    size: torch.Size
    stride: tuple[int, ...]


_made: dict[int, _Made] = {}


_thread = threading.local()  # `hooks`: those of each `push` of this thread, None where none could be set


def push() -> None:
    """From now on, this thread does not save what can be recomputed."""
    hooks: Any = saved_tensors_hooks(_pack, _unpack)
    try:
        hooks.__enter__()
    except RuntimeError:  # hooks are disabled, as in `torch.func`
        hooks = None
    vars(_thread).setdefault("hooks", []).append(hooks)


def pop() -> None:
    """End what the last `push` began."""
    hooks = _thread.hooks.pop()
    if hooks is not None:
        hooks.__exit__()


def remembering(op: Action) -> Action:
    """The op's action, which remembers how its output can be recomputed."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # An FP32 output is saved: the policy is about 16-bit ones.
        if (
            isinstance(out, Tensor)
            and out.requires_grad
            and out.element_size() == 2
            and is_plain(out, *tensors)
        ):
            _remember(out, op, args, kwargs, tensors)
        return out

    return remembered


def _remember(out: Tensor, op: Action, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    # Detached: the call must not keep the graph alive.
    bare = [value.detach() if isinstance(value, Tensor) else value for value in args]
    named = {key: value.detach() if isinstance(value, Tensor) else value for key, value in kwargs.items()}

    def call() -> Tensor:
        with torch.no_grad():
            again: Tensor = op(*bare, **named)
        return again

    storage = out.untyped_storage()
    key = storage.data_ptr()

    def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
        found = _made.get(key)
        if found is not None and found.storage is reference:
            del _made[key]

    inputs = tuple(Versioned(tensor.detach()) for tensor in tensors)
    _made[key] = _Made(weakref.ref(storage, forget), call, inputs, out._version)


def _pack(tensor: Tensor) -> Versioned | _Recomputed:
    made = _made.get(tensor.untyped_storage().data_ptr()) if is_plain(tensor) else None
    if (
        made is not None
        and made.version == tensor._version
        and tensor.storage_offset() == 0
        and made.storage() is tensor.untyped_storage()
    ):
        return _Recomputed(made, tensor.shape, tensor.stride())
    return Versioned(tensor)


def _unpack(saved: Versioned | _Recomputed) -> Tensor:
    if isinstance(saved, Versioned):
        return saved.get()
    for tensor in saved.made.inputs:
        tensor.get()  # raises where the input has changed
    return saved.made.call().as_strided(saved.size, saved.stride, 0)
