"""What a region replaces in PyTorch while it is open, in any thread, and puts back when the last one ends.

| replaced                                                 | for                                  |
|----------------------------------------------------------|--------------------------------------|
| `set_grad_enabled` (init, exit), `inference_mode` (exit) | clearing the cache of 16-bit weights |
| `_CheckpointFrame`, `CheckpointFunction.forward`         | recomputing under the same policy    |

Weights: `torch.autocast` keeps the 16-bit copy of an FP32 leaf until the outermost region ends, and finds it by the
tensor's address alone. A weight that is written in between would be used at its old value, and a copy made under
`no_grad` would be used later without a gradient. Weights are written while gradients are not recorded: by an
optimizer's step, or in a block under `no_grad`. So each switch of the recording clears the copies. A write through
``p.data`` or ``p.detach()`` switches nothing and is not noticed, as by `torch.autocast`.

Checkpoints: `torch.utils.checkpoint` restores autocast's switch and dtype for the device and the CPU before it
recomputes, and not those of the backends that carry the label. So the function to recompute is wrapped when the
forward pass is checkpointed, with the label of that moment.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.grad_mode import inference_mode, set_grad_enabled

from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.pytorch.region import compiling, identity
from mezzo.pytorch.tf32 import leaves_autocast_off

__all__ = ["hold", "release"]

_lock = threading.Lock()
_held = 0
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there last, what takes its place
_clear, _is_enabled, _DEVICE = torch.clear_autocast_cache, torch.is_autocast_enabled, identity.LABEL_DEVICE


def hold() -> None:
    """An outermost region begins in some thread."""
    global _held
    with _lock:
        _held += 1
        if _held > 1:
            return
        if not _replaced or any([vars(owner)[name] is not was for owner, name, was, _ in _replaced]):
            found = [(owner, name, vars(owner)[name], wrap) for owner, name, wrap in _TABLE]
            _replaced[:] = [(owner, name, original, wrap(original)) for owner, name, original, wrap in found]
        for owner, name, _, wrapper in _replaced:
            setattr(owner, name, wrapper)
    compiling.set_up()


def release() -> None:
    """End what one `hold` began. What someone else has replaced since is theirs, and stays."""
    global _held
    with _lock:
        _held -= 1
        if not _held:
            for owner, name, original, wrapper in _replaced:
                if vars(owner)[name] is wrapper:
                    setattr(owner, name, original)


def _clearing(original: Callable[..., Any]) -> Callable[..., Any]:
    """What switches the recording of gradients, and clears the cache of a region."""

    @functools.wraps(original)
    def switch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _is_enabled(_DEVICE):
            _clear()
        return result

    return switch


def _labelled_frame(original: Callable[..., Any]) -> Callable[..., Any]:
    """Non-reentrant checkpoints, also those of FSDP and `torch.distributed`."""

    def frame(recompute_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_under_this_label(recompute_fn), *args, **kwargs)

    return frame


def _labelled_function(original: Any) -> Any:
    """Reentrant checkpoints."""
    forward = original.__func__

    def labelled(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, _under_this_label(run_function), *args)

    return staticmethod(labelled)


_TABLE: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (set_grad_enabled, "__init__", _clearing),
    (set_grad_enabled, "__exit__", _clearing),
    (inference_mode, "__exit__", _clearing),
    (torch_checkpoint, "_CheckpointFrame", _labelled_frame),
    (torch_checkpoint.CheckpointFunction, "forward", _labelled_function),
)


def _under_this_label(function: Any) -> Any:
    """The function, with a region of the label in force now around each call.

    Raises:
        UnsupportedPrecisionError: a policy in force can't be put back there: `torch.utils.checkpoint` recomputes inside
            `torch.autocast` objects, which refuse the dtype of emulated TF32 and would leave it out.
    """
    code = identity.label()
    for device_type, policy in identity.binding_of(code):
        if policy.compute == "tf32" and not leaves_autocast_off(policy, device_type):
            raise UnsupportedPrecisionError(
                f"activation checkpointing under policy '{policy}': {device_type} has no TF32, so its products are "
                "rounded by Mezzo, and torch.utils.checkpoint would recompute them without. Train without "
                "checkpointing, or in bf16, fp16 or fp8, which it carries."
            )

    @functools.wraps(function)
    def under_label(*args: Any, **kwargs: Any) -> Any:
        with _rebound(code):
            return function(*args, **kwargs)

    return under_label


@contextmanager
def _rebound(code: int) -> Iterator[None]:
    hold()  # a checkpoint within it is recomputed, too
    try:
        with identity.rebound(code):
            yield
    finally:
        release()
