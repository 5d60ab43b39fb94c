"""One step of a plain recurrent layer on a CPU, in one pass: ``h = tanh(given + product + bias)``, or relu of it.

For backward nothing but the output is kept. A template: `specialise` writes it out.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_bf16 as store_half  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, inline, int16_at, loop, take
from mezzo.pytorch.kernels.native import float32_at as factor_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_sum  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as factor_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import keep as carry  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import store_round_bf16 as store_factor  # bound
from mezzo.pytorch.kernels.recurrent.cpu_forward_job import (
    BIAS,
    BLOCK,
    BLOCKS,
    COLUMNS,
    FACTOR,
    GIVEN,
    HIDDEN,
    ITEMS,
    OUT,
    PRODUCT,
)
from mezzo.pytorch.kernels.recurrent.cpu_functions import constants
from mezzo.pytorch.kernels.recurrent.cpu_functions import tanh as nonlinearity  # bound


@loop
def part(
    given: Pointer,
    product: Pointer,
    bias: Pointer,
    out: Pointer,
    factor: Pointer,
    hidden: Pointer,
    count: int,
) -> None:
    """Some columns of one row."""
    k = constants()
    for j in range(count):
        a = f32(f32(load_sum(given, j) + load_sum(product, j)) + bias[j])
        h = carry(nonlinearity(a, k))
        hidden[j] = h
        store_half(out, j, h)
        store_factor(factor, j, h)


@inline
def share(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    columns = job[COLUMNS]
    while True:
        this = take(job)
        if this >= job[ITEMS]:
            break
        row, start = this // job[BLOCKS], this % job[BLOCKS] * BLOCK
        one, wide = row * columns + start, factor_bytes()
        part(
            factor_at(job[GIVEN] + wide * one),
            factor_at(job[PRODUCT] + wide * one),
            float32_at(job[BIAS] + 4 * start),
            int16_at(job[OUT] + 2 * one),
            factor_at(job[FACTOR] + wide * one),
            float32_at(job[HIDDEN] + 4 * one),
            min(BLOCK, columns - start),
        )


def main(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    share(job)
