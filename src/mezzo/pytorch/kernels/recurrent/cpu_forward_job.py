"""What a step's forward kernel is given (`cpu.forward`): the words of its job, whatever the kind of layer.

Items are blocks of columns of all rows; GIVEN are the input's sums, PRODUCT the state's, KEPT and CELLS what backward
reads, FACTOR the state as the next product's factor. Of a layer without a cell CELL and CELLS mean nothing.
"""

from __future__ import annotations

COUNTER, ITEMS, BLOCKS, COLUMNS, GIVEN, PRODUCT, BIAS, KEPT, OUT, FACTOR, HIDDEN, CELL, CELLS = range(13)

BLOCK = 512
"""Columns that a thread takes at once."""
