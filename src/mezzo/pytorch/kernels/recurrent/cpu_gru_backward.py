"""One step of a GRU's backward on a CPU: from the gradient of its state to that of its gates, in one pass.

    dh = hidden_grad + product + out_grad
    dz, dn = dh * (h_before - n) * z', dh * (1 - z) * n'
    dr = dn * m * r'
    given_grad, gates_grad = (dr, dz, dn), (dr, dz, dn * r)
    hidden_grad = dh * z                            # the step before has product = gates_grad @ w_hh

r, z, n and their derivatives are made again from the sums that were kept. A template.
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
    GIVEN_GRAD,
    HIDDEN_GRAD,
    ITEMS,
    KEPT,
    OUT_GRAD,
    PRODUCT,
    ROWS,
    ROWS_BEFORE,
)
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as factor_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_functions import constants, sigmoid_and_rest, tanh_and_slope


@loop
def part(
    hidden_grad: Pointer, product: Pointer, out_grad: Pointer, before: Pointer, factor: Pointer,
    kept_r: Pointer, kept_z: Pointer, kept_n: Pointer, kept_m: Pointer,
    grad_r: Pointer, grad_z: Pointer, grad_n: Pointer,
    given_grad_r: Pointer, given_grad_z: Pointer, given_grad_n: Pointer,
    sum_r: Pointer, sum_z: Pointer, sum_n: Pointer, sum_m: Pointer, count: int,
) -> None:  # fmt: skip
    """Some columns of one row."""
    k = constants()
    for j in range(count):
        dh = f32(f32(hidden_grad[j] + load_sum(product, j)) + load_half(out_grad, j))
        r, r_rest = sigmoid_and_rest(load_half(kept_r, j), k)
        z, z_rest = sigmoid_and_rest(load_half(kept_z, j), k)
        n, n_slope = tanh_and_slope(load_half(kept_n, j), k)
        hidden_grad[j] = f32(dh * z)
        dn = f32(f32(dh * z_rest) * n_slope)
        dz = f32(f32(dh * f32(load_half(before, j) - n)) * f32(z * z_rest))
        dr = f32(f32(dn * load_half(kept_m, j)) * f32(r * r_rest))
        dm = f32(dn * r)
        store_factor(grad_r, j, dr)
        store_factor(grad_z, j, dz)
        store_factor(grad_n, j, dm)
        store_factor(given_grad_r, j, dr)
        store_factor(given_grad_z, j, dz)
        store_factor(given_grad_n, j, dn)
        sum_r[j] += dr
        sum_z[j] += dz
        sum_n[j] += dn
        sum_m[j] += dm
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
            one, wide, bias = row * columns + start, factor_bytes(), job[BIAS_GRAD] + 4 * start
            kept, gates = job[KEPT] + 2 * (4 * row * columns + start), wide * (3 * row * columns + start)
            grads, given_grads, step = job[GATES_GRAD] + gates, job[GIVEN_GRAD] + gates, wide * columns
            before = job[BEFORE_ALL] if row >= job[ROWS_BEFORE] else job[BEFORE]
            part(
                float32_at(job[HIDDEN_GRAD] + 4 * one), factor_at(job[PRODUCT] + wide * one),
                int16_at(job[OUT_GRAD] + 2 * one), int16_at(before + 2 * one), factor_at(job[FACTOR] + wide * one),
                int16_at(kept), int16_at(kept + 2 * columns),
                int16_at(kept + 4 * columns), int16_at(kept + 6 * columns),
                factor_at(grads), factor_at(grads + step), factor_at(grads + 2 * step),
                factor_at(given_grads), factor_at(given_grads + step), factor_at(given_grads + 2 * step),
                float32_at(bias), float32_at(bias + 4 * columns),
                float32_at(bias + 8 * columns), float32_at(bias + 12 * columns), min(BLOCK, columns - start),
            )  # fmt: skip


def main(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    share(job)
