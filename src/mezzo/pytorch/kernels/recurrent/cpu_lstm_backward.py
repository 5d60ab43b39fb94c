"""One step of an LSTM's backward on a CPU: from the gradient of its states to that of its gates, in one pass.

    dh = hidden_grad + product + out_grad
    dc = cell_grad + dh * o * tanh'(c)
    di, df, dg, do = dc * g * i', dc * c_before * f', dc * i * g', dh * tanh(c) * o'
    cell_grad = dc * f;  hidden_grad = 0            # the step before has product = d[ifgo] @ w_hh

i, f, g, o and their derivatives are made again from the sums that were kept. The step's hidden state as it was
multiplied is copied beside the gates' gradients: the weights' gradient is a product of both. A template.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_fp32 as store_factor  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, fma, inline, int16_at, loop, take
from mezzo.pytorch.kernels.native import float32_at as cell_at  # bound
from mezzo.pytorch.kernels.native import float32_at as factor_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_half  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_cell  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_fp32 as load_sum  # bound
from mezzo.pytorch.kernels.recurrent.cpu_backward_job import (
    BEFORE,
    BEFORE_ALL,
    BIAS_GRAD,
    BLOCK,
    CELL_GRAD,
    CELLS,
    CELLS_BEFORE,
    CELLS_BEFORE_ALL,
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
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as cell_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as factor_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_functions import constants, sigmoid_and_rest, tanh_and_slope


@loop
def part(
    hidden_grad: Pointer, product: Pointer, out_grad: Pointer, before: Pointer, factor: Pointer,
    kept_i: Pointer, kept_f: Pointer, kept_g: Pointer, kept_o: Pointer,
    grad_i: Pointer, grad_f: Pointer, grad_g: Pointer, grad_o: Pointer,
    cell_grad: Pointer, cells: Pointer, cells_before: Pointer,
    sum_i: Pointer, sum_f: Pointer, sum_g: Pointer, sum_o: Pointer, count: int,
) -> None:  # fmt: skip
    """Some columns of one row."""
    k = constants()
    for j in range(count):
        dh = f32(f32(hidden_grad[j] + load_sum(product, j)) + load_half(out_grad, j))
        hidden_grad[j] = f32(0.0)
        o, o_rest = sigmoid_and_rest(load_half(kept_o, j), k)
        t, t_slope = tanh_and_slope(load_cell(cells, j), k)
        dc = fma(f32(dh * o), t_slope, cell_grad[j])
        i, i_rest = sigmoid_and_rest(load_half(kept_i, j), k)
        f, f_rest = sigmoid_and_rest(load_half(kept_f, j), k)
        g, g_slope = tanh_and_slope(load_half(kept_g, j), k)
        cell_grad[j] = f32(dc * f)
        di = f32(f32(dc * g) * f32(i * i_rest))
        df = f32(f32(dc * load_cell(cells_before, j)) * f32(f * f_rest))
        dg = f32(f32(dc * i) * g_slope)
        do = f32(f32(dh * t) * f32(o * o_rest))
        store_factor(grad_i, j, di)
        store_factor(grad_f, j, df)
        store_factor(grad_g, j, dg)
        store_factor(grad_o, j, do)
        sum_i[j] += di
        sum_f[j] += df
        sum_g[j] += dg
        sum_o[j] += do
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
            one, gates = row * columns + start, 4 * row * columns + start
            wide, bias = factor_bytes(), job[BIAS_GRAD] + 4 * start
            kept, grads, step = job[KEPT] + 2 * gates, job[GATES_GRAD] + wide * gates, wide * columns
            begins = row >= job[ROWS_BEFORE]  # the sequence begins here: with the state that the caller gave
            before = job[BEFORE_ALL] if begins else job[BEFORE]
            cells_before = job[CELLS_BEFORE_ALL] if begins else job[CELLS_BEFORE]
            part(
                float32_at(job[HIDDEN_GRAD] + 4 * one), factor_at(job[PRODUCT] + wide * one),
                int16_at(job[OUT_GRAD] + 2 * one), int16_at(before + 2 * one), factor_at(job[FACTOR] + wide * one),
                int16_at(kept), int16_at(kept + 2 * columns),
                int16_at(kept + 4 * columns), int16_at(kept + 6 * columns),
                factor_at(grads), factor_at(grads + step), factor_at(grads + 2 * step), factor_at(grads + 3 * step),
                float32_at(job[CELL_GRAD] + 4 * one), cell_at(job[CELLS] + cell_bytes() * one),
                cell_at(cells_before + cell_bytes() * one),
                float32_at(bias), float32_at(bias + 4 * columns),
                float32_at(bias + 8 * columns), float32_at(bias + 12 * columns), min(BLOCK, columns - start),
            )  # fmt: skip


def main(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    share(job)
