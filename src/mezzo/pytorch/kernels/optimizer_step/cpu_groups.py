"""The step on 8-bit states: group by group, for the largest of its new values makes a group's scale.

The new states of a group wait for it on the stack; all else goes from memory to memory, as in `cpu_elements`.
A template: `specialise` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.adam.cpu import adamw as rule  # bound
from mezzo.pytorch.kernels.native import (
    Pointer,
    bits,
    expand,
    float32_scratch,
    i32,
    inline,
    int16_at,
    loop,
    u32,
    uint8_at,
    uint32_scratch,
)
from mezzo.pytorch.kernels.native import int8_at as master_at  # bound
from mezzo.pytorch.kernels.native import int16_at as grad_at  # bound
from mezzo.pytorch.kernels.native import int16_at as weight_at  # bound
from mezzo.pytorch.kernels.noise.cpu import STATES, high, key, low, noise, place
from mezzo.pytorch.kernels.noise.cpu import WEIGHT as WEIGHT_STREAM
from mezzo.pytorch.kernels.optimizer_step.cpu_chunks import (
    FIRST,
    FIRST_SCALES,
    GRAD,
    MASTER,
    MOVE,
    MULTIPLIER,
    ORDINAL,
    SECOND,
    SECOND_SCALES,
    WEIGHT,
    of_rule,
    share,
)
from mezzo.pytorch.kernels.optimizer_step.cpu_grads import load_bf16 as load_grad  # bound
from mezzo.pytorch.kernels.split.cpu import load_split8 as load_weight  # bound
from mezzo.pytorch.kernels.split.cpu import store_split8 as store_weight  # bound
from mezzo.pytorch.kernels.states import GROUP
from mezzo.pytorch.kernels.states.cpu import (
    group_cap,
    group_inverse,
    group_scale,
    load_scale,
    load_signed,
    magnitude,
    store_scale,
    store_signed,
)
from mezzo.pytorch.kernels.states.cpu import load_scale as load_second_scale  # bound
from mezzo.pytorch.kernels.states.cpu import load_unsigned as load_second  # bound
from mezzo.pytorch.kernels.states.cpu import store_scale as store_second_scale  # bound
from mezzo.pytorch.kernels.states.cpu import store_unsigned as store_second  # bound


@expand
def group(
    weight: Pointer,
    master: Pointer,
    grad: Pointer,
    first: Pointer,
    first_scales: Pointer,
    second: Pointer,
    second_scales: Pointer,
    multiplier: float,
    own: tuple[float, ...],
    places: Pointer,
    state_key: int,
    weight_key: int,
    start: int,
    count: int,
) -> int:
    """Move `count` elements from `start`, a group's first; whether one of the weights is now infinite."""
    this = start // GROUP
    a_scale, b_scale = load_scale(first_scales, this), load_second_scale(second_scales, this)
    state_mark, weight_mark = u32(state_key + place(start)), u32(weight_key + place(start))
    a_new, b_new = float32_scratch(GROUP), float32_scratch(GROUP)
    a_largest, b_largest, overflow = i32(0), u32(0), i32(0)
    for j in range(count):
        i = start + j
        w = load_weight(weight, master, i)
        g = load_grad(grad, i) * multiplier
        w, a, b = rule(w, g, load_signed(first, i, a_scale), load_second(second, i, b_scale), own)
        a_new[j], b_new[j] = a, b
        a_largest = max(a_largest, magnitude(a))
        b_largest = max(b_largest, u32(bits(b)))  # not negative, unless a NaN
        if store_weight(weight, master, i, w, noise(weight_mark, places[j])):
            overflow = i32(1)
    b_most = i32(b_largest & u32(0x7FFFFFFF))
    a_inverse, b_inverse = group_inverse(a_largest), group_inverse(b_most)
    a_cap, b_cap = group_cap(a_largest), group_cap(b_most)
    for j in range(count):
        i = start + j
        random = noise(state_mark, places[j])
        store_signed(first, i, a_new[j], a_inverse, a_cap, low(random))
        store_second(second, i, b_new[j], b_inverse, b_cap, high(random))
    store_scale(first_scales, this, group_scale(a_largest))
    store_second_scale(second_scales, this, group_scale(b_most))
    return overflow


@loop
def groups(
    weight: Pointer,
    master: Pointer,
    grad: Pointer,
    first: Pointer,
    first_scales: Pointer,
    second: Pointer,
    second_scales: Pointer,
    constants: Pointer,
    ordinal: int,
    start: int,
    stop: int,
) -> int:
    """Move the elements from `start`, a group's first, to `stop`; whether one of the weights is now infinite."""
    multiplier, own = constants[MULTIPLIER], of_rule(constants)
    state_key = key(u32(constants[MOVE]), ordinal, STATES)
    weight_key = key(u32(constants[MOVE]), ordinal, WEIGHT_STREAM)
    overflow = i32(0)
    places = uint32_scratch(GROUP)
    for j in range(GROUP):
        places[j] = place(j)
    whole = stop - (stop - start) % GROUP
    # A count known to the compiler, and the rest.
    for i in range(start, whole, GROUP):
        flag = group(
            weight, master, grad, first, first_scales, second, second_scales,
            multiplier, own, places, state_key, weight_key, i, GROUP,
        )  # fmt: skip
        overflow = i32(overflow | flag)
    if whole < stop:
        flag = group(
            weight, master, grad, first, first_scales, second, second_scales,
            multiplier, own, places, state_key, weight_key, whole, stop - whole,
        )  # fmt: skip
        overflow = i32(overflow | flag)
    return overflow


@inline
def walk(row: Pointer, start: int, stop: int, constants: Pointer) -> int:
    """Move one chunk of one parameter."""
    return groups(
        weight_at(row[WEIGHT]),
        master_at(row[MASTER]),
        grad_at(row[GRAD]),
        uint8_at(row[FIRST]),
        int16_at(row[FIRST_SCALES]),
        uint8_at(row[SECOND]),
        int16_at(row[SECOND_SCALES]),
        constants,
        row[ORDINAL],
        start,
        stop,
    )


def main(job: Pointer) -> None:
    """Take chunks until none is left."""
    share(job, walk)
