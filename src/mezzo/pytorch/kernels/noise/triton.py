"""The noise in Triton: `mezzo.pytorch.kernels.noise.word` and `key`, on unsigned 32-bit scalars and blocks."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key(step: tl.tensor, ordinal: tl.tensor, stream: tl.constexpr) -> tl.tensor:
    """The uint32 key of one stream; `step` and `ordinal` are integer scalars, see `noise.key`."""
    words = step.to(tl.uint32) * 0x9E3779B9 + ordinal.to(tl.uint32) * 0x85EBCA6B
    x = _word(words + ((stream * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF))
    return x ^ (x >> 16)


@triton.jit
def bits(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The random bits, uint32, of elements at these positions in memory order; see `noise.reference.bits`."""
    return _word(index.to(tl.uint32) * 0x9E3779B1 + key)


@triton.jit
def first(noise: tl.tensor) -> tl.tensor:
    """What the first state is rounded with, int32; see `noise.reference.first`."""
    return (noise & 0xFFFFF).to(tl.int32)


@triton.jit
def second(noise: tl.tensor) -> tl.tensor:
    """What the second state is rounded with, int32."""
    return (noise >> 12).to(tl.int32)


@triton.jit
def remainder(noise: tl.tensor) -> tl.tensor:
    """What a weight with an 8-bit remainder is rounded with, int32; see `noise.reference.remainder`."""
    return ((noise ^ (noise >> 12)) & 0xFF).to(tl.int32)


@triton.jit
def alone(noise: tl.tensor) -> tl.tensor:
    """What a weight without a remainder is rounded with, int32."""
    return (noise >> 16).to(tl.int32)


@triton.jit
def _word(x: tl.tensor) -> tl.tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    return x * 0x846CA68B
