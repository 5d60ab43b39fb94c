"""What a step's backward kernel is given (`cpu.backward`): the words of its job, whatever the kind of layer.

Items are blocks of columns. BEFORE and CELLS_BEFORE are the states that the step began with, of the first ROWS_BEFORE
rows; of the others, where their sequence begins, BEFORE_ALL and CELLS_BEFORE_ALL, the caller's.
"""

from __future__ import annotations

COUNTER, ITEMS, ROWS, COLUMNS, HIDDEN_GRAD, PRODUCT, OUT_GRAD, KEPT, BEFORE, FACTOR = range(10)
GATES_GRAD, CELL_GRAD, CELLS, CELLS_BEFORE, ROWS_BEFORE, BEFORE_ALL, CELLS_BEFORE_ALL, BIAS_GRAD = range(
    10, 18
)

GIVEN_GRAD = CELL_GRAD
"""A GRU has no cell; the gradient of its input's sums, which is not that of its state's, stands there."""

BLOCK = 128
"""Columns that a thread takes at once, with all their rows, so that it alone adds to their biases."""
