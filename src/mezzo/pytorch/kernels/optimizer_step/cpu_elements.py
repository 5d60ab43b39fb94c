"""The step on states without groups: one loop from memory to memory, nothing in between.

A template: `jit` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.cpu import Pointer, i32, inline, loop, u32
from mezzo.pytorch.kernels.cpu import float32_at as first_at  # bound
from mezzo.pytorch.kernels.cpu import float32_at as second_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as grad_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as master_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as weight_at  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_grad  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_chunks import (
    FIRST,
    GRAD,
    MASTER,
    MOVE,
    MULTIPLIER,
    ORDINAL,
    SECOND,
    WEIGHT,
    of_rule,
    share,
)
from mezzo.pytorch.kernels.optimizer_step.cpu_rules import adamw as rule  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import first, following, key, noise, place, second
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import load_state_fp32 as load_first  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import load_state_fp32 as load_second  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import load_weight_split as load_weight  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import same as weight_noise  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import store_state_fp32 as store_first  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import store_state_fp32 as store_second  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import store_weight_split as store_weight  # bound
from mezzo.pytorch.kernels.optimizer_step.storage import STEP
from mezzo.pytorch.kernels.optimizer_step.storage import WEIGHT as WEIGHT_STREAM


@loop
def elements(
    weight: Pointer,
    master: Pointer,
    grad: Pointer,
    first_state: Pointer,
    second_state: Pointer,
    constants: Pointer,
    ordinal: int,
    start: int,
    stop: int,
) -> int:
    """Move the elements from `start` to `stop`; whether one of the weights is now infinite."""
    multiplier, own = constants[MULTIPLIER], of_rule(constants)
    step_key = key(u32(constants[MOVE]), ordinal, STEP)
    weight_key = key(u32(constants[MOVE]), ordinal, WEIGHT_STREAM)
    overflow, at = i32(0), place(start)
    for i in range(start, stop):
        w = load_weight(weight, master, i)
        g = load_grad(grad, i) * multiplier
        w, a, b = rule(w, g, load_first(first_state, i), load_second(second_state, i), own)
        bits = noise(step_key, at)
        store_first(first_state, i, a, first(bits))
        store_second(second_state, i, b, second(bits))
        if store_weight(weight, master, i, w, weight_noise(bits, weight_key, at)):
            overflow = i32(1)
        at = following(at)
    return overflow


@inline
def walk(row: Pointer, start: int, stop: int, constants: Pointer) -> int:
    """Move one chunk of one parameter."""
    return elements(
        weight_at(row[WEIGHT]),
        master_at(row[MASTER]),
        grad_at(row[GRAD]),
        first_at(row[FIRST]),
        second_at(row[SECOND]),
        constants,
        row[ORDINAL],
        start,
        stop,
    )


def main(job: Pointer) -> None:
    """Take chunks until none is left."""
    share(job, walk)
