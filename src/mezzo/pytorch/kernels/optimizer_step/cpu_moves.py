"""Count the moves of all parameters of a step: their numbers come back, and stand in their rows' `step`.

A template without bound names; it is compiled as it stands.
"""

from __future__ import annotations

from mezzo.pytorch.kernels.native import Pointer, f32, float32_at, int64_at
from mezzo.pytorch.kernels.optimizer_step.cpu_chunks import ROW_WORDS, STEP

# What `main` is given: how many rows, the table's address, and that of an FP32 for each row.
ROWS, TABLE, MOVES, JOB_WORDS = range(4)


def main(job: Pointer) -> None:
    """Add 1 to every row's step, and note the result."""
    table, moves = job[TABLE], float32_at(job[MOVES])
    for row in range(job[ROWS]):
        step = float32_at(int64_at(table + row * (8 * ROW_WORDS))[STEP])
        move = step[0] + f32(1)
        step[0] = move
        moves[row] = move
