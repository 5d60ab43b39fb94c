"""Max-pooling that keeps its indices in as few bits as they need.

For backward PyTorch keeps, beside the 16-bit input, one int64 for each element of the result: where in its plane the
maximum lay. That is four times the bytes of the 16-bit result itself. An index is smaller than the plane, so 16 bits
hold it in planes of up to 2^15 elements (181 x 181), and 32 bits in all others that fit a machine. They are widened
again when backward asks, one layer at a time: values, gradients and second derivatives are PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.packing import Versioned
from mezzo.pytorch.kernels.plain import is_plain

# Hooks cost some 10 us a call: as much as a core takes to narrow this many indices.
_WORTH_IT = 1 << 14

# Op -> over how many trailing dimensions its indices run.
SPATIAL = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}


def keeping_short_indices(op: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A max-pooling op that keeps int16 or int32 indices where it would keep int64 ones.

    Args:
        op: a key of `SPATIAL`.
        call: PyTorch's own, with its arguments.
    """
    spatial = SPATIAL[op]

    def pooled(x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        hooks_work = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        if not (
            x.requires_grad
            and x.numel() >= _WORTH_IT
            and torch.is_grad_enabled()
            and is_plain(x)
            and hooks_work
        ):
            return call(x, *args, **kwargs)
        short = _narrowest(math.prod(x.shape[-spatial:]))
        if short is None:
            return call(x, *args, **kwargs)
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


def _narrowest(elements: int) -> torch.dtype | None:
    """The shortest integers that can say a place among so many; None where those are int64."""
    return next(
        (dtype for dtype in (torch.int16, torch.int32) if elements - 1 <= torch.iinfo(dtype).max), None
    )
