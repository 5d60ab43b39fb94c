"""Ops computed as 16-bit hardware computes them, on hardware that lacks the format: 16 bits in, FP32 products and sums,
16 bits out. Differentiable casts around the FP32 op keep what PyTorch knows of it: derivatives of any order, vmap,
compilation, memory format. Gradients follow the same contract, and `packing` keeps 16 bits for backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.packing import Packing, Rounded, may_pack, with_hooks
from mezzo.pytorch.kernels.plain import PLAIN

_NARROWING = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # half the time of `Tensor.to`
_PASSED = (type(None), bool, int, float)

SMALL = 1 << 12
"""Elements up to which an input's FP32 copy is kept for backward, because hooks would cost more than the op.

An in-place change of such an input before backward is not refused: backward uses the values from before it, as with an
input that `torch.autocast` has cast.
"""

# Op -> `keep_rank` of `Packing`, None for all others. A product of broadcast inputs saves a copy of them, and rounding
# it loses nothing; an attention's probabilities and output and a recurrent step's gates are rounded. The LSTM's
# workspace stays.
KEEP_RANK: Mapping[str, int] = {
    **dict.fromkeys(("matmul", "einsum", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), 1),
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot", "lstm", "gru", "rnn_tanh", "rnn_relu"), 2),
    "scaled_dot_product_attention": 3,
}


class _Nesting(threading.local):
    inside = False


_nesting = _Nesting()


def emulated(
    op: Callable[..., Any], compute: torch.dtype, keep_rank: int | None = None
) -> Callable[..., Any]:
    """The op in `compute` with FP32 arithmetic: ``op(*[x.to(compute).float() for x in inputs]).to(compute)``."""
    fast: Callable[..., Any] = getattr(op, "_op", op)

    def run(*args: Any, **kwargs: Any) -> Any:
        if _nesting.inside:
            return op(*args, **kwargs)
        _nesting.inside = True
        try:
            small = _small(args, compute) if keep_rank is None and not kwargs else None
            if small is not None:
                return _narrow(fast(*small), compute)
            inputs: list[Rounded] = []
            wide_args = [_widen(value, compute, inputs) for value in args]
            wide_kwargs = {name: _widen(value, compute, inputs) for name, value in kwargs.items()}
            if not inputs:
                return op(*args, **kwargs)
            if not may_pack(inputs):
                return _narrow(op(*wide_args, **wide_kwargs), compute)
            return saving_low(op, wide_args, wide_kwargs, inputs, compute, keep_rank, narrows=True)
        finally:
            _nesting.inside = False

    return run


def saving_low(
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Rounded],
    compute: torch.dtype,
    keep_rank: int | None = None,
    narrows: bool = False,
) -> Any:
    """The op's result, in `compute` if it narrows. For backward it saves `inputs` in their narrow form."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    packing = Packing(inputs, compute, keep_rank, outer)
    try:
        wide = with_hooks(packing.pack, Packing.unpack, op, *args, **kwargs)
        if not narrows:
            return wide
        low = _narrow(wide, compute)
        packing.settle(wide, low)
        return low
    finally:
        packing.forget()


def _small(args: tuple[Any, ...], compute: torch.dtype) -> list[Any] | None:
    """The arguments with their tensors rounded and widened; None unless all are small plain tensors or numbers."""
    narrow = _NARROWING[compute]
    wide: list[Any] = []
    rounded = False
    for value in args:
        kind = type(value)
        if kind in PLAIN:
            if value.numel() > SMALL:
                return None
            if value.is_floating_point():
                rounded = True
                value = narrow(value).float()
        elif kind not in _PASSED:
            return None
        wide.append(value)
    return wide if rounded else None


def _widen(value: Any, compute: torch.dtype, inputs: list[Rounded]) -> Any:
    """The argument with its floating tensors rounded and widened; each is added to ``inputs``."""
    # Not a closure: a recursive one is a reference cycle, which keeps the FP32 copies until garbage collection.
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        inputs.append(Rounded(value, compute))
        return inputs[-1].wide
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_widen(item, compute, inputs) for item in value]
    return value


def _narrow(result: Any, compute: torch.dtype) -> Any:
    if isinstance(result, Tensor):
        return _NARROWING[compute](result) if result.is_floating_point() else result
    if isinstance(result, (list, tuple)):
        return tuple(_narrow(item, compute) for item in result)
    return result
