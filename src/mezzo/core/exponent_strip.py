"""A histogram of exponents as one line of text: a block for each binary exponent, as high as the count is.

2^-24 |▁▁▂▃▅▆██▇▅▃▁▁| 2^-12, in fp16: 3.1% to zero, 24% subnormal
"""

from __future__ import annotations

import math

from mezzo.core.ranges import Histogram

_BLOCKS = "▁▂▃▄▅▆▇█"
MOST = 48
"""Blocks; a histogram of more exponents has several in each."""


def exponent_strip(histogram: Histogram, format: str, shift: int = 0) -> str:
    """The line; in words for a histogram without a number that is finite and not 0.

    Args:
        histogram: whose exponents are drawn.
        format: what the shares at the end are told of.
        shift: exponents by which the numbers are moved before, as a loss scale of ``2**shift`` does; what is drawn is
            not moved.

    Raises:
        UnknownNameError: no such format.
    """
    shares = histogram.shares(format, shift)
    if shares is None:
        return "(no number that is finite and not 0)"
    width = math.ceil(len(histogram.counts) / MOST)
    bars = [sum(histogram.counts[i : i + width]) for i in range(0, len(histogram.counts), width)]
    most = max(bars)
    drawn = "".join(_BLOCKS[7 * count // most] if count else " " for count in bars)
    told = [
        f"{percent(share)} {word}"
        for share, word in (
            (shares.underflow, "to zero"),
            (shares.subnormal, "subnormal"),
            (shares.overflow, "overflow"),
        )
        if share
    ]
    scaled = f" times 2^{shift}" if shift else ""
    last = histogram.lowest + len(histogram.counts) - 1
    return f"2^{histogram.lowest} |{drawn}| 2^{last}, in {format}{scaled}: {', '.join(told) or 'all kept'}"


def percent(share: float) -> str:
    """A share as a person would write it; one that is almost nothing is not written as nothing."""
    return "under 0.01%" if 0 < share < 1e-4 else f"{100 * share:.2g}%"
