"""What an autocast context replaces in PyTorch while it is open, in any thread, and restores when the last one ends.

- `torch._C._set_grad_enabled` and `torch._C._InferenceMode` clear the cache of 16-bit weights: autocast finds a copy by
  the tensor's address alone, and weights are written while gradients are not recorded.
- `torch.backends.mha.get_fastpath_enabled` is false in a thread whose policy may give layers formats of their own.
- `_CheckpointFrame` and `CheckpointFunction` of `torch.utils.checkpoint` recompute under the label of the forward pass.

They are names in modules, not attributes of classes: assigning those costs microseconds, since CPython then drops its
caches for the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.pytorch.autocast import active_policy
from mezzo.pytorch.hardware import leaves_autocast_off

_open: list[None] = []  # an entry for each outermost context; `append` and `pop` are atomic
_clear, _is_enabled = torch.clear_autocast_cache, torch.is_autocast_enabled
_DEVICE = active_policy.LABEL_DEVICE
_CORE, _CHECKPOINT, _MHA = vars(torch._C), vars(torch_checkpoint), vars(torch.backends.mha)


def hold() -> None:
    """An outermost context begins in some thread."""
    _open.append(None)
    # Else another thread or `mezzo run` has replaced them.
    if not _swapped(_theirs, _ours) and _CHECKPOINT["CheckpointFunction"] is not _ours[-1]:
        _replace()


def release() -> None:
    """End what one `hold` began. What another library has replaced since stays."""
    _open.pop()
    if not _open:
        if not _swapped(_ours, _theirs):
            for (name, where), theirs, ours in zip(_WHERE.items(), _theirs, _ours):
                if where[name] is ours:
                    where[name] = theirs
        if _open:  # another thread has begun a context meanwhile
            hold()
            release()


def _swapped(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Exchange the five functions; return False, and do nothing, if one of them is not what it was before."""
    core, names = _CORE, _CHECKPOINT
    switch, mode, fused, frame, function = before
    if (
        core["_set_grad_enabled"] is not switch
        or core["_InferenceMode"] is not mode
        or _MHA["get_fastpath_enabled"] is not fused
        or names["_CheckpointFrame"] is not frame
        or names["CheckpointFunction"] is not function
    ):
        return False
    core["_set_grad_enabled"], core["_InferenceMode"], _MHA["get_fastpath_enabled"], frame, function = after
    names["_CheckpointFrame"], names["CheckpointFunction"] = frame, function
    return True


def suspend() -> None:
    """A compilation begins: Dynamo writes the `torch._C._set_grad_enabled` that it finds into its graphs."""
    for name, theirs, ours in zip(_WHERE, _theirs, _ours):
        if _WHERE[name] is _CORE and _CORE[name] is ours:
            _CORE[name] = theirs


def resume() -> None:
    """The compilation is over."""
    if _open:
        _replace()


def _replace() -> None:
    """Replace what is not yet replaced, also what another library has put there since the last time."""
    global _theirs, _ours
    found = [names[name] for name, names in _WHERE.items()]
    pairs = [
        (t, o) if f is t or f is o else (f, wrap(f))
        for f, t, o, wrap in zip(found, _theirs, _ours, _WRAPPERS)
    ]
    _theirs, _ours = tuple(theirs for theirs, _ in pairs), tuple(ours for _, ours in pairs)
    for (name, names), ours in zip(_WHERE.items(), _ours):
        names[name] = ours


def _clearing_switch(original: Callable[[bool], None]) -> Callable[[bool], None]:
    """`torch._C._set_grad_enabled`, which all of torch's Python code uses to switch the recording of gradients."""

    @functools.wraps(original)
    def _set_grad_enabled(mode: bool) -> None:
        original(mode)
        if _is_enabled(_DEVICE):
            _clear()

    return _set_grad_enabled


def _clearing_mode(original: Callable[[bool], Any]) -> type:
    """`torch._C._InferenceMode`, on which `torch.inference_mode` is built."""

    class _InferenceMode:
        def __init__(self, mode: bool) -> None:
            self._mode = original(mode)

        def __enter__(self) -> None:
            self._mode.__enter__()

        def __exit__(self, *exc_info: object) -> None:
            self._mode.__exit__(*exc_info)
            if _is_enabled(_DEVICE):
                _clear()

    return _InferenceMode


def _by_parts(original: Callable[[], bool]) -> Callable[[], bool]:
    """In evaluation transformer layers ask this before they call one op: no layer inside would have its format."""

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and not active_policy.is_by_parts(active_policy.label())

    get_fastpath_enabled.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]  # torch.jit.script
    return get_fastpath_enabled


def _labelled_frame(original: Callable[..., Any]) -> Callable[..., Any]:
    """Non-reentrant checkpoints, also those of FSDP and `torch.distributed`."""

    def frame(recompute_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_under_this_label(recompute_fn), *args, **kwargs)

    return frame


def _labelled_function(original: type[torch.autograd.Function]) -> type:
    """Reentrant checkpoints."""

    class CheckpointFunction(original):  # type: ignore[misc,valid-type]
        @classmethod
        def apply(cls, run_function: Any, *args: Any) -> Any:
            return original.apply(_under_this_label(run_function), *args)

    return CheckpointFunction


_WHERE = {
    "_set_grad_enabled": _CORE,
    "_InferenceMode": _CORE,
    "get_fastpath_enabled": _MHA,
    "_CheckpointFrame": _CHECKPOINT,
    "CheckpointFunction": _CHECKPOINT,
}
_WRAPPERS: Any = (_clearing_switch, _clearing_mode, _by_parts, _labelled_frame, _labelled_function)
_theirs: tuple[Any, ...] = tuple(names[name] for name, names in _WHERE.items())
_ours: tuple[Any, ...] = tuple(wrap(found) for wrap, found in zip(_WRAPPERS, _theirs))


def _under_this_label(function: Any) -> Any:
    """The function, each call of which runs under the present label."""
    code = active_policy.label()
    for device_type, policy in active_policy.binding_of(code):
        if policy.compute == "tf32" and not leaves_autocast_off(policy, device_type):
            raise UnsupportedPrecisionError(
                f"torch.utils.checkpoint under policy '{policy}': {device_type} has no TF32, so Mezzo rounds factors "
                "of products, and the recomputation would not round them. Train without checkpointing, or in bf16, "
                "fp16 or fp8."
            )

    @functools.wraps(function)
    def under_label(*args: Any, **kwargs: Any) -> Any:
        hold()  # for checkpoints inside this one
        try:
            with active_policy.rebound(code):
                return function(*args, **kwargs)
        finally:
            release()

    return under_label
