"""The planted faults: what is planted, and what a search for the culprit has to say of it.

Each row is a truth about the code of `faults.plants` and `faults.models`, checked without any tracer by `plain.py`.
"""

from faults.rows import afterwards, harder, held, no_result, outside, slopes, stateful, too_large
from faults.rows.fault import PLANTED, Expected, Fault

FAULTS: list[Fault] = [
    *too_large.ROWS,
    *no_result.ROWS,
    *slopes.ROWS,
    *held.ROWS,
    *outside.ROWS,
    *harder.ROWS,
    *afterwards.ROWS,
    *stateful.ROWS,
]

__all__ = ["FAULTS", "PLANTED", "Expected", "Fault"]
