"""The noise as PyTorch operations: `mezzo.pytorch.kernels.noise.mix`, on many elements at once."""

from __future__ import annotations

import torch
from torch import Tensor


def bits(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Random bits of the elements at `start`, ..., `start + count - 1` in memory order.

    Equals ``[mix(index * 0x9E3779B1 + key) for index in range(start, start + count)]``, in 32 bits.

    Returns:
        ``(count,)`` int32, whose patterns they are.
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return _mix((index * 0x9E3779B1 + key).to(torch.int32))


def low(noise: Tensor, width: int = 16) -> Tensor:
    """The low `width` bits of each element, as numbers from 0 to ``2**width - 1``."""
    return noise & ((1 << width) - 1)


def high(noise: Tensor) -> Tensor:
    """The high 16 bits of each element, as numbers from 0 to 65,535."""
    return (noise >> 16) & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    # int32 products wrap, as unsigned ones do; >> copies the sign, which the masks take away again.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
