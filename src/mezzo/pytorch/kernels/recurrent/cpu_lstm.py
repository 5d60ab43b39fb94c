"""One step of an LSTM on a CPU: from both products to the states, in one pass.

    i, f, g, o = given + product + bias
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)

For backward are kept the sums before sigmoid and tanh, rounded to 16 bits, and not the gates: a forget gate of 0.998
is 0.996 in bf16, and over a thousand steps that is all the difference. A template: `specialise` writes it out.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_bf16 as store_half  # bound
from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_fp32 as store_cell  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, fma, inline, int16_at, loop, take
from mezzo.pytorch.kernels.native import float32_at as cell_at  # bound
from mezzo.pytorch.kernels.native import float32_at as factor_at  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_sum  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as cell_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import four as factor_bytes  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import keep as carry  # bound
from mezzo.pytorch.kernels.recurrent.cpu_elements import store_round_bf16 as store_factor  # bound
from mezzo.pytorch.kernels.recurrent.cpu_forward_job import (
    BIAS,
    BLOCK,
    BLOCKS,
    CELL,
    CELLS,
    COLUMNS,
    FACTOR,
    GIVEN,
    HIDDEN,
    ITEMS,
    KEPT,
    OUT,
    PRODUCT,
)
from mezzo.pytorch.kernels.recurrent.cpu_functions import constants, sigmoid, tanh


@loop
def part(
    given_i: Pointer, given_f: Pointer, given_g: Pointer, given_o: Pointer,
    product_i: Pointer, product_f: Pointer, product_g: Pointer, product_o: Pointer,
    bias_i: Pointer, bias_f: Pointer, bias_g: Pointer, bias_o: Pointer,
    kept_i: Pointer, kept_f: Pointer, kept_g: Pointer, kept_o: Pointer,
    out: Pointer, factor: Pointer, hidden: Pointer, cell: Pointer, cells: Pointer, count: int,
) -> None:  # fmt: skip
    """Some columns of one row."""
    k = constants()
    for j in range(count):
        i = f32(f32(load_sum(given_i, j) + load_sum(product_i, j)) + bias_i[j])
        f = f32(f32(load_sum(given_f, j) + load_sum(product_f, j)) + bias_f[j])
        g = f32(f32(load_sum(given_g, j) + load_sum(product_g, j)) + bias_g[j])
        o = f32(f32(load_sum(given_o, j) + load_sum(product_o, j)) + bias_o[j])
        store_half(kept_i, j, i)
        store_half(kept_f, j, f)
        store_half(kept_g, j, g)
        store_half(kept_o, j, o)
        c = carry(fma(sigmoid(f, k), cell[j], f32(sigmoid(i, k) * tanh(g, k))))
        cell[j] = c
        store_cell(cells, j, c)
        h = carry(f32(sigmoid(o, k) * tanh(c, k)))
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
        one, gates = row * columns + start, 4 * row * columns + start
        wide = factor_bytes()
        given, product = job[GIVEN] + wide * gates, job[PRODUCT] + wide * gates
        bias, kept = job[BIAS] + 4 * start, job[KEPT] + 2 * gates
        step = wide * columns
        part(
            factor_at(given), factor_at(given + step), factor_at(given + 2 * step), factor_at(given + 3 * step),
            factor_at(product), factor_at(product + step),
            factor_at(product + 2 * step), factor_at(product + 3 * step),
            float32_at(bias), float32_at(bias + 4 * columns),
            float32_at(bias + 8 * columns), float32_at(bias + 12 * columns),
            int16_at(kept), int16_at(kept + 2 * columns),
            int16_at(kept + 4 * columns), int16_at(kept + 6 * columns),
            int16_at(job[OUT] + 2 * one), factor_at(job[FACTOR] + wide * one),
            float32_at(job[HIDDEN] + 4 * one), float32_at(job[CELL] + 4 * one),
            cell_at(job[CELLS] + cell_bytes() * one), min(BLOCK, columns - start),
        )  # fmt: skip


def main(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    share(job)
