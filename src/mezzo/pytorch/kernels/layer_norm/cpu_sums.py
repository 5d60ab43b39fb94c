"""The parameters' gradients out of the sums of blocks of rows: added up in the blocks' order, rounded once.

A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_fp32 as store_bias  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_fp32 as store_weight  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, float32_scratch, inline, loop, take
from mezzo.pytorch.kernels.native import float32_at as bias_at  # bound
from mezzo.pytorch.kernels.native import float32_at as weight_at  # bound

# What `main` is given. SUMS: FP32 [2, blocks, columns], the weight's and the bias's. DWEIGHT or DBIAS is 0 where it
# isn't wanted.
COUNTER, BLOCKS, COLUMNS, SUMS, DWEIGHT, DBIAS, JOB_WORDS = range(7)

PIECE = 256  # columns that are summed at once


@loop
def add(sums: Pointer, totals: Pointer, blocks: int, columns: int, count: int) -> None:
    """The sums of some columns over all blocks."""
    for i in range(count):
        totals[i] = f32(0.0)
    for block in range(blocks):
        for i in range(count):
            totals[i] = totals[i] + sums[block * columns + i]


@inline
def share(job: Pointer) -> None:
    """Take pieces of both until none is left."""
    columns, blocks = job[COLUMNS], job[BLOCKS]
    totals = float32_scratch(PIECE)
    while True:
        start = take(job) * PIECE
        if start >= columns:
            break
        count = min(PIECE, columns - start)
        if job[DWEIGHT] != 0:
            add(float32_at(job[SUMS] + 4 * start), totals, blocks, columns, count)
            for i in range(count):
                store_weight(weight_at(job[DWEIGHT]), start + i, totals[i])
        if job[DBIAS] != 0:
            add(float32_at(job[SUMS] + 4 * (blocks * columns + start)), totals, blocks, columns, count)
            for i in range(count):
                store_bias(bias_at(job[DBIAS]), start + i, totals[i])


def main(job: Pointer) -> None:
    """Take pieces of both until none is left."""
    share(job)
