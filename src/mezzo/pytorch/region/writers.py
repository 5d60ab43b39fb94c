"""Where a weight may be written inside a region: autocast is told to forget its 16-bit copies there, before any use.

`torch.autocast` keeps the 16-bit copy of an FP32 leaf until the outermost region ends, found by the tensor's address
alone: a weight that is written in between is used at its old value, in silence. A kernel on every op that writes would
see each write, and tax each activation that is written in place and each buffer that an op fills on its way. But
PyTorch itself leaves few ways to write a leaf that requires a gradient, and they can be watched instead:

- while gradients are not recorded (`torch.no_grad`, `set_grad_enabled`, `inference_mode`): then no copies are kept. The
  step of an optimizer is such a time;
- through what shares the weight's memory without a gradient, ``p.data`` and ``p.detach()``: once it was asked for,
  the region keeps no copies;
- by ``p.data = t``: the copies that there are are dropped.

Nothing of this is on the way of an ordinary forward pass. What it can't see: an alias that was taken before the region
and is written inside it while gradients are recorded; `detach()` of a leaf that is no `nn.Parameter`; a weight that is
frozen, written and thawed in one region; memory written behind PyTorch's back (NumPy's view of a weight, a storage's
own `copy_`, an extension, another process).

No copy outlives its outermost region, not even between the losses of an accumulation window, where a second forward
could use it. A write between two regions can be of any kind: ``p.data.add_`` raises no version counter of the
parameter's, and what holds the memory otherwise is seen by nothing. The price is a cast a forward. Weights stored in 16
bits (``weights="split"``) have nothing to cast.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.region import identity

__all__ = ["forget_aliases", "install"]

_patched = False

_label = identity.label
_is_enabled, _DEVICE = (
    torch.is_autocast_enabled,
    identity.LABEL_DEVICE,
)  # at every change of mode: half of `_label()`
_clear = torch.clear_autocast_cache
_is_cache_enabled, _set_cache_enabled = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


class _Thread(threading.local):
    """Why no copies are kept at present in a region of this thread that would keep some."""

    no_gradients = False
    aliased = False


_thread = _Thread()


def install(*_: object) -> None:
    """Watch from now on; called when the first policy gets its label."""
    global _patched
    if not _patched:
        _patched = True
        _watch_data()
        _watch_detach()
        _watch_grad_mode()


def forget_aliases() -> None:
    """The outermost region of this thread is over: aliases of weights that it made no longer matter."""
    _thread.aliased = False


def _gradients_recorded(recorded: bool) -> None:
    """In a region, gradients are recorded from now on, or no longer."""
    if recorded:
        if _thread.no_gradients:
            _thread.no_gradients = False
            _set_cache_enabled(not _thread.aliased)
    elif _is_cache_enabled():
        _clear()
        _set_cache_enabled(False)
        _thread.no_gradients = True


def _untied(tensor: Tensor) -> None:
    """In a region, someone holds what may become a way to write this tensor."""
    if tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32:
        _thread.aliased = True
        if _is_cache_enabled():
            _clear()
            _set_cache_enabled(False)


def _watch_data() -> None:
    plain: Any = torch._C.TensorBase.data

    def read(tensor: Tensor) -> Any:
        if _label():
            _untied(tensor)
        return plain.__get__(tensor)

    def assign(tensor: Tensor, value: Tensor) -> None:
        plain.__set__(tensor, value)
        if _label():
            _clear()

    torch.Tensor.data = property(read, assign, None, plain.__doc__)  # type: ignore[assignment]


def _watch_detach() -> None:
    # A parameter's, and no other tensor's: an op's kernel would be met by each tensor that a tracer detaches.
    def detach(parameter: Tensor) -> Tensor:
        if _label():
            _untied(parameter)
        return torch.Tensor.detach(parameter)

    torch.nn.Parameter.detach = detach  # type: ignore[assignment]


def _watch_grad_mode() -> None:
    # `no_grad` goes through `set_grad_enabled` as well. `enable_grad` ends nothing that must not be ended.
    switch: Any = torch.autograd.grad_mode.set_grad_enabled
    inference: Any = torch.autograd.grad_mode.inference_mode
    init, leave = switch.__init__, switch.__exit__
    infer, infer_no_more = inference.__enter__, inference.__exit__

    def switched(self: Any, mode: bool) -> None:
        init(self, mode)
        if _is_enabled(_DEVICE):
            _gradients_recorded(mode)

    def left(self: Any, *exc_info: Any) -> None:
        leave(self, *exc_info)
        if _is_enabled(_DEVICE):
            _gradients_recorded(torch.is_grad_enabled())

    def inferring(self: Any) -> None:
        infer(self)
        if _is_enabled(_DEVICE):
            _gradients_recorded(torch.is_grad_enabled())

    def inferred(self: Any, *exc_info: Any) -> None:
        infer_no_more(self, *exc_info)
        if _is_enabled(_DEVICE):
            _gradients_recorded(torch.is_grad_enabled())

    switch.__init__, switch.__exit__ = switched, left
    inference.__enter__, inference.__exit__ = inferring, inferred
