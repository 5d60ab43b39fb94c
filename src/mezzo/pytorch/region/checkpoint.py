"""Activation checkpointing keeps the policy: both variants recompute under the label of their forward.

`torch.utils.checkpoint` restores autocast's switch and dtype for the device and the CPU before it recomputes,
and not those of the backends that carry the label. So the label is taken when the forward is checkpointed and
rebound around the recomputation, at the one place that each variant has: the frame that holds the recomputing
function (``use_reentrant=False``; also FSDP's and `torch.distributed`'s wrappers), and the autograd Function
(``use_reentrant=True``). What was checkpointed outside Mezzo's regions is recomputed without a label, even where
backward runs inside one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from mezzo.core.errors import UnsupportedPrecisionError
from mezzo.pytorch.region import identity, writers
from mezzo.pytorch.tf32 import leaves_autocast_off

_lock = threading.Lock()
_installed = False


def install(*_: object) -> None:
    """Wrap both variants, once a process: called when the first policy gets its label."""
    global _installed
    with _lock:
        if not _installed:
            _wrap_frame()
            _wrap_function()
            _installed = True


def _wrap_frame() -> None:
    frame: Any = torch_checkpoint._CheckpointFrame
    original = frame.__init__

    @functools.wraps(original)
    def init_noting_label(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        original(self, _under(_label_to_keep(), recompute_fn), *args, **kwargs)

    frame.__init__ = init_noting_label


def _wrap_function() -> None:
    function: Any = torch_checkpoint.CheckpointFunction
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def forward_noting_label(ctx: Any, *args: Any) -> Any:
        ctx.mezzo_label = _label_to_keep()
        return forward(ctx, *args)

    @functools.wraps(backward)
    def backward_under_label(ctx: Any, *args: Any) -> Any:
        with _rebound(ctx.mezzo_label):
            return backward(ctx, *args)

    function.forward = staticmethod(forward_noting_label)
    function.backward = staticmethod(backward_under_label)


@contextmanager
def _rebound(code: int) -> Iterator[None]:
    """The label's own region around a recomputation, which leaves nothing behind of what `writers` saw in it."""
    outermost = not identity.label()
    cached = torch.is_autocast_cache_enabled()
    try:
        with identity.rebound(code):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        if outermost:
            writers.forget_aliases()


def _label_to_keep() -> int:
    """The label in force, under which recomputation will run.

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
    return code


def _under(code: int, function: Any) -> Any:
    @functools.wraps(function)
    def under_label(*args: Any, **kwargs: Any) -> Any:
        with _rebound(code):
            return function(*args, **kwargs)

    return under_label
