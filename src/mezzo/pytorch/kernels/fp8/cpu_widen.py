"""The values of codes, by stretches that share an inverse scale.

A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.fp8.cpu_elements import load_e4m3fn as load_code  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import no as by_column  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_bf16 as store_out  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, inline, loop, take, uint8_at
from mezzo.pytorch.kernels.native import int16_at as out_at  # bound

# What `main` is given; as `cpu_cast`'s.
COUNTER, AT_ONCE, LENGTH, TOTAL, CODES, SCALES, SCALE_STEP, OUT, JOB_WORDS = range(9)


@loop
def stretches(
    codes: Pointer,
    scales: Pointer,
    out: Pointer,
    start: int,
    stop: int,
    length: int,
    total: int,
    scale_step: int,
) -> None:
    """Widen some stretches."""
    for stretch in range(start, stop):
        first, last = stretch * length, min((stretch + 1) * length, total)
        if by_column():
            for i in range(last - first):
                store_out(out, first + i, load_code(codes, first + i) * f32(scales[i]))
        else:
            scale = f32(scales[stretch * scale_step])
            for i in range(first, last):
                store_out(out, i, load_code(codes, i) * scale)


@inline
def share(job: Pointer) -> None:
    """Take stretches until none is left."""
    count = -(-job[TOTAL] // job[LENGTH])
    while True:
        start = take(job) * job[AT_ONCE]
        if start >= count:
            break
        stretches(
            uint8_at(job[CODES]),
            float32_at(job[SCALES]),
            out_at(job[OUT]),
            start,
            min(start + job[AT_ONCE], count),
            job[LENGTH],
            job[TOTAL],
            job[SCALE_STEP],
        )


def main(job: Pointer) -> None:
    """Take stretches until none is left."""
    share(job)
