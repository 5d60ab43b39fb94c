"""The fused multiply-add in Triton: the GPU's own instruction, also where the compiler may contract nothing.

Of Triton's interpreter some versions round twice, so there the lines of `reference.py` serve.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fma(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """``a * b + c`` with one rounding, of FP32 blocks, or a scalar `a` and blocks."""
    if _IS_INTERPRETED:
        return _through_fp64(a, b, c)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _through_fp64(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    product, addend = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.to(tl.int64, bitcast=True)
    away = (error > 0) == (total > 0)
    is_even = ((bits & 1) == 0) & (tl.abs(error) > 0)
    odd = bits + tl.where(is_even, tl.where(away, 1, -1), 0)
    return odd.to(tl.float64, bitcast=True).to(tl.float32)


_IS_INTERPRETED = tl.constexpr(not isinstance(fma, triton.runtime.JITFunction))
