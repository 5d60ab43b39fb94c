"""A block of a tensor's memory in Triton, by an address from a table.

`here` is ``(start, index, mask)``: the block's first position (int64), the positions from there, which of them exist.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(address: tl.tensor, here: tl.tuple, dtype: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """The block's elements, 0 where there is none; `PLAIN`: all exist, and the address is a multiple of 16."""
    start, index, mask = here
    pointer = address.to(tl.pointer_type(dtype))
    if PLAIN:
        return tl.load(tl.multiple_of(pointer, 16) + start + index)
    else:
        return tl.load(pointer + start + index, mask=mask, other=0)


@triton.jit
def load_float(address: tl.tensor, here: tl.tuple, DTYPE: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """Elements of an FP32 (0), bf16 (1) or fp16 (2) tensor, as `decode_float` takes them."""
    if DTYPE == 0:
        return load(address, here, tl.float32, PLAIN)
    elif DTYPE == 1:
        return load(address, here, tl.int16, PLAIN)  # patterns: the interpreter's own bf16 loses subnormals
    else:
        return load(address, here, tl.float16, PLAIN)


@triton.jit
def decode_float(loaded: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The FP32 values of what `load_float` gave."""
    if DTYPE == 1:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return loaded.to(tl.float32)


@triton.jit
def store(
    address: tl.tensor, value: tl.tensor, here: tl.tuple, dtype: tl.constexpr, PLAIN: tl.constexpr
) -> None:
    """Write the block's elements, those that exist, in the memory's format; see `load`."""
    start, index, mask = here
    pointer = address.to(tl.pointer_type(dtype))
    if PLAIN:
        tl.store(tl.multiple_of(pointer, 16) + start + index, value.to(dtype))
    else:
        tl.store(pointer + start + index, value.to(dtype), mask=mask)
