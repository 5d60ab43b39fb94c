"""Largest finite magnitudes: of stretches of elements, or of each column of some rows.

A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.fp8.cpu_elements import finite_magnitude
from mezzo.pytorch.kernels.layer_norm.cpu_elements import no as by_column  # bound
from mezzo.pytorch.kernels.native import Pointer, bits, f32, float32_at, float_of, i32, inline, loop, take
from mezzo.pytorch.kernels.native import float32_at as x_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_x  # bound

# What `main` is given. By stretches: each of LENGTH elements (the last of TOTAL may be short) has a result, and a
# thread takes AT_ONCE of them. By columns: of each AT_ONCE rows of LENGTH columns there is a row of results. X_BYTES
# is an element's.
COUNTER, AT_ONCE, LENGTH, TOTAL, X, X_BYTES, OUT, JOB_WORDS = range(8)


@loop
def stretches(x: Pointer, out: Pointer, start: int, stop: int, length: int, total: int) -> None:
    """The largest of each of some stretches."""
    for stretch in range(start, stop):
        largest = i32(0)
        for i in range(stretch * length, min((stretch + 1) * length, total)):
            largest = i32(max(largest, finite_magnitude(load_x(x, i))))
        out[stretch] = float_of(largest)


@loop
def columns(x: Pointer, out: Pointer, rows: int, length: int) -> None:
    """The largest of each column of some rows."""
    for i in range(length):
        out[i] = f32(0)
    for row in range(rows):
        for i in range(length):
            largest = i32(max(bits(out[i]), finite_magnitude(load_x(x, row * length + i))))
            out[i] = float_of(largest)


@inline
def share(job: Pointer) -> None:
    """Take stretches, or rows, until none is left."""
    at_once, length, total = job[AT_ONCE], job[LENGTH], job[TOTAL]
    count = -(-total // length)
    while True:
        turn = take(job)
        start = turn * at_once
        if start >= count:
            break
        stop = min(start + at_once, count)
        if by_column():
            first = job[X] + start * length * job[X_BYTES]
            columns(x_at(first), float32_at(job[OUT] + 4 * turn * length), stop - start, length)
        else:
            stretches(x_at(job[X]), float32_at(job[OUT]), start, stop, length, total)


def main(job: Pointer) -> None:
    """Take stretches, or rows, until none is left."""
    share(job)
