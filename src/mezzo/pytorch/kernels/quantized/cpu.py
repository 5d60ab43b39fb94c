"""Quantization by blocks on a CPU, in a `jit` template: magnitudes, scales, codes and decoded values of a tile at once.

A tile is a row of blocks, or a part of one, so that x is read from memory once. For finite values the results are bit
for bit those of `quantized`, by any number of threads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from mezzo.core.formats import named
from mezzo.core.recipes import HADAMARD, Factor
from mezzo.pytorch.dtypes import dtype_of
from mezzo.pytorch.kernels import cpu, jit
from mezzo.pytorch.kernels.cpu import Pointer, bits, f32, float32_at, float_of, i32, loop, u8, u32, uint8_at

INFINITY = 0x7F800000  # the pattern
_LARGEST = f32(torch.finfo(torch.float32).max)

Given = tuple[int, int, int]  # what the scales of a matrix have in common

BLOCKS = 512  # in a tile, at most
SPAN_MIXED = 256  # columns that are transformed at once
MIXED = HADAMARD * SPAN_MIXED  # their elements: 16 KiB in FP32
_TILE = 1 << 14  # elements of a tile, about

# The words of a job; the address of values is 0 if they are not wanted. GIVEN: three words for `scales_of`. NOT_FINITE
# becomes 1 if there is a NaN or an infinity.
(
    COUNTER, TAKEN, TILES, COLUMNS, HEIGHT, ACROSS, SPAN, X, CODES, VALUES, SCALES, GIVEN, _, _, NOT_FINITE, JOB_WORDS,
) = range(16)  # fmt: skip

_Job = c_int64 * JOB_WORDS

Tensors = tuple[Pointer, Pointer, Pointer, Pointer]


def quantize(
    x: Tensor, factor: Factor, block: tuple[int, int], given: Sequence[int], dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, the blocks' scales and values of x [R, C], contiguous and in whole blocks; None if one is not finite.

    `given` are a tensor scale's FP32 patterns for NVFP4; else the least and the largest biased exponent of a scale,
    and 0, or for scales that are rounded down the exponent of the largest element.
    """
    rows, columns = x.shape
    height, width = block
    is_one = block == (rows, columns) and factor.scale != "e4m3fn"
    if is_one:
        height = 1  # rows as blocks, whose scales are the same
    codes = torch.empty(x.shape, dtype=dtype_of("e5m2" if factor.element == "e5m2" else "e4m3fn"))
    inv_scale = torch.empty((rows // height, columns // width), dtype=torch.float32)
    values = torch.empty(x.shape, dtype=dtype) if dtype is torch.bfloat16 else None
    if height == 1:  # one row of blocks
        rows, columns = 1, x.numel()
    span = min(max(_TILE // height, 128), BLOCKS * width, columns) // width * width or width
    tiles = rows // height * -(-columns // span)
    sizes = 0, jit.shared(tiles), tiles, columns, height, columns // width, span
    tensors = (0 if tensor is None else tensor.data_ptr() for tensor in (x, codes, values, inv_scale))
    job = _Job(*sizes, *tensors, *given)
    jit.run(_quantizer(factor, width, x.dtype), job, x.numel())
    if job[NOT_FINITE]:
        return None
    return codes, inv_scale[:1].clone() if is_one else inv_scale, values


def decode(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * inv_scale`` [R, C] in bf16 or FP32."""
    codes, inv_scale = codes.contiguous(), inv_scale.contiguous()
    (rows, columns), (down, across) = codes.shape, inv_scale.shape
    values = torch.empty(codes.shape, dtype=dtype)
    sizes = 0, jit.shared(rows), rows, columns, rows // down, across, columns
    job = _Job(*sizes, 0, codes.data_ptr(), values.data_ptr(), inv_scale.data_ptr())
    jit.run(_decoder(codes.dtype, columns // across, dtype), job, codes.numel())
    return values


def mixed(x: Tensor, matrix: Tensor) -> Tensor:
    """`quantized.hadamard` along the rows of x [R, C], in whole groups and contiguous, summed in order; in bf16."""
    rows, columns = x.shape
    values = torch.empty(x.shape, dtype=torch.bfloat16)
    tiles = rows // HADAMARD * -(-columns // SPAN_MIXED)
    sizes = 0, jit.shared(tiles), tiles, columns, HADAMARD, 0, SPAN_MIXED
    job = _Job(*sizes, x.data_ptr(), 0, values.data_ptr(), matrix.data_ptr())
    bindings = {**jit.elements(x.dtype, load="load_x", at="x_at"), "work": "mix_part"}
    jit.run(jit.kernel(sys.modules[__name__], bindings).address, job, x.numel())
    return values


def _width(width: int) -> dict[str, str]:
    return {"WIDTH": str(width if width in (1, 16, 32) else 0)}  # longer loops need not know


@functools.cache
def _quantizer(factor: Factor, width: int, x: torch.dtype) -> int:
    form = named(factor.element)
    bindings = {
        **jit.elements(x, load="load_x", at="x_at"),
        **_width(width),
        "NMANT": str(form.nmant),
        "LEAST": str(127 + form.minexp),
        "LARGEST": repr(float(form.max)),
        "scales_of": "by_e4m3fn" if factor.scale == "e4m3fn" else "by_power",
        "gaps_of": "stochastic" if factor.stochastic else "nearest",
        "code_of": "own_code" if form.bits == 8 else "wider_code",
    }
    return jit.kernel(sys.modules[__name__], bindings).address


@functools.cache
def _decoder(codes: torch.dtype, width: int, values: torch.dtype) -> int:
    element = "e5m2" if codes is torch.float8_e5m2 else "e4m3fn"
    bindings = {
        **jit.elements(values, store="store_value", at="value_at"),
        **_width(width),
        "value_of_code": f"value_of_{element}",
        "work": "decode_row",
    }
    return jit.kernel(sys.modules[__name__], bindings).address


NMANT = 3  # bound
LEAST = 121  # bound
LARGEST = 448.0  # bound
WIDTH = 32  # bound
x_at = cpu.int16_at  # bound
load_x = cpu.load_bf16  # bound
value_at = cpu.int16_at  # bound
store_value = cpu.store_bf16  # bound


@cpu.inline
def binade_of(magnitude: int, least: int) -> int:
    """The pattern of the largest power of two up to a magnitude, at least that of the biased exponent."""
    return max(i32(magnitude & i32(INFINITY)), i32(least << 23))


@cpu.inline
def nearest(magnitude: int, sign: int, binade: int, nmant: int, place: int) -> int:
    """A magnitude in the format's gaps, ties to even: the low bits of its sum with 1.5 * 2**23 gaps."""
    anchor = i32(binade + i32(((23 - nmant) << 23) + (1 << 22)))
    return i32(bits(f32(float_of(magnitude) + float_of(anchor))) - anchor)


@cpu.inline
def stochastic(magnitude: int, sign: int, binade: int, nmant: int, place: int) -> int:
    """The same, up or down at random: `RoundingPlan.round` with `random_integers` of seed 0."""
    h = u32(u32(u32(magnitude | sign) * u32(0x2C1B3C6D)) + u32(u32(place) * u32(0x297A2D39)))
    h = u32(u32(h ^ u32(h >> 16)) * u32(0x7FEB352D))
    h = u32(u32(h ^ u32(h >> 15)) * u32(0x846CA68B))
    h = u32(u32(h ^ u32(h >> 16)) & u32(0x3FFFFFFF))
    exponent = max(u32(u32(magnitude) >> 23), u32(1))
    significand = u32(u32(magnitude) - u32(u32(exponent - u32(1)) << 23))
    below = u32(u32(u32(23 - nmant) + u32(u32(binade) >> 23)) - exponent)
    kept = min(below, u32(30))
    cut = min(u32(below - kept), u32(30))
    return i32(u32(u32(significand >> cut) + u32(h >> u32(u32(30) - kept))) >> kept)


@cpu.inline
def value_of(gaps: int, binade: int, nmant: int) -> float:
    """A number of gaps as FP32."""
    return f32(f32(gaps) * float_of(i32(binade - i32(nmant << 23))))


@cpu.inline
def own_code(gaps: int, binade: int, rounded: float, least: int, nmant: int) -> int:
    """Without the sign: the gaps from 0, and the binades of as many codes below."""
    return i32(gaps + i32(i32(binade - i32(least << 23)) >> i32(23 - nmant)))


@cpu.inline
def wider_code(gaps: int, binade: int, rounded: float, least: int, nmant: int) -> int:
    """The code of e4m3fn with the value."""
    return max(i32(0), i32(i32(bits(rounded) >> 20) - i32(120 << 3)))


@cpu.inline
def power(biased: int) -> float:
    """``2 ** (biased - 127)``, for 0 as well."""
    return float_of(i32(biased << 23) if biased > 0 else i32(1 << 22))


@cpu.inline
def by_power(largest: int, divisor: float, given: Given) -> tuple[float, float]:
    """A block's scale and its inverse, powers of two: up from the quotient, or the floor if `given` has an exponent."""
    lowest, highest, floor = given
    quotient = bits(f32(float_of(largest) / divisor))
    up = i32(i32(quotient + i32(0x7FFFFF)) >> 23) if quotient > i32(1 << 22) else i32(0)
    biased = i32(i32(largest >> 23) - floor) if floor else up
    biased = min(max(biased, lowest), highest)
    return power(biased), power(i32(i32(254) - biased))


@cpu.inline
def by_e4m3fn(largest: int, divisor: float, given: Given) -> tuple[float, float]:
    """NVFP4's scale of a block, and what its elements are multiplied by; `given` are the tensor's factors."""
    of_tensor, decode_tensor = float_of(given[0]), float_of(given[1])
    wanted = min(bits(f32(float_of(largest) * of_tensor)), bits(f32(448.0)))
    binade = binade_of(wanted, 121)
    scale = value_of(nearest(wanted, i32(0), binade, 3, 0), binade, 3)
    inverse = f32(f32(1.0) / f32(scale * decode_tensor))
    return scale, _LARGEST if inverse > _LARGEST else inverse


@cpu.inline
def value_of_e4m3fn(code: int) -> float:
    """The fp16 with the same bits, which is 2**-8 of it; NaN is in the exponent of fp16's largest."""
    low = i32(code & i32(0x7F))
    pattern = i32(i32(i32(code & i32(0x80)) << 8) | i32(low << 7))
    return f32(cpu.float_of_half(cpu.i16(i32(0x7E00) if low == i32(0x7F) else pattern)) * f32(256.0))


@cpu.inline
def value_of_e5m2(code: int) -> float:
    """The upper half of an fp16."""
    return cpu.float_of_half(cpu.i16(i32(code << 8)))


gaps_of = nearest  # bound
code_of = own_code  # bound
scales_of = by_power  # bound
value_of_code = value_of_e4m3fn  # bound


@loop
def quantize_tile(
    tensors: Tensors,
    given: Given,
    start: int,
    first: int,
    rows: int,
    blocks: int,
    stride: int,
    width: int,
    has_values: bool,
) -> int:
    """Quantize the blocks from element `start`, whose scales begin at `first`; returns the largest magnitude."""
    x, codes, values, inv_scales = tensors
    largest, multipliers = cpu.uint32_scratch(BLOCKS), cpu.float32_scratch(BLOCKS)
    places = cpu.uint32_scratch(BLOCKS)  # vectors of 64 bits would take the place of 32-bit ones
    for b in range(blocks):
        largest[b], places[b] = u32(0), u32(b * width)
    for row in range(rows):
        at = start + row * stride
        for b in range(blocks):
            most = u32(largest[b])
            for i in range(width):
                most = max(most, u32(bits(load_x(x, at + b * width + i)) & i32(0x7FFFFFFF)))
            largest[b] = most
    top = u32(0)
    for b in range(blocks):
        top = max(top, u32(largest[b]))
        inv_scale, multiplier = scales_of(i32(largest[b]), f32(LARGEST), given)
        inv_scales[first + b] = inv_scale
        multipliers[b] = multiplier
    for row in range(rows):
        at = start + row * stride
        mark = u32(at)
        for b in range(blocks):
            for i in range(width):
                place = at + b * width + i
                pattern = bits(f32(load_x(x, place) * f32(multipliers[b])))
                sign = i32(pattern & i32(-0x80000000))
                magnitude = min(i32(pattern & i32(0x7FFFFFFF)), bits(f32(LARGEST)))
                binade = binade_of(magnitude, LEAST)
                gaps = gaps_of(magnitude, sign, binade, NMANT, u32(mark + u32(u32(places[b]) + u32(i))))
                rounded = value_of(gaps, binade, NMANT)
                codes[place] = u8(i32(code_of(gaps, binade, rounded, LEAST, NMANT) | i32(sign >> 24)))
                if has_values:
                    signed = float_of(i32(bits(rounded) | sign))
                    cpu.store_number_bf16(values, place, f32(signed * f32(inv_scales[first + b])))
    return i32(top)


@cpu.inline
def quantize_part(job: Pointer, tile: int) -> None:
    """Quantize one tile."""
    columns, height, span = job[COLUMNS], job[HEIGHT], job[SPAN]
    width = WIDTH if WIDTH else columns // job[ACROSS]
    tensors = x_at(job[X]), uint8_at(job[CODES]), cpu.int16_at(job[VALUES]), float32_at(job[SCALES])
    given = i32(job[GIVEN]), i32(job[GIVEN + 1]), i32(job[GIVEN + 2])
    has_values = job[VALUES] != 0
    parts = (columns + span - 1) // span
    down, column = tile // parts, tile % parts * span
    start, first = down * height * columns + column, down * job[ACROSS] + column // width
    blocks = min(span, columns - column) // width
    top = quantize_tile(tensors, given, start, first, height, blocks, columns, width, has_values)
    if top >= i32(INFINITY):
        job[NOT_FINITE] = 1


@loop
def decode_blocks(
    codes: Pointer, values: Pointer, inv_scales: Pointer, start: int, first: int, blocks: int, width: int
) -> None:
    """Decode the blocks of a row."""
    for b in range(blocks):
        for i in range(width):
            place = start + b * width + i
            store_value(values, place, f32(value_of_code(i32(codes[place])) * f32(inv_scales[first + b])))


@cpu.inline
def decode_row(job: Pointer, row: int) -> None:
    """Decode one row."""
    columns, across = job[COLUMNS], job[ACROSS]
    width = WIDTH if WIDTH else columns // across
    codes, values, inv_scales = uint8_at(job[CODES]), value_at(job[VALUES]), float32_at(job[SCALES])
    decode_blocks(codes, values, inv_scales, row * columns, row // job[HEIGHT] * across, across, width)


@loop
def mix_tile(x: Pointer, values: Pointer, matrix: Pointer, start: int, columns: int, stride: int) -> None:
    """Multiply 16 rows by the matrix."""
    wide = cpu.float32_scratch(MIXED)
    for i in range(HADAMARD):
        for column in range(columns):
            wide[i * SPAN_MIXED + column] = load_x(x, start + i * stride + column)
    for j in range(HADAMARD):
        for column in range(columns):
            total = f32(0.0)
            for i in range(HADAMARD):
                total = cpu.fma(f32(wide[i * SPAN_MIXED + column]), f32(matrix[i * HADAMARD + j]), total)
            cpu.store_bf16(values, start + j * stride + column, total)


@cpu.inline
def mix_part(job: Pointer, tile: int) -> None:
    """Mix one tile."""
    columns, span = job[COLUMNS], job[SPAN]
    x, values, matrix = x_at(job[X]), cpu.int16_at(job[VALUES]), float32_at(job[SCALES])
    parts = (columns + span - 1) // span
    column = tile % parts * span
    start = tile // parts * HADAMARD * columns + column
    mix_tile(x, values, matrix, start, min(span, columns - column), columns)


work = quantize_part  # bound


def main(job: Pointer) -> None:
    """Take tiles, or rows, until none is left."""
    cpu.share(job, job[TILES], job[TAKEN], work)
