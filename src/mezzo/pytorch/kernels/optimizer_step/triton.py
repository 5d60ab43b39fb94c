"""The step in Triton: one launch for all parameters of a device, whatever their shapes and storage.

Each program finds its work in tables on the device (`pointer_table`): which parameter, which blocks of 1024
elements. Storage formats and rules are compile-time constants: `KINDS` lists the combinations that
occur, each gets its own straight code, and a program jumps to its row's; in most models there is one and no jump.
Learning rates and the like are table entries, so that a scheduler recompiles nothing.

**Bits**: the formulas of `formulas.py` in Triton's words: IEEE division and root, and no contraction
(`enable_fp_fusion=False`) but for the rules' own `fma`. A 16-bit weight is int16 in memory and int32 here, its
pattern; a block of 8-bit states is ``(rows, 64)``, a row for each group with one scale. How often a parameter has
moved is known on the device alone (an overflow skips a move without telling the host), so Adam's bias corrections are
computed there: powers by squaring, where the reference has the C library's, both in FP64 and rounded to FP32 once, so
that they should differ in about one of a million steps, by one FP32 ulp.

**Steps** are counted on the device. All programs of a row read the count, so only the last of them to have read
it may write the new one. Which is last an atomic ticket tells, one a row; the barrier before it is what makes the
ticket speak for all warps of its program. A second launch would cost more than the ticket does.

**Speed**, reasoned for an H100 or H200 and not yet measured: a program of 8 warps has 4 elements a thread: FP32 moves
in vectors of 16 bytes, bf16 of 8, and every warp in whole 128-byte lines. The loads of a block come before anything
that uses them. 64 registers a thread let four programs into an SM. A short or unaligned block is done 256 elements at a
time, one a thread, so that it needs no more registers than a whole one. A program takes up to 16 blocks, which spreads
its prologue (three dependent reads, the bias correction) and its ticket over them.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.pytorch.kernels import block
from mezzo.pytorch.kernels.optimizer_step import Groups, Row, formulas, pointer_table
from mezzo.pytorch.kernels.optimizer_step.pointer_table import PointerTable

OPTIONS: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "maxnreg": 64, "enable_fp_fusion": False})
"""How `step_kernel` must be compiled."""

_CACHE_BYTES = 32 << 20

_BLOCK = tl.constexpr(pointer_table.BLOCK)
_PART = tl.constexpr(256)  # of a block that is short or not aligned: an element a thread, so that it needs no
# more registers than whole blocks do
_ROW_WORDS = tl.constexpr(pointer_table.ROW_WORDS)
_CURRENT_WORDS = tl.constexpr(pointer_table.CURRENT_WORDS)
_HYPER_WORDS = tl.constexpr(pointer_table.HYPER_WORDS)
_ADAMW, _PLAIN, _MOMENTUM, _NESTEROV, _LION = (tl.constexpr(i) for i in range(len(formulas.RULES)))
_OWN, _BF16, _FP16, _SPLIT, _SPLIT8, _NONE = (tl.constexpr(code) for code in range(len(pointer_table.FORMS)))
_STATE_BF16, _STATE_INT8 = tl.constexpr(1), tl.constexpr(2)  # the index in `STATE_FORMATS`


@triton.jit
def power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """``base ** exponent`` of an FP64 scalar by squaring: IEEE products alone, so the same on every device.

    Off by at most about `exponent` units of 2**-53; where that matters the power is small.
    """
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


# The formulas' words. In the interpreter they are plain functions, which it need not rewrite.

_IS_INTERPRETED = not isinstance(power, triton.runtime.JITFunction)


def _inline(function: Callable[..., Any]) -> Any:
    return function if _IS_INTERPRETED else triton.jit(function)


def _bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


def _float_of(pattern: tl.tensor) -> tl.tensor:
    return pattern.to(tl.float32, bitcast=True)


def _half_bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


def _float_of_half(pattern: tl.tensor) -> tl.tensor:
    return pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def _i32(x: tl.tensor) -> tl.tensor:
    return tl.cast(x, tl.int32)


def _u32(x: tl.tensor) -> tl.tensor:
    return tl.cast(x, tl.uint32)


def _shifted(x: tl.tensor, count: tl.constexpr) -> tl.tensor:
    return x >> count


def _where(condition: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.where(condition, a, b)


def _least(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.minimum(a, b)


def _most(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


def _sqrt(x: tl.tensor) -> tl.tensor:
    return tl.sqrt_rn(x)


def _divide(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.div_rn(a, b)


def _root(x: tl.tensor) -> tl.tensor:
    return tl.sqrt(x)


def _multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return a * b + c


def _fma(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return tl.fma(a, b, c)  # the GPU's own instruction, also where the compiler may contract nothing


def _fma_of_the_interpreter(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    # Of Triton's interpreter some versions round twice: the lines of `formulas.fma`.
    product, addend = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    pattern = total.to(tl.int64, bitcast=True)
    away = (error > 0) == (total > 0)
    is_even = ((pattern & 1) == 0) & (tl.abs(error) > 0)
    odd = pattern + tl.where(is_even, tl.where(away, 1, -1), 0)
    return odd.to(tl.float64, bitcast=True).to(tl.float32)


_WORDS = (
    *("bits", "float_of", "half_bits", "float_of_half", "i32", "u32", "shifted"),
    *("where", "least", "most", "sqrt", "divide", "root", "multiply_add"),
)
f = formulas.over(
    {
        **{name: _inline(globals()[f"_{name}"]) for name in _WORDS},
        "fma": _fma_of_the_interpreter if _IS_INTERPRETED else triton.jit(_fma),
        "power": power,
        # What else their source names: Triton looks up annotations, and its interpreter the module.
        **dict.fromkeys(("Any", "Bits", "Pattern", "Value"), tl.tensor),
        "Numbers": tl.tuple,
        "tl": tl,
    },
    _inline,
    f"{__name__}.formulas",
    tl.constexpr,
)
"""The formulas, on blocks."""


class DeviceStepper:
    """The step on a CUDA device, or on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).

    The host waits for nothing. Tables are kept for the lists of rows used last, 32 MiB of them. A step may be
    captured in a CUDA graph, after one of its kind has compiled the kernel.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[object, ...], PointerTable] = OrderedDict()

    @torch.no_grad()
    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Move every row that has a gradient; see `Stepper`."""
        moving = [(hyper, [row for row in rows if row.grad is not None]) for hyper, rows in groups]
        moving = [(hyper, rows) for hyper, rows in moving if rows]
        if not moving:
            return
        with torch.cuda.device_of(moving[0][1][0].weight):
            table = self._table(moving)
            step_kernel[(table.programs,)](
                table.chunks,
                table.rows,
                table.current,
                table.hypers,
                table.tickets,
                multiplier,
                found_inf,
                overflow,
                table.blocks,
                KINDS=table.kinds,
                **OPTIONS,
            )

    def _table(self, groups: Groups) -> PointerTable:
        rows = [row for _, rows in groups for row in rows]
        key = (
            tuple((pointer_table.variant(hyper), len(rows)) for hyper, rows in groups),
            tuple(map(id, rows)),
            tuple([row.grad.dtype for row in rows if row.grad is not None]),
        )
        if rows[0].weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return PointerTable(groups)  # in the graph's own memory, and written again by each replay
        table = self._tables.get(key)
        if table is None:
            self._forget_replaced(rows)
            table = self._tables[key] = PointerTable(groups)
            used = sum(one.nbytes for one in self._tables.values())
            while used > _CACHE_BYTES and len(self._tables) > 1:
                used -= self._tables.popitem(last=False)[1].nbytes
        else:
            self._tables.move_to_end(key)
            table.refresh(groups)
        return table

    def _forget_replaced(self, rows: list[Row]) -> None:
        """Tables hold on to their rows, and those to a parameter's states: not to the ones before a loaded state."""
        now = {row.ordinal: row for row in rows}
        for key, table in list(self._tables.items()):
            if any(now.get(row.ordinal, row) is not row for row in table.owner):
                del self._tables[key]


