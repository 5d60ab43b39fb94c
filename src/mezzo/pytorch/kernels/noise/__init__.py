"""Random bits for stochastic rounding: a hash of which step, which parameter, which purpose and which element.

There is no generator and no state: the same step draws the same bits on every device, for any number of
threads and in any order, so that a run can be repeated and a restored one goes on as it would have. PyTorch's own
generators are never touched.

One word of 32 bits serves both states and an 8-bit remainder. The states need 20 bits each, and share 8: the
second's last ones, which decide in one of 4096 cases, are the first's upper ones.
"""

from __future__ import annotations

STEP = 0
"""Stream of an optimizer's states and of a weight with an 8-bit remainder: one word for all three."""

WEIGHT = 1
"""Stream of a weight without a remainder."""

NEAREST = 1 << 19
"""In place of a state's 20 random bits: half of them, which rounds to nearest."""

_MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """Scramble 32 bits so that every bit of the input moves every bit of the result; a bijection.

    The constants are those of C. Wellons, "hash-prospector", lowbias32.
    """
    x = word(x)
    return x ^ x >> 16


def word(x: int) -> int:
    """`mix` without its last line, for the inputs of neighbours: even but for its lowest bits.

    Those repeat a little over some distances, so they decide nothing by themselves.
    """
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    return x * 0x846CA68B & _MASK


def key(step: int, ordinal: int, stream: int) -> int:
    """The key of one stream of one parameter's bits in one step.

    Args:
        step: the number of this move of the parameter: 1, 2, ...
        ordinal: the parameter's index in the optimizer.
        stream: `STEP` or `WEIGHT`.

    Returns:
        32 bits, to be combined with an element's position in memory: `word(index * 0x9E3779B1 + key)`.
    """
    words = step * 0x9E3779B9 + ordinal * 0x85EBCA6B + stream * 0xC2B2AE35 + 0x27D4EB2F
    return mix(words & _MASK)
