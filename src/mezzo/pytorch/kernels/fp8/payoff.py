"""Which linear layers are worth multiplying in fp8: where hardware has it, those big enough to pay for their casts.

A layer of K inputs and N outputs multiplies three times in a step, 2 M K N operations each, for M rows. In fp8 each of
these is faster, and what is new is memory traffic: every element of the input [M, K] and of the output's gradient
[M, N] is read for its largest magnitude (2 bytes), read and written by the cast (2 + 1), and its codes are copied
transposed (1 + 1). The weight's own casts do not grow with M and are left out. So fp8 gains, in seconds,

    6 M K N (1 / bf16_rate - 1 / fp8_rate)   and costs   M (K + N) traffic / bandwidth

and M falls out: it pays where  K N / (K + N) >= traffic / (6 bandwidth (1 / bf16_rate - 1 / fp8_rate)).

The rates are the device's: tensor cores' operations a clock and multiprocessor (NVIDIA's architecture whitepapers,
dense, with FP32 sums) times clock and count, of which large products sustain about `SUSTAINED`. `benchmarks/fp8.py`
measures the same threshold where there is a GPU; ``scaling=tensorwise(pays_from=...)`` sets it by hand.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mezzo.core.fp8 import Fp8Scaling
from mezzo.pytorch.kernels.fp8.native import MULTIPLE, is_native

TRAFFIC = {"tensorwise": 7, "rowwise": 10}
"""Bytes of traffic for each element that is cast. Rowwise, each is measured and cast along both dimensions."""

SUSTAINED = 0.75
"""Share of the tensor cores' peak that large bf16 products reach: 790 of an H200's 1,070 TFLOP/s at full clock."""

UNKNOWN_GPU = 384.0
"""Where a device does not tell its rates: what its datasheet's figures give for an H200."""

# bf16 operations a clock and multiprocessor, dense, FP32 sums; fp8's are twice that. Whitepapers: Ada Lovelace
# (L40S: 362 TFLOP/s of 142), Hopper (H100: 989 of 132), Blackwell (B200: 2,250 of 148; RTX 5090: 210 of 170).
_OPERATIONS = {(8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 512}


class Rates(NamedTuple):
    """What decides on a device: operations a second of large products, bytes a second of its memory."""

    bf16: float
    fp8: float
    bandwidth: float


def break_even(rates: Rates, granularity: str = "tensorwise") -> float:
    """The smallest K N / (K + N) from which fp8 is no slower than bf16.

    >>> round(break_even(Rates(bf16=0.8 * 989e12, fp8=0.8 * 1979e12, bandwidth=4.8e12)))  # an H200's datasheet
    384
    """
    gained = 6 * rates.bandwidth * (1 / rates.bf16 - 1 / rates.fp8)
    return TRAFFIC[granularity] / gained


def size(in_features: int, out_features: int) -> float:
    """K N / (K + N), which grows with the work for each element that is cast; 0 for an empty layer."""
    return in_features * out_features / max(1, in_features + out_features)


def pays_from(device_type: str, scaling: Fp8Scaling) -> float:
    """The threshold in force: the scaling's own, else the device's, and 0 where fp8 is emulated.

    An emulated layer is there to show fp8's numbers, not to be fast, so it has no size from which it pays.
    """
    if scaling.pays_from is not None:
        return scaling.pays_from
    if device_type != "cuda" or not is_native(torch.device(device_type)):
        return 0.0
    return device_break_even(device_type, scaling.granularity)


@functools.lru_cache(maxsize=16)
def device_break_even(device_type: str, granularity: str) -> float:
    """`break_even` of the present device, or `UNKNOWN_GPU` where its rates are not known."""
    if torch.cuda.is_available():
        rates = _rates(torch.cuda.get_device_properties(torch.cuda.current_device()))
        if rates is not None:
            return break_even(rates, granularity)
    return UNKNOWN_GPU * TRAFFIC[granularity] / TRAFFIC["tensorwise"]


def _rates(properties: object) -> Rates | None:
    """From what CUDA tells of a device: clocks in kHz, the bus in bits. None where it does not tell, or of an
    architecture that is not in the table."""
    told = [
        getattr(properties, name, 0) or 0
        for name in (
            "major",
            "minor",
            "multi_processor_count",
            "clock_rate",
            "memory_clock_rate",
            "memory_bus_width",
        )
    ]
    major, minor, count, clock, memory_clock, bus = told
    operations = _OPERATIONS.get((major, minor), 0)
    bf16 = SUSTAINED * operations * count * clock * 1e3
    bandwidth = 2 * memory_clock * 1e3 * bus / 8  # two transfers a clock
    return Rates(bf16, 2 * bf16, bandwidth) if bf16 and bandwidth else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def pays(in_features: int, out_features: int, device_type: str, scaling: Fp8Scaling) -> bool:
    """Whether a linear layer is multiplied in fp8: sizes are multiples of 16, and it is as big as `pays_from`."""
    if in_features % MULTIPLE or out_features % MULTIPLE or not in_features * out_features:
        return False
    return size(in_features, out_features) >= pays_from(device_type, scaling)


def reason(in_features: int, out_features: int, device_type: str, scaling: Fp8Scaling) -> str:
    """Why `pays` says what it says, as a clause without a full stop.

    >>> reason(64, 10, "cpu", Fp8Scaling())
    'bf16: 10 outputs are no multiple of 16, which fp8 products need'
    >>> reason(64, 64, "cpu", Fp8Scaling(pays_from=360))
    'bf16: K N / (K + N) = 32 of this layer is below 360, from which fp8 pays by scaling=tensorwise(pays_from=360)'
    """
    for count, noun in ((in_features, "inputs"), (out_features, "outputs")):
        if count % MULTIPLE or not count:
            return f"bf16: {count} {noun} are no multiple of {MULTIPLE}, which fp8 products need"
    native = is_native(torch.device(device_type))
    found, least = size(in_features, out_features), pays_from(device_type, scaling)
    whence = f"by scaling={scaling}" if scaling.pays_from is not None else "on this device"
    if found < least:
        return f"bf16: K N / (K + N) = {found:.4g} of this layer is below {least:.4g}, from which fp8 pays {whence}"
    if native:
        return f"fp8: K N / (K + N) = {found:.4g} of this layer is at least {least:.4g}, from which fp8 pays {whence}"
    return f"fp8, emulated: {device_type} has no fp8 products, so their numbers come from wider ones"
