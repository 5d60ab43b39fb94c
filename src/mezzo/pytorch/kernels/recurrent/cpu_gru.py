"""One step of a GRU on a CPU: from both products to the state, in one pass.

    r, z = given[r z] + product[r z] + bias[r z]
    m = product[n] + bias[m];  n = given[n] + bias[n] + sigmoid(r) * m
    h = tanh(n) + sigmoid(z) * (h - tanh(n))

For backward are kept r, z, n and m, rounded to 16 bits (`cpu_lstm` says why not the gates). A template.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.layer_norm.cpu_elements import store_bf16 as store_half  # bound
from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, fma, inline, int16_at, loop, take
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
    KEPT,
    OUT,
    PRODUCT,
)
from mezzo.pytorch.kernels.recurrent.cpu_functions import constants, sigmoid, tanh


@loop
def part(
    given_r: Pointer, given_z: Pointer, given_n: Pointer,
    product_r: Pointer, product_z: Pointer, product_n: Pointer,
    bias_r: Pointer, bias_z: Pointer, bias_n: Pointer, bias_m: Pointer,
    kept_r: Pointer, kept_z: Pointer, kept_n: Pointer, kept_m: Pointer,
    out: Pointer, factor: Pointer, hidden: Pointer, count: int,
) -> None:  # fmt: skip
    """Some columns of one row."""
    k = constants()
    for j in range(count):
        r = f32(f32(load_sum(given_r, j) + load_sum(product_r, j)) + bias_r[j])
        z = f32(f32(load_sum(given_z, j) + load_sum(product_z, j)) + bias_z[j])
        m = f32(load_sum(product_n, j) + bias_m[j])
        n = fma(sigmoid(r, k), m, f32(load_sum(given_n, j) + bias_n[j]))
        store_half(kept_r, j, r)
        store_half(kept_z, j, z)
        store_half(kept_n, j, n)
        store_half(kept_m, j, m)
        new = tanh(n, k)
        h = carry(fma(sigmoid(z, k), f32(hidden[j] - new), new))
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
        one, gates = row * columns + start, 3 * row * columns + start
        wide = factor_bytes()
        given, product, step = job[GIVEN] + wide * gates, job[PRODUCT] + wide * gates, wide * columns
        bias, kept = job[BIAS] + 4 * start, job[KEPT] + 2 * (4 * row * columns + start)
        part(
            factor_at(given), factor_at(given + step), factor_at(given + 2 * step),
            factor_at(product), factor_at(product + step), factor_at(product + 2 * step),
            float32_at(bias), float32_at(bias + 4 * columns),
            float32_at(bias + 8 * columns), float32_at(bias + 12 * columns),
            int16_at(kept), int16_at(kept + 2 * columns),
            int16_at(kept + 4 * columns), int16_at(kept + 6 * columns),
            int16_at(job[OUT] + 2 * one), factor_at(job[FACTOR] + wide * one),
            float32_at(job[HIDDEN] + 4 * one), min(BLOCK, columns - start),
        )  # fmt: skip


def main(job: Pointer) -> None:
    """Take blocks of columns until none is left."""
    share(job)
