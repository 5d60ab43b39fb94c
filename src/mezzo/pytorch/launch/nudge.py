"""Move FP32 weights by one unit in the last place: the smallest change that a run can have, for a noise
floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_SEED = 0x6E75646765


def nudge(parameters: Iterable[Tensor]) -> int:
    """Move each element of each FP32 parameter to the next FP32 number up or down; the number of tensors
    moved.

    Naive code, with a fair coin for each element::

        p.data = torch.nextafter(p.data, inf if coin else -inf)

    The coins come from a generator of our own with a fixed seed, so the script's random streams are
    untouched and two nudged runs are the same run. Zero goes to the smallest subnormal, the largest finite
    number may go to infinity, NaN stays NaN. Tensors of other formats, and elements that two parameters
    share, are moved at most once.
    """
    generator = torch.Generator("cpu")
    generator.manual_seed(_SEED)
    moved = 0
    seen: set[int] = set()
    with torch.no_grad():
        for parameter in parameters:
            data = parameter.detach()
            if data.dtype is not torch.float32 or not data.numel() or data.data_ptr() in seen:
                continue
            seen.add(data.data_ptr())
            coins = torch.rand(data.shape, generator=generator) < 0.5
            towards = torch.where(coins, -math.inf, math.inf).to(data.device)
            parameter.data.copy_(torch.nextafter(data, towards))
            moved += 1
    return moved
