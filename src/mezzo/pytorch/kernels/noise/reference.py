"""The noise as PyTorch operations: `mezzo.pytorch.kernels.noise.word`, on many elements at once."""

from __future__ import annotations

import torch
from torch import Tensor


def bits(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Random bits of the elements at `start`, ..., `start + count - 1` in memory order.

    Equals ``[word(index * 0x9E3779B1 + key) for index in range(start, start + count)]``, in 32 bits.

    Returns:
        ``(count,)`` int32, whose patterns they are.
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return _word((index * 0x9E3779B1 + key).to(torch.int32))


def first(noise: Tensor) -> Tensor:
    """What the first state is rounded with: the low 20 bits."""
    return noise & 0xFFFFF


def second(noise: Tensor) -> Tensor:
    """What the second state is rounded with: the high 20 bits, whose own low 8 are the first's high ones."""
    return (noise >> 12) & 0xFFFFF


def remainder(noise: Tensor) -> Tensor:
    """What a weight with an 8-bit remainder is rounded with: the low 8 bits, and others to scramble them."""
    return (noise ^ (noise >> 12)) & 0xFF


def alone(noise: Tensor) -> Tensor:
    """What a weight without a remainder is rounded with: the high 16 bits of a word of its own stream."""
    return (noise >> 16) & 0xFFFF


def _word(x: Tensor) -> Tensor:
    # int32 products wrap, as unsigned ones do; >> copies the sign, which the masks take away again.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    return x * _signed(0x846CA68B)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
