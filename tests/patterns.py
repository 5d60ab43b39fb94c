"""FP32 and bf16 patterns one at a time, in Python's own numbers: the oracle beside which kernels' codecs are held."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def pattern(number: float) -> int:
    word: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return word


def fma(a: float, b: float, c: float) -> float:
    """IEEE's ``a * b + c`` of FP32 numbers, exact and then rounded once, ties to even."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value == 0:
        return a * b + c if a == 0 or b == 0 else 0.0  # of two zeros, or of what cancels
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    quantum = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(value / quantum) * quantum  # Python's round: ties to even
    if abs(rounded) >= 2**128:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


def signed(word: int, width: int) -> int:
    return word - (1 << width) if word >> (width - 1) else word


def masters(words: list[int]) -> Tensor:
    return torch.tensor([signed(word, 32) for word in words], dtype=torch.int32).view(torch.float32)


def words(tensor: Tensor) -> list[int]:
    width = tensor.element_size() * 8
    whole = tensor.contiguous().view({32: torch.int32, 16: torch.int16}[width])
    return [int(word) & ((1 << width) - 1) for word in whole.flatten().tolist()]


def to_fp32(number: float) -> float:
    """The FP32 number nearest to an FP64 one, ties to even."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def noise_word(index: int, key: int) -> int:
    """The 32 random bits of an optimizer's element: C. Wellons' lowbias32 without its last line."""
    x = (index * 0x9E3779B1 + key) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    return x * 0x846CA68B & 0xFFFFFFFF
