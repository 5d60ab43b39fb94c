"""How an optimizer stores its moments: as FP32, as bf16, or in 8-bit floats with one scale for 64 elements.

Both small forms are rounded stochastically: a moving average adds to itself a part far smaller than its own
ulp, which rounding to nearest would drop for ever. The 8-bit codes are floats and not integers, so a small
element beside a large one keeps its relative precision. A scale is a power of two and a bf16, so that it costs
2 bytes for 64 elements, dividing by it is exact, and the smallest group has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 64
"""Consecutive elements, in memory order, that share one scale."""

FORMATS = ("fp32", "bf16", "int8")
"""The ways of storing a state."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of an optimizer's state.

    Args:
        name: its key in the optimizer's state, as PyTorch's own optimizers call it.
        signed: False for a second moment, which is never negative and needs the range instead of the sign.
    """

    name: str
    signed: bool


def groups(numel: int) -> int:
    """How many scales a state of that many elements has; the last group may be short.

    >>> groups(0), groups(64), groups(65)
    (0, 1, 2)
    """
    return -(-numel // GROUP)
