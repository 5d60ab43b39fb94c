"""Max-pooling that keeps its indices in 16 or 32 bits: for backward PyTorch keeps an int64 per output element.

int16 holds the place of a maximum in planes of up to 2^15 elements (181 x 181), int32 in all others that fit memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.packing import Versioned, hooks_are_allowed
from mezzo.pytorch.kernels.plain import is_plain

_WORTH_IT = 1 << 14  # elements from which the bytes are worth hooks of some 10 us per call
_SPATIAL = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}  # trailing dimensions that indices span


def keeping_short_indices(op: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's max-pooling op `call` with short indices kept for backward."""
    spatial = _SPATIAL[op]

    def pooled(x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        is_large = x.requires_grad and x.numel() >= _WORTH_IT and torch.is_grad_enabled()
        if not is_large or not is_plain(x) or not hooks_are_allowed():
            return call(x, *args, **kwargs)
        elements = math.prod(x.shape[-spatial:])
        if elements > 1 << 31:
            return call(x, *args, **kwargs)
        short = torch.int16 if elements <= 1 << 15 else torch.int32
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        hold, give = (Versioned, Versioned.get) if outer is None else outer

        def pack(saved: Tensor) -> tuple[Any, bool]:
            is_index = saved.dtype is torch.int64
            return hold(saved.to(short) if is_index else saved), is_index

        def unpack(packed: tuple[Any, bool]) -> Tensor:
            saved: Tensor = give(packed[0])
            return saved.to(torch.int64) if packed[1] else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(x, *args, **kwargs)

    return pooled
