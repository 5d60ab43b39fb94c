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

import functools
import os
from types import ModuleType

import torch
from torch import Tensor

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend
from mezzo.pytorch.kernels.fp8 import reference
from mezzo.pytorch.kernels.plain import is_plain

__all__ = ["FP8", "amax", "cast", "cast_with_amax", "count_saturated", "quantize", "scale_of", "widen"]

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
    result: Tensor = _kernel(x).amax(x, dim)
    return result


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
    if amax.dtype is not torch.float32:
        raise UsageError(
            f"scale_of(): largest magnitudes as {amax.dtype}. Give them in FP32, as amax() does."
        )
    result: Tensor = _kernel(amax).scale_of(amax, dtype, margin)
    return result


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
    _check(x, "cast", scale)
    _check_format(dtype, "cast")
    result: Tensor = _kernel(x, scale).cast(x, scale, dtype)
    return result


def count_saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """How many finite elements `cast` cuts to the format's largest value, without a host sync.

    Those which rounding alone would not have brought there: from 61,440 in e5m2, above 464 in e4m3fn. Arguments as of
    `cast`.

    Returns:
        int64, of shape [].
    """
    _check(x, "count_saturated", scale)
    _check_format(dtype, "count_saturated")
    result: Tensor = _kernel(x, scale).count_saturated(x, scale, dtype)
    return result


def cast_with_amax(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cast` and, from the same reading of memory, `amax` of the whole tensor: what a delayed scale needs of a step.

    Arguments as of `cast`, with a scale of shape [].

    Returns:
        codes of x's shape, and x's largest finite magnitude: FP32, shape [], without the scale.
    """
    _check(x, "cast_with_amax", scale)
    if scale.dim():
        raise UsageError(
            f"cast_with_amax(): a scale of shape {list(scale.shape)}. Use one scale, of shape []."
        )
    _check_format(dtype, "cast_with_amax")
    result: tuple[Tensor, Tensor] = _kernel(x, scale).cast_with_amax(x, scale, dtype)
    return result


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
    _check(x, "quantize")
    _check_format(dtype, "quantize")
    result: tuple[Tensor, Tensor] = _kernel(x).quantize(x, dtype, margin, dim)
    return result


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
    _check_scale(codes, inv_scale, "widen")
    result: Tensor = _kernel(codes, inv_scale).widen(codes, inv_scale, dtype)
    return result


def _check(x: Tensor, what: str, scale: Tensor | None = None) -> None:
    if x.dtype not in _WIDE:
        raise UsageError(f"{what}(): a {x.dtype} tensor. Use one of {', '.join(map(str, _WIDE))}.")
    if scale is not None:
        _check_scale(x, scale, what)


def _check_scale(x: Tensor, scale: Tensor, what: str) -> None:
    shape, of = tuple(scale.shape), tuple(x.shape)
    fits = not shape or (len(shape) == len(of) and all(s in (1, n) for s, n in zip(shape, of)))
    if scale.dtype is not torch.float32 or not fits:
        rows = ", one a row, [M, 1], or one a column, [1, K]" if len(of) == 2 else ""
        raise UsageError(
            f"{what}(): a {scale.dtype} scale of shape {list(shape)} for a tensor of shape {list(of)}. Use FP32, and "
            f"the shape []{rows}."
        )


def _check_format(dtype: torch.dtype, what: str) -> None:
    if dtype not in FP8:
        raise UsageError(f"{what}(): {dtype} is no 8-bit format. Use one of {', '.join(map(str, FP8))}.")


def _kernel(*tensors: Tensor) -> ModuleType:
    """What serves these tensors: the reference where they are a tracer's or a transform's, or have no memory."""
    if not is_plain(*tensors) or any(not _has_memory(tensor) for tensor in tensors):
        return reference
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        return reference  # of a CPU's scale beside CUDA's tensor PyTorch takes care
    return _loaded(tensors[0].device.type, os.environ.get(backend.KERNELS))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


@functools.cache
def _loaded(device_type: str, forced: str | None) -> ModuleType:
    return backend.load(__name__, device_type)
