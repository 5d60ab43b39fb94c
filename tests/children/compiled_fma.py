"""Computes FP32 fused multiply-adds with the CPU kernels' `fma`: an ``(n, 3)`` array of FP32 in, ``(n,)`` out.

``python compiled_fma.py in.npy out.npy`` prints the loop's machine code. Which processor that is for Numba reads from
its environment: `NUMBA_CPU_NAME=generic` is one without the instruction.
"""

from __future__ import annotations

import sys

import numba
import numpy as np

from mezzo.pytorch.kernels.cpu import fma


@numba.njit(error_model="numpy")
def each(a, b, c, result):  # type: ignore[no-untyped-def]
    for i in range(len(result)):
        result[i] = fma(a[i], b[i], c[i])


rows = np.load(sys.argv[1])
made = np.zeros(len(rows), np.float32)
each(*(np.ascontiguousarray(column) for column in rows.T), made)
np.save(sys.argv[2], made)
print("\n".join(each.inspect_asm().values()))
