"""How a compiled step finds its work: a table of rows, a list of chunks, and a counter that threads take them by.

Everything is a word of 64 bits: addresses, sizes, indices. `optimizer_step.cpu` writes these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo.pytorch.kernels.cpu import Pointer, f32, float32_at, i32, inline, int64_at, take

# A job: what the compiled function is given.
COUNTER, CHUNKS, CHUNK_LIST, TABLE, CONSTANT_TABLE, OVERFLOW, JOB_WORDS = range(7)

# A row of the table, one a parameter; tensors by their addresses, 0 for none.
(
    WEIGHT,
    MASTER,
    GRAD,
    FIRST,
    FIRST_SCALES,
    SECOND,
    SECOND_SCALES,
    NUMEL,
    ORDINAL,
    CONSTANTS,
    STEP,
    ROW_WORDS,
) = range(12)

# A row of the constants, FP32, one for each group and number of moves: then the rule's own.
MULTIPLIER, MOVE, RULE, CONSTANT_WORDS = 0, 1, 2, 12

# What `count_moves` is given: how many rows, the table's address, and that of an FP32 for each row.
MOVED_ROWS, MOVED_TABLE, MOVES = range(3)

CHUNK = 1 << 15
"""Elements of one chunk: whole groups; small enough to share out evenly, large beside the counter's cost."""


@inline
def share(job: Pointer, walk: Callable[..., Any]) -> None:
    """Take chunks until none is left: ``walk(row, start, stop, constants)`` tells whether a weight overflowed."""
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
def of_rule(c: Pointer) -> tuple[float, ...]:
    """The rule's own constants."""
    return c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10], c[11]


def count_moves(job: Pointer) -> None:
    """Add 1 to the step of every row of a table, and note the result: the number of the parameter's move."""
    table, moves = job[MOVED_TABLE], float32_at(job[MOVES])
    for row in range(job[MOVED_ROWS]):
        step = float32_at(int64_at(table + row * (8 * ROW_WORDS))[STEP])
        move = step[0] + f32(1)
        step[0] = move
        moves[row] = move
