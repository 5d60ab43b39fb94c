"""Sums of squares of blocks of 65,536 elements, each in 64 lanes that no compiler or thread reorders.

A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import (
    Pointer,
    expand,
    f64,
    float64_at,
    float64_scratch,
    inline,
    int64_at,
    loop,
    take,
)
from mezzo.pytorch.kernels.native import int16_at as grad_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_grad  # bound

# What `main` is given: blocks as pairs of a tensor's index and an element, and tensors as pairs of address and size.
COUNTER, BLOCKS, BLOCK_LIST, TENSORS, SUMS, JOB_WORDS = range(6)

BLOCK = 1 << 16
LANES = 64  # eight AVX-512 registers


@expand
def add(grad: Pointer, lanes: Pointer, start: int, count: int) -> None:
    """Add `count` squares to as many lanes."""
    for lane in range(count):
        x = f64(load_grad(grad, start + lane))
        lanes[lane] = lanes[lane] + x * x


@loop
def block(grad: Pointer, start: int, stop: int) -> float:
    """One block's sum: lane by lane, and at last over the lanes in order."""
    lanes = float64_scratch(LANES)
    for lane in range(LANES):
        lanes[lane] = 0.0
    whole = stop - (stop - start) % LANES
    for i in range(start, whole, LANES):
        add(grad, lanes, i, LANES)
    add(grad, lanes, whole, stop - whole)
    total = f64(0)
    for lane in range(LANES):
        total += lanes[lane]
    return total


@inline
def share(job: Pointer) -> None:
    """Take blocks until none is left."""
    block_list, tensors, sums = int64_at(job[BLOCK_LIST]), int64_at(job[TENSORS]), float64_at(job[SUMS])
    while True:
        this = take(job)
        if this >= job[BLOCKS]:
            break
        tensor, start = block_list[2 * this], block_list[2 * this + 1]
        stop = min(start + BLOCK, tensors[2 * tensor + 1])
        sums[this] = block(grad_at(tensors[2 * tensor]), start, stop)


def main(job: Pointer) -> None:
    """Take blocks until none is left."""
    share(job)
