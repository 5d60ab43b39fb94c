"""The noise in Triton: `mezzo.pytorch.kernels.noise.mix` and `key`, on unsigned 32-bit scalars and blocks."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key(step: tl.tensor, ordinal: tl.tensor, stream: tl.constexpr) -> tl.tensor:
    """The uint32 key of one stream; `step` and `ordinal` are integer scalars, see `noise.key`."""
    words = step.to(tl.uint32) * 0x9E3779B9 + ordinal.to(tl.uint32) * 0x85EBCA6B
    return _mix(words + ((stream * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF))


@triton.jit
def bits(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The random bits, uint32, of elements at these positions in memory order; see `noise.reference.bits`."""
    return _mix(index.to(tl.uint32) * 0x9E3779B1 + key)


@triton.jit
def low(noise: tl.tensor, width: tl.constexpr = 16) -> tl.tensor:
    """The low `width` bits of each element, int32 from 0 to ``2**width - 1``."""
    return (noise & ((1 << width) - 1)).to(tl.int32)


@triton.jit
def high(noise: tl.tensor) -> tl.tensor:
    """The high 16 bits of each element, int32 from 0 to 65,535."""
    return (noise >> 16).to(tl.int32)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)
