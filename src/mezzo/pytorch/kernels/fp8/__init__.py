"""Casts between FP32, bf16 or fp16 and the two 8-bit formats: what a linear layer's factors go through.

A tensor is multiplied by its scale, a power of two, and stored as codes of `torch.float8_e4m3fn` (forward) or
`torch.float8_e5m2` (gradients). PyTorch's own casts differ between the two: to e4m3fn they turn an infinity into 448
and so hide it, to e5m2 they turn what is too large into an infinity. Here both do the same:

    finite values     to the nearest of the format, ties to even; beyond its largest value, to that (*saturate*)
    infinities        infinity in e5m2; NaN of their sign in e4m3fn, which has no infinity
    NaN               NaN: quiet, without payload, its sign kept
    zeros             keep their sign

No function here has a gradient: a caller defines what the gradient of a product is.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.fp8 import reference

__all__ = ["FP8", "amax", "cast", "count_saturated", "quantize", "scale_of", "widen"]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest finite magnitude, in FP32, without a host sync.

    Naive code: ``x.float().abs().nan_to_num(0, 0, 0).amax()``, or ``.amax(dim, keepdim=True)``. NaN and infinities
    have no say, since a scale that they decided would zero everything else; they are seen in the codes.

    Args:
        x: FP32, bf16 or fp16, of any shape.
        dim: None for one number; else the dimension that is reduced.

    Returns:
        FP32, of shape [], or of x's with `dim` 1: ``dim=1`` of [M, K] gives [M, 1]. 0 where there is no finite element.
    """
    _check(x, "amax")
    return _kernel(x).amax(x, dim)


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The scales with which largest magnitudes come just under a format's largest value, without a host sync.

    ``2 ** (floor(log2(max / amax)) - margin)``, computed exactly: without a margin ``amax * scale <= max`` and
    ``amax * scale * 2 > max``. The exponent is kept from -126 to 126, so that a scale and its inverse are both normal
    numbers of FP32. Of 0 it is 1; an infinity or NaN counts as FP32's largest number.

    Args:
        amax: FP32, not negative, any shape.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        margin: binades that are left free, 0 to 15.

    Returns:
        FP32, of amax's shape.
    """
    _check_format(dtype, "scale_of")
    return reference.scale_of(amax, dtype, margin)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of ``x * scale`` in an 8-bit format; what becomes of special values stands above.

    Naive code, for finite elements: ``(x.float() * scale).clamp(-max, max).to(dtype)``. It rounds once where the scale
    is a power of two; another one is rounded once in the product and once after it.

    Args:
        x: FP32, bf16 or fp16, of any shape.
        scale: FP32, positive and finite: [], or for x of [M, K] one a row, [M, 1], or one a column, [1, K].
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        of x's shape, contiguous.

    Raises:
        UsageError: other dtypes.
    """
    _check(x, "cast")
    _check_format(dtype, "cast")
    return _kernel(x, scale).cast(x, scale, dtype)


def count_saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """How many finite elements `cast` cuts to the format's largest value, without a host sync.

    Those which rounding alone would not have brought there: from 61,440 in e5m2, above 464 in e4m3fn. Arguments as of
    `cast`.

    Returns:
        int64, of shape [].
    """
    _check(x, "count_saturated")
    _check_format(dtype, "count_saturated")
    return _kernel(x, scale).count_saturated(x, scale, dtype)


def quantize(x: Tensor, dtype: torch.dtype, margin: int = 0, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and the scale that the tensor's own largest magnitude asks for: `amax`, `scale_of`, `cast`.

    Args:
        x: FP32, bf16 or fp16, of any shape.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        margin: see `scale_of`.
        dim: None for one scale; 1 for one a row, [M, 1]; 0 for one a column, [1, K].

    Returns:
        codes of x's shape, and the FP32 scale.
    """
    scale = scale_of(amax(x, dim), dtype, margin)
    return cast(x, scale, dtype), scale


def widen(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes times `inv_scale`, the inverse of the scale that they were cast with.

    Naive code: ``(codes.float() * inv_scale).to(dtype)``. Exact where `inv_scale` is a power of two and the value
    within the dtype's range. Infinities, NaN and the signs of zeros are kept.

    Args:
        codes: `torch.float8_e4m3fn` or `torch.float8_e5m2`, of any shape.
        inv_scale: FP32: [], [M, 1] or [1, K], as in `cast`.
        dtype: `torch.bfloat16` or `torch.float32`.

    Returns:
        of the codes' shape, contiguous.
    """
    _check_format(codes.dtype, "widen")
    if dtype not in (torch.bfloat16, torch.float32):
        raise UsageError(f"widen(): dtype {dtype}. Use torch.bfloat16 or torch.float32.")
    return _kernel(codes, inv_scale).widen(codes, inv_scale, dtype)


def _check(x: Tensor, what: str) -> None:
    if x.dtype not in _WIDE:
        raise UsageError(f"{what}(): a {x.dtype} tensor. Use one of {', '.join(map(str, _WIDE))}.")


def _check_format(dtype: torch.dtype, what: str) -> None:
    if dtype not in FP8:
        raise UsageError(f"{what}(): {dtype} is no 8-bit format. Use one of {', '.join(map(str, FP8))}.")


def _kernel(*tensors: Tensor) -> ModuleType:
    return reference
