"""The step on 8-bit states: group by group, for the largest of its new values makes a group's scale.

The new states of a group wait for it on the stack; all else goes from memory to memory, as in `cpu_elements`.
A template: `jit` writes it out with other functions in the lines marked as bound.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.cpu import (
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
from mezzo.pytorch.kernels.cpu import int8_at as master_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as grad_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as weight_at  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_grad  # bound
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
from mezzo.pytorch.kernels.optimizer_step.cpu_rules import adamw as rule  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import bf16_at_infinity as at_infinity  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import (
    cut,
    group_inverse,
    group_scale,
    key,
    load_scale,
    load_signed,
    magnitude,
    needs_cut,
    noise,
    place,
    store_scale,
    store_signed,
)
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import first as noise_of_first
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import load_scale as load_second_scale  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import load_unsigned as load_second  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import load_weight_split8 as load_weight  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import same as weight_noise  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import second as noise_of_second
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import store_scale as store_second_scale  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import store_unsigned as store_second  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_storage import store_weight_split8 as store_weight  # bound
from mezzo.pytorch.kernels.optimizer_step.storage import GROUP, STEP
from mezzo.pytorch.kernels.optimizer_step.storage import WEIGHT as WEIGHT_STREAM


@expand
def move(
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
    step_key: int,
    weight_key: int,
    start: int,
    count: int,
    a_new: Pointer,
    b_new: Pointer,
    words: Pointer,
) -> tuple[int, int, int]:
    """Move `count` weights from `start`, a group's first.

    Their new states and noise stay in `a_new`, `b_new` and `words`.

    Returns:
        Whether one of the weights is now infinite, and the `magnitude` of the largest new states.
    """
    this = start // GROUP
    a_scale, b_scale = load_scale(first_scales, this), load_second_scale(second_scales, this)
    step_mark, weight_mark = u32(step_key + place(start)), u32(weight_key + place(start))
    a_largest, b_largest, overflow = i32(0), u32(0), i32(0)
    for j in range(count):
        i = start + j
        w = load_weight(weight, master, i)
        g = load_grad(grad, i) * multiplier
        w, a, b = rule(w, g, load_signed(first, i, a_scale), load_second(second, i, b_scale), own)
        a_new[j], b_new[j] = a, b
        a_largest = max(a_largest, magnitude(a))
        b_largest = max(b_largest, u32(bits(b)))  # not negative, unless a NaN
        random = noise(step_mark, places[j])
        words[j] = random
        store_weight(weight, master, i, w, weight_noise(random, weight_mark, places[j]))
    for j in range(count):  # once more, of 16 bits each: half the vectors
        if at_infinity(weight, start + j):
            overflow = i32(1)
    return overflow, a_largest, i32(b_largest & u32(0x7FFFFFFF))


@expand
def store(
    first: Pointer,
    first_scales: Pointer,
    second: Pointer,
    second_scales: Pointer,
    start: int,
    count: int,
    a_new: Pointer,
    b_new: Pointer,
    words: Pointer,
    a_largest: int,
    b_largest: int,
) -> None:
    """Store the states of `count` elements from `start`, a group's first, that `move` has left."""
    this = start // GROUP
    a_inverse, b_inverse = group_inverse(a_largest), group_inverse(b_largest)
    if needs_cut(a_largest) or needs_cut(b_largest):
        for j in range(count):
            a_new[j], b_new[j] = cut(a_new[j], a_largest), cut(b_new[j], b_largest)
    for j in range(count):
        i = start + j
        store_signed(first, i, a_new[j], a_inverse, noise_of_first(words[j]))
        store_second(second, i, b_new[j], b_inverse, noise_of_second(words[j]))
    store_scale(first_scales, this, group_scale(a_largest))
    store_second_scale(second_scales, this, group_scale(b_largest))


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
    step_key = key(u32(constants[MOVE]), ordinal, STEP)
    weight_key = key(u32(constants[MOVE]), ordinal, WEIGHT_STREAM)
    overflow = i32(0)
    places = uint32_scratch(GROUP)
    for j in range(GROUP):
        places[j] = place(j)
    a_new, b_new, words = float32_scratch(GROUP), float32_scratch(GROUP), uint32_scratch(GROUP)
    a_next, b_next, words_next = float32_scratch(GROUP), float32_scratch(GROUP), uint32_scratch(GROUP)
    pairs = stop - (stop - start) % (2 * GROUP)
    # Two at a time, so that one's largest values are found while the other is moved; with a count that is known.
    for i in range(start, pairs, 2 * GROUP):
        overflow_0, a_0, b_0 = move(
            weight, master, grad, first, first_scales, second, second_scales,
            multiplier, own, places, step_key, weight_key, i, GROUP, a_new, b_new, words,
        )  # fmt: skip
        overflow_1, a_1, b_1 = move(
            weight, master, grad, first, first_scales, second, second_scales,
            multiplier, own, places, step_key, weight_key, i + GROUP, GROUP, a_next, b_next, words_next,
        )  # fmt: skip
        store(first, first_scales, second, second_scales, i, GROUP, a_new, b_new, words, a_0, b_0)
        store(
            first, first_scales, second, second_scales, i + GROUP, GROUP,
            a_next, b_next, words_next, a_1, b_1,
        )  # fmt: skip
        overflow = i32(overflow | i32(overflow_0 | overflow_1))
    for i in range(pairs, stop, GROUP):
        count = min(stop - i, GROUP)
        flag, a_0, b_0 = move(
            weight, master, grad, first, first_scales, second, second_scales,
            multiplier, own, places, step_key, weight_key, i, count, a_new, b_new, words,
        )  # fmt: skip
        store(first, first_scales, second, second_scales, i, count, a_new, b_new, words, a_0, b_0)
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
