"""One step of a plain recurrent layer's backward on a CPU, in one pass.

    gates_grad = (hidden_grad + product + out_grad) * slope(h);  hidden_grad = 0

The slope is known by the output. A template: `specialise` writes it out.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_fp32 as store_factor  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, inline, int16_at, loop, take
from mezzo.pytorch.kernels.native import float32_at as factor_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_half  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_sum  # bound
from mezzo.pytorch.kernels.recurrent.cpu_backward_job import (
    BEFORE,
    BEFORE_ALL,
    BIAS_GRAD,
    BLOCK,
    COLUMNS,
    FACTOR,
    GATES_GRAD,
    HIDDEN_GRAD,
    ITEMS,
    KEPT,
    OUT_GRAD,
    PRODUCT,
    ROWS,
    ROWS_BEFORE,
)
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as factor_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import tanh_slope as slope  # bound


@loop
def part(
    hidden_grad: Pointer, product: Pointer, out_grad: Pointer, before: Pointer, factor: Pointer,
    out: Pointer, grad: Pointer, bias: Pointer, count: int,
) -> None:  # fmt: skip
    """Some columns of one row."""
    for j in range(count):
        dh = f32(f32(hidden_grad[j] + load_sum(product, j)) + load_half(out_grad, j))
        hidden_grad[j] = f32(0.0)
        da = f32(dh * slope(load_half(out, j)))
        store_factor(grad, j, da)
        bias[j] += da
        store_factor(factor, j, load_half(before, j))


@inline
def share(job: Pointer) -> None:
    """Take blocks of columns until none is left; all rows of one, so that only one thread adds to its biases."""
    columns = job[COLUMNS]
    while True:
        this = take(job)
        if this >= job[ITEMS]:
            break
        start = this * BLOCK
        for row in range(job[ROWS]):
            one, wide = row * columns + start, factor_bytes()
            before = job[BEFORE_ALL] if row >= job[ROWS_BEFORE] else job[BEFORE]
            part(
                float32_at(job[HIDDEN_GRAD] + 4 * one),
                factor_at(job[PRODUCT] + wide * one),
                int16_at(job[OUT_GRAD] + 2 * one),
                int16_at(before + 2 * one),
                factor_at(job[FACTOR] + wide * one),
                int16_at(job[KEPT] + 2 * one),
                factor_at(job[GATES_GRAD] + wide * one),
                float32_at(job[BIAS_GRAD] + 4 * start),
                min(BLOCK, columns - start),
            )


def main(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    share(job)
