"""The matrix products of a recurrent layer on a CPU: of 16-bit factors, summed in FP32.

Where the CPU multiplies the format itself, factors are bf16 and a product is rounded once, to bf16, when it is done:
what a tensor core's library gives. Elsewhere they are FP32 numbers with 16-bit values, and products stay FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mezzo.pytorch.machine import native_formats

Multiply = Callable[[Tensor, Tensor], Tensor]
"""``factor @ weight.t()``, of [n, in], in [n, out] that may be written to, or in another tensor."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def factor_dtype(compute: torch.dtype) -> torch.dtype:
    """In which dtype factors and products are on this CPU: `compute` itself, or FP32."""
    is_native = compute is torch.bfloat16 and _NAMES[compute] in native_formats("cpu")
    return compute if is_native else torch.float32


def factor(x: Tensor, compute: torch.dtype, dtype: torch.dtype) -> Tensor:
    """A tensor's nearest values in `compute`, as `dtype`, contiguous."""
    return x.detach().to(compute).to(dtype).contiguous()


def times(weight: Tensor, rows: int) -> Multiply:
    """What multiplies by one weight [out, in] many times, about so many rows at once.

    oneDNN reorders a weight for itself before each product; here it does so once. With few rows that is a fifth of the
    time, of an FP32 product too, which PyTorch otherwise leaves to MKL.
    """
    if _packs(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        linear = torch.ops.mkldnn._linear_pointwise.default
        return lambda factor, out: linear(factor, packed, None, "none", [], "")
    transposed = weight.t()
    return lambda factor, out: torch.mm(factor, transposed, out=out)


def add_to(total: Tensor, grads: Tensor, factors: Tensor) -> None:
    """``total += grads.t() @ factors`` in FP32, of [n, out] and [n, in]; a bf16 product is rounded once."""
    if grads.dtype is torch.float32:
        total.addmm_(grads.t(), factors)
    else:
        total += torch.mm(grads.t(), factors)


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    has = all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call,unused-ignore]
    return has and is_there and (dtype is torch.float32 or bool(ops._is_mkldnn_bf16_supported()))
