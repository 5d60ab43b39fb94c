"""The compiled loops of a step, over a table of rows, in chunks that threads take by a counter: a `jit` template.

With 8-bit states (`step_groups`) the new states of a group wait on the stack, because the largest determines the scale.
Every word of a table has 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo.pytorch.kernels.cpu import (
    Pointer,
    bits,
    expand,
    f32,
    float32_at,
    float32_scratch,
    i32,
    inline,
    int16_at,
    int64_at,
    loop,
    take,
    u32,
    uint8_at,
    uint32_scratch,
)
from mezzo.pytorch.kernels.cpu import float32_at as first_at  # bound
from mezzo.pytorch.kernels.cpu import float32_at as second_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as grad_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as master_at  # bound
from mezzo.pytorch.kernels.cpu import int16_at as weight_at  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_first_scale
from mezzo.pytorch.kernels.cpu import load_bf16 as load_grad  # bound
from mezzo.pytorch.kernels.cpu import load_bf16 as load_second_scale  # bound
from mezzo.pytorch.kernels.cpu import load_fp32 as load_first  # bound
from mezzo.pytorch.kernels.cpu import load_fp32 as load_second  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import adamw as rule  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import (
    cut,
    first_noise,
    following,
    group_inverse,
    group_scale,
    load_signed,
    magnitude,
    needs_cut,
    noise,
    noise_key,
    place,
    second_noise,
    store_signed,
)
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import decode_split as decode  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import encode_split as encode  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import infinite_bf16 as infinite  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import load_pattern as load_master  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import load_pattern as load_weight  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import load_unsigned as load_second_code  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import noise_same as weight_noise  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_16 as store_first_scale
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_16 as store_master  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_16 as store_second_scale  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_16 as store_weight  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_moment_fp32 as store_first  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_moment_fp32 as store_second  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import store_unsigned as store_second_code  # bound
from mezzo.pytorch.kernels.optimizer_step.cpu_elements import uncoupled as coupled  # bound
from mezzo.pytorch.kernels.optimizer_step.formulas import GROUP
from mezzo.pytorch.kernels.optimizer_step.formulas import STEP as STEP_STREAM
from mezzo.pytorch.kernels.optimizer_step.formulas import WEIGHT as WEIGHT_STREAM

# A job: what the compiled function is given.
COUNTER, CHUNKS, CHUNK_LIST, TABLE, CONSTANT_TABLE, OVERFLOW, JOB_WORDS = range(7)

# A row of the table, one per parameter; tensors by their addresses, 0 for none. A state is followed by its scales.
WEIGHT, MASTER, GRAD, FIRST, FIRST_SCALES, SECOND, SECOND_SCALES = range(7)
NUMEL, ORDINAL, CONSTANTS, STEP, ROW_WORDS = range(7, 12)

# A row of the constants, FP32, one per group and step count; the rule's own seven come last.
MULTIPLIER, MOVE, L2, RULE, CONSTANT_WORDS = 0, 1, 2, 3, 10

# What `count_moves` is given: how many rows, the table's address, and that of an FP32 for each row.
MOVED_ROWS, MOVED_TABLE, MOVES = range(3)

CHUNK = (
    1 << 15
)  # elements: whole groups; small enough to distribute evenly, large compared to the counter's cost


@inline
def share(job: Pointer, walk: Callable[..., Any]) -> None:
    """Take chunks until none is left; ``walk(row, start, stop, constants)`` returns whether a weight overflowed."""
    overflow = i32(0)
    chunk_list, table, constant_table = int64_at(job[CHUNK_LIST]), job[TABLE], job[CONSTANT_TABLE]
    while True:
        chunk = take(job)
        if chunk >= job[CHUNKS]:
            break
        row = int64_at(table + chunk_list[2 * chunk] * (8 * ROW_WORDS))
        start = chunk_list[2 * chunk + 1]
        constants = float32_at(constant_table + row[CONSTANTS] * (4 * CONSTANT_WORDS))
        overflow = i32(overflow | walk(row, start, min(start + CHUNK, row[NUMEL]), constants))
    if overflow != 0:
        float32_at(job[OVERFLOW])[0] = f32(1)


@inline
def settings(constants: Pointer, ordinal: int) -> tuple[Any, ...]:
    """From a row of constants: multiplier, L2, the rule's own seven, and the keys of the noise."""
    c, move = constants, u32(constants[MOVE])
    own = c[3], c[4], c[5], c[6], c[7], c[8], c[9]
    keys = noise_key(move, ordinal, STEP_STREAM), noise_key(move, ordinal, WEIGHT_STREAM)
    return c[MULTIPLIER], c[L2], own, keys[0], keys[1]


def count_moves(job: Pointer) -> None:
    """Add 1 to the step of every row of a table, and copy the result."""
    table, moves = job[MOVED_TABLE], float32_at(job[MOVES])
    for row in range(job[MOVED_ROWS]):
        step = float32_at(int64_at(table + row * (8 * ROW_WORDS))[STEP])
        move = step[0] + f32(1)
        step[0] = move
        moves[row] = move


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
    """Update the elements from `start` to `stop`; returns whether one of the weights is now infinite."""
    multiplier, l2, own, step_key, weight_key = settings(constants, ordinal)
    overflow, at = i32(0), place(start)
    for i in range(start, stop):
        w = decode(load_weight(weight, i), load_master(master, i))
        g = coupled(w, load_grad(grad, i) * multiplier, l2)
        w, a, b = rule(w, g, load_first(first_state, i), load_second(second_state, i), own)
        word = noise(step_key, at)
        store_first(first_state, i, a, first_noise(word))
        store_second(second_state, i, b, second_noise(word))
        stored, kept = encode(w, weight_noise(word, weight_key, at))
        store_weight(weight, i, stored)
        store_master(master, i, kept)
        if infinite(weight, i):
            overflow = i32(1)
        at = following(at)
    return overflow


