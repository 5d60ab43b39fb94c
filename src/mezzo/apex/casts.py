"""O1: Mezzo's autocast from `initialize` to the end of the script, and functions that users register.

Apex replaced functions of torch. Here the calling thread enters one `mezzo.autocast("fp16")` and stays in it, so that
losses and functions outside of modules are cast too. It is suspended during backward (`scale_loss`), while an optimizer
steps, and in `disable_casts`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.apex.state import state
from mezzo.core.errors import UsageError
from mezzo.pytorch.autocast.context import autocast, default_device_type
from mezzo.pytorch.autocast.modules import cast_inside
from mezzo.runner.patches import Patches

_Function = Callable[..., Any]
registered: list[tuple[Any, str, str]] = []  # module, name and cast, until the next `init`


class Handle:
    """What `init` returns."""

    def __init__(self, device_type: str, policy: str | None) -> None:
        self.device_type, self.suspended = device_type, 0
        self._patches = Patches()
        self._thread = threading.get_ident()
        self._context: Any = None
        if policy is not None:
            self._context = autocast(policy, device_type)
            self._context.__enter__()
            for module, name, how in registered:
                self._patches.set(module, name, _cast(how, getattr(module, name)))
            registered.clear()

    def is_active(self) -> bool:
        """Whether functions are cast now."""
        return self._context is not None and not self.suspended

    def _deactivate(self) -> None:
        """End autocast, and put registered functions back."""
        self._patches.undo()
        context, self._context = self._context, None
        if context is not None and self._thread == threading.get_ident():
            context.__exit__(None, None, None)


def init(
    enabled: bool = True,
    *ignored: Any,
    allow_banned: bool = False,
    device_type: str = "",
    **also_ignored: Any,
) -> Handle:
    """Switch O1's casts on, until the returned handle's `_deactivate()`; `initialize` calls it.

    `allow_banned` runs `binary_cross_entropy` in FP32, which otherwise refuses 16-bit inputs.
    """
    if state.handle is not None:
        state.handle._deactivate()
    policy = "fp16,op.binary_cross_entropy=fp32" if allow_banned else "fp16"
    state.handle = Handle(device_type or default_device_type(), policy if enabled else None)
    return state.handle


@contextmanager
def disable_casts() -> Iterator[None]:
    """A block in which nothing is cast."""
    handle = state.handle
    if handle is None or not handle.is_active():
        yield
        return
    handle.suspended += 1
    try:
        with autocast("fp32", handle.device_type):
            yield
    finally:
        handle.suspended -= 1


def _cast(how: str, function: _Function) -> _Function:
    # Autocast would cast the inputs of torch's own op once more; what the user registered comes first.
    is_torch = str(getattr(function, "__module__", "") or "torch").partition(".")[0] == "torch"

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        handle = state.handle
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        dtype = torch.float16 if how == "half" else torch.float32
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if how != "promote" or {torch.float16, torch.float32} <= dtypes:
            to = functools.partial(_to, dtype, handle.device_type)
            args, kwargs = cast_inside((args, kwargs), to)
        with disable_casts() if is_torch else nullcontext():
            return function(*args, **kwargs)

    return cast


def _to(dtype: torch.dtype, device_type: str, value: Any) -> Any:
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device_type
    return value.to(dtype) if is_cast else value


def _register(how: str, module: Any, name: str) -> None:
    if not callable(getattr(module, name, None)):
        where = getattr(module, "__name__", repr(module))
        raise UsageError(
            f"amp.register_{how}_function: {where} has no function {name!r}. Example: "
            f"amp.register_{how}_function(torch, 'bmm')"
        )
    registered.append((module, name, how))


# Decorators: while casts are on, inputs become fp16, or FP32, or FP32 if they are of both formats. The `register_`
# forms do so for `module.name`, from the next `initialize` on.
half_function, float_function, promote_function = (
    functools.partial(_cast, how) for how in ("half", "float", "promote")
)
register_half_function, register_float_function, register_promote_function = (
    functools.partial(_register, how) for how in ("half", "float", "promote")
)
