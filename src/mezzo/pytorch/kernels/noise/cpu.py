"""The noise, one element at a time: `mezzo.pytorch.kernels.noise`, in 32 bits that wrap by themselves."""

from __future__ import annotations

from mezzo.pytorch.kernels.native import i32, inline, u32
from mezzo.pytorch.kernels.noise import STEP, WEIGHT

__all__ = ["STEP", "WEIGHT", "apart", "first", "following", "key", "noise", "place", "same", "second"]

_STRIDE = 0x9E3779B1


@inline
def word(x: int) -> int:
    """Scramble 32 bits, all but the last line."""
    x = u32(x ^ (x >> 16))
    x = u32(x * u32(0x7FEB352D))
    x = u32(x ^ (x >> 15))
    return u32(x * u32(0x846CA68B))


@inline
def key(step: int, ordinal: int, stream: int) -> int:
    """The key of one stream of one parameter's bits in one step."""
    words = u32(step) * u32(0x9E3779B9) + u32(ordinal) * u32(0x85EBCA6B)
    x = word(u32(words + u32(stream) * u32(0xC2B2AE35) + u32(0x27D4EB2F)))
    return u32(x ^ (x >> 16))


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
    return word(u32(place + key))


@inline
def first(noise: int) -> int:
    """What the first state is rounded with, from 0 to 2**20 - 1."""
    return i32(noise & u32(0xFFFFF))


@inline
def second(noise: int) -> int:
    """What the second state is rounded with, from 0 to 2**20 - 1."""
    return i32(noise >> 12)


@inline
def same(noise: int, key: int, place: int) -> int:
    """What a weight with an 8-bit remainder is rounded with, out of the states' word."""
    return i32(u32(noise ^ u32(noise >> 12)) & u32(0xFF))


@inline
def apart(bits: int, key: int, place: int) -> int:
    """What a weight without a remainder is rounded with, of a word of its own."""
    return i32(noise(key, place) >> 16)
