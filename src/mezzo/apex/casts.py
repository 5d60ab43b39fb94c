"""Casts: O1's, which are Mezzo's autocast from `initialize` to the end of the script, and those of arguments.

Under O1 Apex replaced functions of torch. Here the calling thread enters one `mezzo.autocast("fp16")` and stays in it,
so that losses and functions outside of modules are cast too. It is suspended during backward (`scale_loss`), while an
optimizer steps, and in `disable_casts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.apex.state import state
from mezzo.pytorch.autocast.context import autocast, default_device_type
from mezzo.pytorch.nested import changed, tensors
from mezzo.runner.patches import Patches

registered: list[tuple[Any, str, Any]] = []  # module, name and function, until the next `init`


def cast_to(dtype: torch.dtype, given: Any, device_type: str = "") -> Any:
    """The same structure with its floating tensors cast, of one device type or of all; batches by their own `to`."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            is_meant = value.is_floating_point() and device_type in ("", value.device.type)
        else:
            is_meant = hasattr(value, "to") and not isinstance(value, nn.Module)  # of the script's own class
        return value.to(dtype) if is_meant else value

    return changed(given, one)


class Handle(ExitStack):
    """What `init` returns: casts that are on until `_deactivate()`."""

    device_type = "cpu"
    _deactivate = ExitStack.close

    def is_active(self) -> bool:
        """Whether functions are cast now."""
        return torch.is_autocast_enabled(self.device_type)


def init(enabled: bool = True, *, allow_banned: bool = False, device_type: str = "", **_: Any) -> Handle:
    """Switch O1's casts on, until the returned handle's `_deactivate()`; `initialize` calls it.

    `allow_banned` runs `binary_cross_entropy` in FP32, which otherwise refuses 16-bit inputs.
    """
    if state.handle is not None:
        state.handle.close()
    state.handle = handle = Handle()
    handle.device_type = device_type or default_device_type()
    if enabled:
        policy = "fp16,op.binary_cross_entropy=fp32" if allow_banned else "fp16"
        handle.enter_context(autocast(policy, handle.device_type))
        patches = Patches()
        handle.callback(patches.undo)
        for one in registered:
            patches.set(*one)
        registered.clear()
    return handle


def disable_casts() -> AbstractContextManager[Any]:
    """A block in which nothing is cast."""
    return nullcontext() if state.handle is None else autocast("fp32", state.handle.device_type)


def cast(how: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: while casts are on, inputs become fp16 ("half"), FP32 ("float"), or FP32 if both are there."""
    # Autocast would cast the inputs of torch's own op once more; what the user registered comes first.
    is_torch = str(getattr(function, "__module__", "") or "torch").partition(".")[0] == "torch"

    @functools.wraps(function)
    def in_format(*args: Any, **kwargs: Any) -> Any:
        handle = state.handle
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        dtypes = {tensor.dtype for tensor in tensors((args, kwargs))}
        if how != "promote" or {torch.float16, torch.float32} <= dtypes:
            dtype = torch.float16 if how == "half" else torch.float32
            args, kwargs = cast_to(dtype, (args, kwargs), handle.device_type)
        with disable_casts() if is_torch else nullcontext():
            return function(*args, **kwargs)

    return in_format


def register(how: str, module: Any, name: str) -> None:
    """Apply `cast(how, ...)` to `module.name` from the next `initialize` on."""
    registered.append((module, name, cast(how, getattr(module, name))))
