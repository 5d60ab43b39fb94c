"""Outputs of cheap ops that backward makes again from the op's input, which the op itself keeps in any case.

`gelu` keeps its input for backward and the product after it keeps gelu's output: two tensors of one size, of which
the second is one pass over the first. In a region whose policy has ``recompute=gelu`` the second is not kept. What
is saved for backward passes the hooks below: a tensor that lies where a remembered op has written is replaced by
that op's call. The recomputed values are the same bits, since kernel, input and formats are.

Only what autograd saves is affected, and only in eager mode: a compiler decides by itself what it keeps. An op inside
`torch.utils.checkpoint` is recomputed by that anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["pop", "push", "remembering"]

Action = Callable[..., Any]


@dataclass(slots=True)
class _Made:
    """How an op's output was made.

    Args:
        storage: of the output, weakly: an address means something only while this lives.
        call: makes the output again.
        inputs: the tensors that `call` reads, each with its version when it was read.
        version: of the output when it was made.
    """

    storage: weakref.ref[torch.UntypedStorage]
    call: Callable[[], Tensor]
    inputs: tuple[tuple[Tensor, int], ...]
    version: int


@dataclass(slots=True)
class _Kept:
    """A tensor that was saved as it is, which must not have changed since."""

    tensor: Tensor
    version: int


@dataclass(slots=True)
class _Recomputed:
    """A tensor that was not saved: how it was made, and which part of it was meant."""

    made: _Made
    size: torch.Size
    stride: tuple[int, ...]


_made: dict[int, _Made] = {}


class _Thread(threading.local):
    """For each `push` of this thread that is not over, whether it could hook anything."""

    def __init__(self) -> None:
        self.hooked: list[bool] = []


_thread = _Thread()


def push() -> None:
    """From now on, what autograd saves in this thread is not kept where it can be made again.

    Inside a transform of `torch.func`, which takes no hooks, all is kept.
    """
    hooked = bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]
    if hooked:
        torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)
    _thread.hooked.append(hooked)


def pop() -> None:
    """End what the last `push` began."""
    if _thread.hooked.pop():
        torch._C._autograd._pop_saved_tensors_default_hooks()


def remembering(op: Action) -> Action:
    """The op's action, which leaves a note of how its output can be made again."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # Of a full-width output there is nothing to save that the policy set out to save.
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
    # Detached: a note must not keep the graph alive.
    bare = [value.detach() if isinstance(value, Tensor) else value for value in args]
    named = {key: value.detach() if isinstance(value, Tensor) else value for key, value in kwargs.items()}

    def call() -> Tensor:
        with torch.no_grad():
            again: Tensor = op(*bare, **named)
        return again

    storage = out.untyped_storage()
    key = storage._cdata

    def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
        found = _made.get(key)
        if found is not None and found.storage is reference:
            del _made[key]

    kept = tuple((tensor.detach(), tensor._version) for tensor in tensors)
    _made[key] = _Made(weakref.ref(storage, forget), call, kept, out._version)


def _pack(tensor: Tensor) -> _Kept | _Recomputed:
    made = _made.get(tensor.untyped_storage()._cdata) if is_plain(tensor) else None
    if (
        made is not None
        and made.version == tensor._version
        and tensor.storage_offset() == 0
        and made.storage() is tensor.untyped_storage()
    ):
        return _Recomputed(made, tensor.shape, tensor.stride())
    return _Kept(tensor, tensor._version)


def _unpack(saved: _Kept | _Recomputed) -> Tensor:
    if isinstance(saved, _Kept):
        _unchanged(saved.tensor, saved.version)
        return saved.tensor
    for tensor, version in saved.made.inputs:
        _unchanged(tensor, version)
    return saved.made.call().as_strided(saved.size, saved.stride, 0)


def _unchanged(tensor: Tensor, version: int) -> None:
    # Autograd checks this itself, but for tensors that pass hooks.
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}. "
            "Change a copy of it, or call backward first."
        )
