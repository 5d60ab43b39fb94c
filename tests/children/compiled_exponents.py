"""Compiles the exponent histogram for a Hopper, without one, and prints what came out: a JSON object a line."""

from __future__ import annotations

import json
import re
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mezzo.pytorch.kernels.exponents import triton as kernel

SIGNATURE = {"address": "i64", "total": "i64", "row": "*i64", "DTYPE": "constexpr", "PLAIN": "constexpr"}

for dtype, plain in product(range(3), (False, True)):
    source = ASTSource(kernel.count_kernel, signature=SIGNATURE, constexprs={"DTYPE": dtype, "PLAIN": plain})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(kernel.OPTIONS))
    assembly = made.asm["ptx"]
    print(
        json.dumps(
            {
                "plain": plain,
                "vectors": len(re.findall(r"ld\.global\S*\.v[24]\.b32", assembly)),
                "flushes": len(re.findall(r"\S+\.ftz\S*", assembly)),
            }
        )
    )
