"""The casts to and from fp8 as PyTorch operations: on any device, in any tracer, under any transform.

They are integer arithmetic on FP32's bit patterns after one FP32 product, so that every implementation gives the same
codes, a NaN's too. A device that is told to flush subnormals loses those of its input and no others. See
`mezzo.pytorch.kernels.fp8` for what each function is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo.core.formats import FORMATS, Format

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LARGEST = _INFINITY - 1
_SMALLEST_NORMAL = 1 << 23


class Plan(NamedTuple):
    """What a cast to one of the two formats needs, in the units of FP32's patterns.

    Args:
        shift: bits of FP32's mantissa that are cut.
        rebias: what is subtracted from a pattern without those bits.
        smallest_normal: the pattern of the format's smallest normal number.
        anchor: the pattern of 2**23 times the smallest subnormal: a smaller number added to it is rounded to a
            multiple of that subnormal, whose code is then the sum's last bits.
        largest: the pattern of the format's largest number.
        saturated: the first pattern that is nearer to what would be the next number, or as near and that is even.
        infinity, nan: codes.
    """

    shift: int
    rebias: int
    smallest_normal: int
    anchor: int
    largest: int
    saturated: int
    infinity: int
    nan: int

    @classmethod
    def of(cls, form: Format) -> Plan:
        """The plan of an 8-bit format."""
        shift = 23 - form.nmant
        all_ones = (1 << form.bits - 1) - 1
        largest_code = all_ones - (1 << form.nmant) if form.has_infinity else all_ones - 1
        rebias = 127 - form.bias << form.nmant
        largest = largest_code + rebias << shift
        # A tie goes to the even code: to the largest where that is even, and beyond where it is odd.
        saturated = largest + (1 << shift - 1) + (1 - largest_code % 2)
        quiet = largest_code + 1 + (1 << form.nmant - 1)
        return cls(
            shift=shift,
            rebias=rebias,
            smallest_normal=form.minexp + 127 << 23,
            anchor=form.minexp - form.nmant + 23 + 127 << 23,
            largest=largest,
            saturated=saturated,
            infinity=largest_code + 1 if form.has_infinity else all_ones,
            nan=quiet if form.has_infinity else all_ones,
        )


PLANS: dict[torch.dtype, Plan] = {
    torch.float8_e4m3fn: Plan.of(FORMATS["e4m3fn"]),
    torch.float8_e5m2: Plan.of(FORMATS["e5m2"]),
}


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest finite magnitude; see `fp8.amax`."""
    magnitude = x.detach().to(torch.float32).abs()
    finite = torch.where(magnitude < float("inf"), magnitude, 0.0)
    if dim is None:
        return finite.amax() if finite.numel() else finite.new_zeros(())
    if not finite.shape[dim]:
        return finite.sum(dim, keepdim=True)
    return finite.amax(dim, keepdim=True)


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The power of two; see `fp8.scale_of`."""
    plan = PLANS[dtype]
    bits = (amax.detach().view(torch.int32) & _MAGNITUDE).clamp(max=_LARGEST)
    # The largest number is 1.75 times a power of two in either format. What is added carries into the exponent's
    # field if the mantissa is more than that, and only then.
    carry = _SMALLEST_NORMAL - 1 - (plan.largest & (_SMALLEST_NORMAL - 1))
    counted = bits.to(torch.float32).view(torch.int32)  # a subnormal is `bits` times 2**-149
    field = torch.where(bits < _SMALLEST_NORMAL, (counted + carry >> 23) - 149, bits + carry >> 23)
    exponent = ((plan.largest >> 23) - field - margin).clamp(-126, 126)
    return torch.where(bits == 0, 127 << 23, exponent + 127 << 23).to(torch.int32).view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of ``x * scale``; see `fp8.cast`."""
    plan = PLANS[dtype]
    wide = x.detach().to(torch.float32).contiguous()
    source = wide.view(torch.int32)
    magnitude = (wide * scale.detach()).view(torch.int32) & _MAGNITUDE
    magnitude = magnitude.clamp(max=plan.largest)
    is_odd = (magnitude >> plan.shift) & 1
    normal = (magnitude + ((1 << plan.shift - 1) - 1 + is_odd) >> plan.shift) - plan.rebias
    anchor = torch.full_like(magnitude, plan.anchor).view(torch.float32)
    subnormal = (magnitude.view(torch.float32) + anchor).view(torch.int32) - plan.anchor
    codes = torch.where(magnitude < plan.smallest_normal, subnormal, normal)
    original = source & _MAGNITUDE
    codes = torch.where(original == _INFINITY, plan.infinity, codes)
    codes = torch.where(original > _INFINITY, plan.nan, codes)
    codes = codes | torch.where(source < 0, 0x80, 0)
    return codes.to(torch.uint8).view(dtype)


def cast_with_amax(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and the tensor's largest finite magnitude; see `fp8.cast_with_amax`."""
    return cast(x, scale, dtype), amax(x)


def quantize(x: Tensor, dtype: torch.dtype, margin: int, dim: int | None) -> tuple[Tensor, Tensor]:
    """Codes and their scale; see `fp8.quantize`."""
    scale = scale_of(amax(x, dim), dtype, margin)
    return cast(x, scale, dtype), scale


def count_saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """How many finite elements are cut; see `fp8.count_saturated`."""
    wide = x.detach().to(torch.float32)
    scaled = (wide * scale.detach()).view(torch.int32) & _MAGNITUDE
    is_finite = (wide.view(torch.int32) & _MAGNITUDE) < _INFINITY
    return ((scaled >= PLANS[dtype].saturated) & is_finite).sum()


def widen(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, divided by their scale; see `fp8.widen`."""
    return (codes.detach().to(torch.float32).contiguous() * inv_scale.detach()).to(dtype)
