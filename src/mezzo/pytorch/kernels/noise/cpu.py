"""The noise, one element at a time: `mezzo.pytorch.kernels.noise`, in 32 bits that wrap by themselves."""

from __future__ import annotations

from mezzo.pytorch.kernels.native import i32, inline, u32
from mezzo.pytorch.kernels.noise import STATES, WEIGHT

__all__ = ["STATES", "WEIGHT", "following", "high", "key", "low", "noise", "place"]

_STRIDE = 0x9E3779B1


@inline
def mix(x: int) -> int:
    """Scramble 32 bits."""
    x = u32(x ^ (x >> 16))
    x = u32(x * u32(0x7FEB352D))
    x = u32(x ^ (x >> 15))
    x = u32(x * u32(0x846CA68B))
    return u32(x ^ (x >> 16))


@inline
def key(step: int, ordinal: int, stream: int) -> int:
    """The key of one stream of one parameter's bits in one step."""
    words = u32(step) * u32(0x9E3779B9) + u32(ordinal) * u32(0x85EBCA6B)
    return mix(u32(words + u32(stream) * u32(0xC2B2AE35) + u32(0x27D4EB2F)))


@inline
def place(index: int) -> int:
    """Where the element at `index` in memory order stands among the inputs of `noise`."""
    return u32(u32(index) * u32(_STRIDE))


@inline
def following(place: int) -> int:
    """The next element's place: an addition, where `place` of a 64-bit index costs a vector two."""
    return u32(place + u32(_STRIDE))


@inline
def noise(key: int, place: int) -> int:
    """The 32 random bits of the element at a place."""
    return mix(u32(place + key))


@inline
def low(noise: int) -> int:
    """The low 16 bits, from 0 to 65,535."""
    return i32(noise & u32(0xFFFF))


@inline
def high(noise: int) -> int:
    """The high 16 bits, from 0 to 65,535."""
    return i32(noise >> 16)