_POINTERS = ["chunks", "rows", "current", "hypers", "tickets", "multiplier", "found_inf", "overflow"]


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=_POINTERS)
def step_kernel(
    chunks: tl.tensor,
    rows: tl.tensor,
    current: tl.tensor,
    hypers: tl.tensor,
    tickets: tl.tensor,
    multiplier: tl.tensor,
    found_inf: tl.tensor,
    overflow: tl.tensor,
    blocks: tl.tensor,
    KINDS: tl.constexpr,
) -> None:
    """One program's blocks of one parameter.

    Args:
        chunks, rows, current, hypers, tickets: the tables of `PointerTable`.
        multiplier, found_inf, overflow: FP32 scalars in memory, or None.
        blocks: how many blocks a program takes.
        KINDS: the kinds of rows that there are, see `pointer_table.kind`.
    """
    is_live = True
    if found_inf is not None:
        is_live = tl.load(found_inf) == 0
    if is_live:
        scale = 1.0
        if multiplier is not None:
            scale = tl.load(multiplier)
        _blocks_of_row(chunks, rows, current, hypers, tickets, scale, overflow, blocks, KINDS)


@triton.jit
def _blocks_of_row(
    chunks: tl.tensor,
    rows: tl.tensor,
    current: tl.tensor,
    hypers: tl.tensor,
    tickets: tl.tensor,
    scale: tl.tensor,
    overflow: tl.tensor,
    blocks: tl.tensor,
    KINDS: tl.constexpr,
) -> None:
    chunk = tl.load(chunks + tl.program_id(0))
    number = (chunk >> 32).to(tl.int32)
    first = chunk.to(tl.int32)
    row = rows + number * _ROW_WORDS
    moving = current + number * _CURRENT_WORDS
    is_aligned = tl.load(moving + 2) != 0
    numel = tl.load(row + 6)
    ordinal = tl.load(row + 7)
    kind = tl.load(row + 8)
    hyper = hypers + tl.load(row + 9) * _HYPER_WORDS

    step = (tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32))) + 1.0).to(tl.int32)
    RULE: tl.constexpr = KINDS[0] // 128 % 8  # all are of one optimizer
    numbers = (
        tl.load(hyper + 1),
        tl.load(hyper + 2),
        tl.load(hyper + 3),
        tl.load(hyper + 4),
        tl.load(hyper + 5),
        tl.load(hyper + 6),
        tl.load(hyper + 7),
    )
    if RULE == _ADAMW:
        numbers = f.adam_constants(numbers, step)
    elif RULE != _LION:
        numbers = f.sgd_constants(numbers, step)
    c0, c1, c2, c3, c4, c5, c6 = numbers
    c = (
        c0.to(tl.float32),
        c1.to(tl.float32),
        c2.to(tl.float32),
        c3.to(tl.float32),
        c4.to(tl.float32),
        c5.to(tl.float32),
        c6.to(tl.float32),
    )
    l2 = tl.load(hyper).to(tl.float32)
    step_key = f.noise_key(step, ordinal, 0)
    weight_key = f.noise_key(step, ordinal, 1)
    at = (row, moving)

    blocks_of_row = tl.maximum(tl.cdiv(numel, _BLOCK), 1).to(tl.int32)
    infinite = tl.zeros((_BLOCK // 64, 16), tl.int32)
    for at_block in range(first, tl.minimum(first + blocks, blocks_of_row)):
        start = tl.cast(at_block, tl.int64) * _BLOCK
        is_plain = is_aligned & (start + _BLOCK <= numel)
        for i in tl.static_range(len(KINDS)):
            if len(KINDS) == 1 or kind == i:
                if is_plain:
                    found = _move(at, start, numel, step_key, weight_key, c, l2, scale, KINDS[i], True)
                    infinite |= tl.max(tl.reshape(found.to(tl.int32), (_BLOCK // 64, 16, 4)), axis=2)
                else:
                    for part in range(tl.cdiv(tl.minimum(numel - start, _BLOCK), _PART)):
                        odd = _move(
                            at,
                            start + part * _PART,
                            numel,
                            step_key,
                            weight_key,
                            c,
                            l2,
                            scale,
                            KINDS[i],
                            False,
                        )
                        _report(odd, overflow)
    _report(infinite, overflow)

    tl.debug_barrier()
    # Read again: kept through the loop, size and count would cost registers.
    blocks_of_row = tl.maximum(tl.cdiv(tl.load(row + 6), _BLOCK), 1).to(tl.int32)
    if tl.atomic_add(tickets + number, 1) == tl.cdiv(blocks_of_row, blocks) - 1:
        steps = tl.load(row + 5).to(tl.pointer_type(tl.float32))
        tl.store(tickets + number, 0)
        tl.store(steps, tl.load(steps) + 1.0)


@triton.jit
def _report(infinite: tl.tensor, overflow: tl.tensor) -> None:
    if overflow is not None:  # noqa: SIM102, a condition on values is compiled even after a false one
        if tl.max(tl.max(infinite.to(tl.int32), axis=1), axis=0) > 0:
            tl.store(overflow, 1.0)


@triton.jit
def _move(
    at: tl.tuple,
    start: tl.tensor,
    numel: tl.tensor,
    step_key: tl.tensor,
    weight_key: tl.tensor,
    c: tl.tuple,
    l2: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """One block of one kind; `PLAIN` is a whole one at aligned addresses."""
    MASTERS: tl.constexpr = KIND % 8
    STATE: tl.constexpr = KIND // 8 % 4
    GRAD: tl.constexpr = KIND // 32 % 4
    RULE: tl.constexpr = KIND // 128 % 8
    HAS_L2: tl.constexpr = KIND // 1024 % 2
    MAXIMIZES: tl.constexpr = KIND // 2048
    HAS_FIRST: tl.constexpr = RULE != _PLAIN
    HAS_SECOND: tl.constexpr = RULE == _ADAMW
    row, moving = at
    # Read again for each block, from the cache: kept, they would cost 14 registers.
    weight = tl.load(moving)
    grad = tl.load(moving + 1)
    master = tl.load(row)
    state0 = tl.load(row + 1)
    state1 = tl.load(row + 2)
    scale0 = tl.load(row + 3)
    scale1 = tl.load(row + 4)
    groups = tl.arange(0, (_BLOCK if PLAIN else _PART) // 64)
    index = groups[:, None] * 64 + tl.arange(0, 64)[None, :]
    here = (start, index, index < numel - start)
    scales_here = (start // 64, groups, groups * 64 < numel - start)

    # All that is read, before anything waits for it.
    g = block.load_float(grad, here, GRAD, PLAIN)
    w = block.load(weight, here, tl.float32 if MASTERS == _OWN else tl.int16, PLAIN)
    kept = 0
    if MASTERS == _BF16 or MASTERS == _FP16:  # noqa: SIM109, there is no `in` in Triton
        kept = block.load(master, here, tl.float32, PLAIN)
    elif MASTERS == _SPLIT:
        kept = block.load(master, here, tl.int16, PLAIN)
    elif MASTERS == _SPLIT8:
        kept = block.load(master, here, tl.int8, PLAIN)
    m = _load_state(state0, scale0, here, scales_here, HAS_FIRST, tl.int8, STATE, PLAIN)
    v = _load_state(state1, scale1, here, scales_here, HAS_SECOND, tl.uint8, STATE, PLAIN)

    w = _decode_master(w, kept, MASTERS)
    g = block.decode_float(g, GRAD) * scale
    if MAXIMIZES:
        g = g * -1.0
    if HAS_L2:
        g = f.coupled(w, g, l2)
    if HAS_FIRST:
        m = _decode_state(m, True, STATE)
    else:
        m = g
    if HAS_SECOND:
        v = _decode_state(v, False, STATE)
    else:
        v = g

    if RULE == _ADAMW:
        w, m, v = f.adamw(w, g, m, v, c)
    elif RULE == _PLAIN:
        w, m, v = f.plain(w, g, m, v, c)
    elif RULE == _MOMENTUM:
        w, m, v = f.momentum(w, g, m, v, c)
    elif RULE == _NESTEROV:
        w, m, v = f.nesterov(w, g, m, v, c)
    else:
        w, m, v = f.lion(w, g, m, v, c)

    place = f.place(start.to(tl.uint32) + index.to(tl.uint32))
    word = f.noise(step_key, place)
    if HAS_FIRST:
        _store_state(m, f.first_noise(word), state0, scale0, here, scales_here, True, STATE, PLAIN)
    if HAS_SECOND:
        _store_state(v, f.second_noise(word), state1, scale1, here, scales_here, False, STATE, PLAIN)
    if MASTERS == _NONE:
        noise = f.weight_noise(f.noise(weight_key, place))
    else:
        noise = f.remainder_noise(word)
    return _store_master(w, noise, weight, master, here, MASTERS, PLAIN)


@triton.jit
def _decode_master(weight: tl.tensor, kept: tl.tensor, MASTERS: tl.constexpr) -> tl.tensor:
    if MASTERS == _OWN:
        return weight
    elif MASTERS == _BF16:
        return f.decode_bf16(weight.to(tl.int32), kept)
    elif MASTERS == _FP16:
        return f.decode_fp16(weight.to(tl.int32), kept)
    elif MASTERS == _SPLIT:
        return f.decode_split(weight.to(tl.int32), kept.to(tl.int32))
    elif MASTERS == _SPLIT8:
        return f.decode_split8(weight.to(tl.int32), kept.to(tl.int32))
    else:
        return f.decode_none(weight.to(tl.int32), 0)


@triton.jit
def _store_master(
    w: tl.tensor,
    noise: tl.tensor,
    weight: tl.tensor,
    master: tl.tensor,
    here: tl.tuple,
    MASTERS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """Where the weight was stored as an infinity in 16 bits."""
    if MASTERS == _OWN:
        block.store(weight, w, here, tl.float32, PLAIN)
        return tl.zeros(w.shape, tl.int1)
    else:
        if MASTERS == _BF16:
            high, kept = f.encode_bf16(w, noise)
            block.store(master, kept, here, tl.float32, PLAIN)
        elif MASTERS == _FP16:
            high, kept = f.encode_fp16(w, noise)
            block.store(master, kept, here, tl.float32, PLAIN)
        elif MASTERS == _SPLIT:
            high, kept = f.encode_split(w, noise)
            block.store(master, kept, here, tl.int16, PLAIN)
        elif MASTERS == _SPLIT8:
            high, kept = f.encode_split8(w, noise)
            block.store(master, kept, here, tl.int8, PLAIN)
        else:
            high, kept = f.encode_none(w, noise)
        block.store(weight, high, here, tl.int16, PLAIN)
        if not PLAIN:
            _, _, mask = here
            high = tl.where(mask, high, 0)
        return (high & 0x7FFF) == (0x7C00 if MASTERS == _FP16 else 0x7F80)


@triton.jit
def _load_state(
    address: tl.tensor,
    scale: tl.tensor,
    here: tl.tuple,
    scales_here: tl.tuple,
    EXISTS: tl.constexpr,
    CODE: tl.constexpr,
    STATE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tuple:
    """What is in memory, if anything: values, bf16 patterns, or codes with their scales' patterns."""
    if not EXISTS:
        return 0.0, 0
    elif STATE == _STATE_INT8:
        return block.load(address, here, CODE, PLAIN), block.load(scale, scales_here, tl.int16, False)
    elif STATE == _STATE_BF16:
        return block.load(address, here, tl.int16, PLAIN), 0
    else:
        return block.load(address, here, tl.float32, PLAIN), 0


@triton.jit
def _decode_state(stored: tl.tuple, SIGNED: tl.constexpr, STATE: tl.constexpr) -> tl.tensor:
    """The FP32 values of what `_load_state` gave."""
    value, scale = stored
    if STATE == _STATE_INT8:
        of_group = f.decode_none(scale.to(tl.int32), 0)[:, None]
        if SIGNED:
            return f.decode_signed(value.to(tl.int32), of_group)
        else:
            return f.decode_unsigned(value.to(tl.int32), of_group)
    elif STATE == _STATE_BF16:
        return f.decode_none(value.to(tl.int32), 0)
    else:
        return value


@triton.jit
def _store_state(
    value: tl.tensor,
    noise: tl.tensor,
    address: tl.tensor,
    scale: tl.tensor,
    here: tl.tuple,
    scales_here: tl.tuple,
    SIGNED: tl.constexpr,
    STATE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Write FP32 values in the state's format; noise from 0 to 2**20 - 1, which FP32 does not use."""
    if STATE == _STATE_INT8:
        if not PLAIN:
            _, _, mask = here
            value = tl.where(mask, value, 0.0)  # elements beyond the end have no say in their group's scale
        largest = tl.max(f.magnitude(value), axis=1)
        value = f.cut(value, largest[:, None])
        inverse = f.group_inverse(largest)[:, None]
        if SIGNED:
            codes = f.encode_signed(value, inverse, noise)
        else:
            codes = f.encode_unsigned(value, inverse, noise)
        block.store(address, codes, here, tl.uint8, PLAIN)
        block.store(scale, f.group_scale(largest), scales_here, tl.int16, False)
    elif STATE == _STATE_BF16:
        block.store(address, f.encode_moment(value, noise), here, tl.int16, PLAIN)
    else:
        block.store(address, value, here, tl.float32, PLAIN)