@inline
def walk_elements(row: Pointer, start: int, stop: int, constants: Pointer) -> int:
    """Update one chunk of one parameter."""
    weight, master, grad = weight_at(row[WEIGHT]), master_at(row[MASTER]), grad_at(row[GRAD])
    first, second = first_at(row[FIRST]), second_at(row[SECOND])
    return elements(weight, master, grad, first, second, constants, row[ORDINAL], start, stop)


def step_elements(job: Pointer) -> None:
    """Take chunks until none is left."""
    share(job, walk_elements)


Pointers = tuple[Pointer, ...]
# Weight, master, gradient, first state and its scales, second state and its scales; a group's new states and noise.


@expand
def move(
    of: Pointers, given: tuple[Any, ...], places: Pointer, start: int, count: int, new: Pointers
) -> tuple[int, int, int]:
    """Update `count` weights from `start`, a group's first; their new states and noise stay in `new`. Returns whether a
    weight is now infinite, and the `magnitude` of the largest new states.
    """
    weight, master, grad, first, first_scales, second, second_scales = of
    multiplier, l2, own, step_key, weight_key = given
    a_new, b_new, words = new
    this = start // GROUP
    a_scale, b_scale = load_first_scale(first_scales, this), load_second_scale(second_scales, this)
    step_mark, weight_mark = u32(step_key + place(start)), u32(weight_key + place(start))
    a_largest, b_largest, overflow = i32(0), u32(0), i32(0)
    for j in range(count):
        i = start + j
        w = decode(load_weight(weight, i), load_master(master, i))
        g = coupled(w, load_grad(grad, i) * multiplier, l2)
        w, a, b = rule(w, g, load_signed(first, i, a_scale), load_second_code(second, i, b_scale), own)
        a_new[j], b_new[j] = a, b
        a_largest = max(a_largest, magnitude(a))
        b_largest = max(b_largest, u32(bits(b)))  # not negative, unless a NaN
        word = noise(step_mark, places[j])
        words[j] = word
        stored, kept = encode(w, weight_noise(word, weight_mark, places[j]))
        store_weight(weight, i, stored)
        store_master(master, i, kept)
    for j in range(count):  # a loop of its own over 16-bit elements, which needs half the vectors
        if infinite(weight, start + j):
            overflow = i32(1)
    return overflow, a_largest, i32(b_largest & u32(0x7FFFFFFF))


@expand
def store(of: Pointers, start: int, count: int, new: Pointers, a_largest: int, b_largest: int) -> None:
    """Store the new states of `count` elements from `start`, a group's first."""
    _, _, _, first, first_scales, second, second_scales = of
    a_new, b_new, words = new
    this = start // GROUP
    a_inverse, b_inverse = group_inverse(a_largest), group_inverse(b_largest)
    if needs_cut(a_largest) or needs_cut(b_largest):
        for j in range(count):
            a_new[j], b_new[j] = cut(a_new[j], a_largest), cut(b_new[j], b_largest)
    for j in range(count):
        i = start + j
        store_signed(first, i, a_new[j], a_inverse, first_noise(words[j]))
        store_second_code(second, i, b_new[j], b_inverse, second_noise(words[j]))
    store_first_scale(first_scales, this, group_scale(a_largest))
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
    """Update the elements from `start`, a group's first, to `stop`; returns whether a weight is now infinite."""
    of = weight, master, grad, first, first_scales, second, second_scales
    given, overflow, places = settings(constants, ordinal), i32(0), uint32_scratch(GROUP)
    for j in range(GROUP):
        places[j] = place(j)
    new = float32_scratch(GROUP), float32_scratch(GROUP), uint32_scratch(GROUP)
    other = float32_scratch(GROUP), float32_scratch(GROUP), uint32_scratch(GROUP)
    pairs = stop - (stop - start) % (2 * GROUP)
    # Two at a time, so that one's largest values are found while the other is moved; with a count that is known.
    for i in range(start, pairs, 2 * GROUP):
        overflow_0, a_0, b_0 = move(of, given, places, i, GROUP, new)
        overflow_1, a_1, b_1 = move(of, given, places, i + GROUP, GROUP, other)
        store(of, i, GROUP, new, a_0, b_0)
        store(of, i + GROUP, GROUP, other, a_1, b_1)
        overflow = i32(overflow | i32(overflow_0 | overflow_1))
    for i in range(pairs, stop, GROUP):
        count = min(stop - i, GROUP)
        flag, a_0, b_0 = move(of, given, places, i, count, new)
        store(of, i, count, new, a_0, b_0)
        overflow = i32(overflow | flag)
    return overflow


@inline
def walk_groups(row: Pointer, start: int, stop: int, constants: Pointer) -> int:
    """Update one chunk of one parameter."""
    weight, master, grad = weight_at(row[WEIGHT]), master_at(row[MASTER]), grad_at(row[GRAD])
    first, first_scales = uint8_at(row[FIRST]), int16_at(row[FIRST_SCALES])
    second, second_scales = uint8_at(row[SECOND]), int16_at(row[SECOND_SCALES])
    return groups(
        weight, master, grad, first, first_scales, second, second_scales,
        constants, row[ORDINAL], start, stop,
    )  # fmt: skip


def step_groups(job: Pointer) -> None:
    """Take chunks until none is left."""
    share(job, walk_groups)
