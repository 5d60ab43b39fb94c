"""The step in Triton: one launch for all parameters of a device, whatever their shapes and storage.

Each program finds its work in tables on the device (`pointer_table`): which parameter, which blocks of 1024
elements. Storage formats and variants of a rule are compile-time constants: `KINDS` lists the combinations that
occur, each gets its own straight code, and a program jumps to its row's; in most models there is one and no jump.
Learning rates and the like are table entries, so that a scheduler recompiles nothing.

**Bits**: the lines of `reference.py`, IEEE division and root, and no contraction (`enable_fp_fusion=False`) but
for the rules' own `fma`. The bias corrections are powers by squaring, where the reference has the C library's: both
in FP64, rounded to FP32 once, so that they should differ in about one of a million steps, by one FP32 ulp.

**Steps** are counted on the device. All programs of a row read the count, so only the last of them to have read
it may write the new one. Which is last an atomic ticket tells, one a row; the barrier before it is what makes the
ticket speak for all warps of its program. A second launch would cost more than the ticket does.

**Speed**, reasoned for an H100 or H200 (132 SMs, 3.4 or 4.8 TB/s) and not yet measured: with 700 ns of latency, 18
to 26 KB have to be under way in each SM. A program of 8 warps has 4 elements a thread: FP32 moves in vectors of 16
bytes, bf16 of 8, and every warp in whole 128-byte lines. The loads of a block come before anything that uses them:
14 KB for AdamW with split masters and bf16 gradients. 64 registers a thread let four programs into an SM: 57 KB,
or 28 KB where everything has 8 bits and ten words of a thread spill. With 8 elements a thread bf16 would move 16
bytes, but Triton then passes FP32 results through shared memory, and waits at barriers, before it stores them. A
short or unaligned block is done 256 elements at a time, one a thread, so that it needs no more registers than a
whole one. A program takes up to 16 blocks, which spreads its prologue (three dependent reads, the bias correction)
and its ticket over them. An AdamW element takes about 57 machine instructions with FP32 everywhere, 90 with split
masters, fewer than 185 with all in 8 bits, of some 30e12 a second: so the last should be bound by them, at about
the time of the second, and the others by memory.
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
from mezzo.pytorch.kernels.optimizer_step import Groups, Row, pointer_table
from mezzo.pytorch.kernels.optimizer_step import triton_rules as rules
from mezzo.pytorch.kernels.optimizer_step import triton_storage as storage
from mezzo.pytorch.kernels.optimizer_step.pointer_table import Group, PointerTable
from mezzo.pytorch.kernels.optimizer_step.rules import AdamHyper, LionHyper, SgdHyper

OPTIONS: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "maxnreg": 64, "enable_fp_fusion": False})
"""How `step_kernel` must be compiled."""

# Settings -> the rule's number, and what makes its variant and its constants of them.
_RULES: Mapping[type, tuple[int, Callable[[Any], int], Callable[[Any], tuple[float, ...]]]] = (
    MappingProxyType(
        {
            AdamHyper: (0, rules.adam_variant, rules.adam_packed),
            SgdHyper: (1, rules.sgd_variant, rules.sgd_packed),
            LionHyper: (2, rules.lion_variant, rules.lion_packed),
        }
    )
)
_CACHE_BYTES = 32 << 20

_ADAM, _SGD = tl.constexpr(0), tl.constexpr(1)
_BLOCK = tl.constexpr(pointer_table.BLOCK)
_PART = tl.constexpr(256)  # of a block that is short or not aligned: an element a thread, so that it needs no
# more registers than whole blocks do
_ROW_WORDS = tl.constexpr(pointer_table.ROW_WORDS)
_CURRENT_WORDS = tl.constexpr(pointer_table.CURRENT_WORDS)
_HYPER_WORDS = tl.constexpr(pointer_table.HYPER_WORDS)
_OWN, _FP32_BF16, _FP32_FP16, _SPLIT, _SPLIT8, _NONE = (
    tl.constexpr(code)
    for code in (
        pointer_table.OWN,
        pointer_table.FP32_BF16,
        pointer_table.FP32_FP16,
        pointer_table.SPLIT,
        pointer_table.SPLIT8,
        pointer_table.NONE,
    )
)
_L2, _MAXIMIZE, _MOMENTUM, _NESTEROV = (tl.constexpr(bit) for bit in (1, 2, 4, 8))


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
        number, variant, packed = _RULES[type(moving[0][0])]
        wanted = [Group(rows, variant(hyper), packed(hyper)) for hyper, rows in moving]
        with torch.cuda.device_of(moving[0][1][0].weight):
            table = self._table(wanted)
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
                RULE=number,
                KINDS=table.kinds,
                **OPTIONS,
            )

    def _table(self, groups: list[Group]) -> PointerTable:
        rows = [row for group in groups for row in group.rows]
        key = (
            tuple((group.variant, len(group.rows)) for group in groups),
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
    RULE: tl.constexpr,
    KINDS: tl.constexpr,
) -> None:
    """One program's blocks of one parameter.

    Args:
        chunks, rows, current, hypers, tickets: the tables of `PointerTable`.
        multiplier, found_inf, overflow: FP32 scalars in memory, or None.
        blocks: how many blocks a program takes.
        RULE: the number of the update rule.
        KINDS: the kinds of rows that there are, see `pointer_table.kind`.
    """
    is_live = True
    if found_inf is not None:
        is_live = tl.load(found_inf) == 0
    if is_live:
        scale = 1.0
        if multiplier is not None:
            scale = tl.load(multiplier)
        _blocks_of_row(chunks, rows, current, hypers, tickets, scale, overflow, blocks, RULE, KINDS)


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
    RULE: tl.constexpr,
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

    moved = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32))) + 1.0
    step = moved.to(tl.int32)
    if RULE == _ADAM:
        c = rules.adam_constants(hyper, step)
    elif RULE == _SGD:
        c = rules.sgd_constants(hyper, step)
    else:
        c = rules.lion_constants(hyper, step)
    step_key = storage.noise_key(step, ordinal, 0)
    weight_key = storage.noise_key(step, ordinal, 1)
    at = (row, moving)

    blocks_of_row = tl.maximum(tl.cdiv(numel, _BLOCK), 1).to(tl.int32)
    infinite = tl.zeros((_BLOCK // 64, 16), tl.int32)
    for at_block in range(first, tl.minimum(first + blocks, blocks_of_row)):
        start = tl.cast(at_block, tl.int64) * _BLOCK
        is_plain = is_aligned & (start + _BLOCK <= numel)
        for i in tl.static_range(len(KINDS)):
            if len(KINDS) == 1 or kind == i:
                if is_plain:
                    found = _move(at, start, numel, step_key, weight_key, c, scale, RULE, KINDS[i], True)
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
                            scale,
                            RULE,
                            KINDS[i],
                            False,
                        )
                        _report(odd, overflow)
    _report(infinite, overflow)

    programs = tl.cdiv(blocks_of_row, blocks)
    tl.debug_barrier()
    if tl.atomic_add(tickets + number, 1) == programs - 1:
        tl.store(tickets + number, 0)
        tl.store(tl.load(row + 5).to(tl.pointer_type(tl.float32)), moved)


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
    scale: tl.tensor,
    RULE: tl.constexpr,
    KIND: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """One block of one kind; `PLAIN` is a whole one at aligned addresses."""
    MASTERS: tl.constexpr = KIND % 8
    STATE: tl.constexpr = KIND // 8 % 4
    GRAD: tl.constexpr = KIND // 32 % 4
    VARIANT: tl.constexpr = KIND // 128
    HAS_FIRST: tl.constexpr = RULE != _SGD or (_MOMENTUM & VARIANT) != 0
    HAS_SECOND: tl.constexpr = RULE == _ADAM
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
    if MASTERS == _FP32_BF16 or MASTERS == _FP32_FP16:  # noqa: SIM109, there is no `in` in Triton
        kept = block.load(master, here, tl.float32, PLAIN)
    elif MASTERS == _SPLIT:
        kept = block.load(master, here, tl.int16, PLAIN)
    elif MASTERS == _SPLIT8:
        kept = block.load(master, here, tl.int8, PLAIN)
    m = storage.load_state(state0, scale0, here, scales_here, HAS_FIRST, STATE, PLAIN)
    v = storage.load_state(state1, scale1, here, scales_here, HAS_SECOND, STATE, PLAIN)

    w = _decode_master(w, kept, MASTERS)
    g = block.decode_float(g, GRAD) * scale
    if _MAXIMIZE & VARIANT:
        g = g * -1.0
    if HAS_FIRST:
        m = storage.decode_state(m, True, STATE)
    if HAS_SECOND:
        v = storage.decode_state(v, False, STATE)

    if RULE == _ADAM:
        w, m, v = rules.adam_update(w, g, m, v, c, (_L2 & VARIANT) != 0)
    elif RULE == _SGD:
        w, m = rules.sgd_update(w, g, m, c, (_L2 & VARIANT) != 0, HAS_FIRST, (_NESTEROV & VARIANT) != 0)
    else:
        w, m = rules.lion_update(w, g, m, c)

    position = start.to(tl.uint32) + index.to(tl.uint32)
    bits = storage.noise_bits(step_key, position)
    if HAS_FIRST:
        storage.store_state(
            m, storage.first_noise(bits), state0, scale0, here, scales_here, True, STATE, PLAIN
        )
    if HAS_SECOND:
        storage.store_state(
            v, storage.second_noise(bits), state1, scale1, here, scales_here, False, STATE, PLAIN
        )
    if MASTERS == _NONE:
        bits = storage.noise_bits(weight_key, position)
    return _store_master(w, bits, weight, master, here, MASTERS, PLAIN)


@triton.jit
def _decode_master(weight: tl.tensor, kept: tl.tensor, MASTERS: tl.constexpr) -> tl.tensor:
    if MASTERS == _OWN:
        return weight
    else:
        high = weight.to(tl.int32)
        if MASTERS == _FP32_BF16:
            return storage.refreshed(kept, high, True)
        elif MASTERS == _FP32_FP16:
            return storage.refreshed(kept, high, False)
        elif MASTERS == _SPLIT:
            return storage.decode_split(high, kept.to(tl.int32))
        elif MASTERS == _SPLIT8:
            return storage.decode_split8(high, kept.to(tl.int32))
        else:
            return storage.decode_bf16(high)


@triton.jit
def _store_master(
    w: tl.tensor,
    noise_bits: tl.tensor,
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
        if MASTERS == _FP32_BF16 or MASTERS == _FP32_FP16:  # noqa: SIM109
            high = storage.encode_nearest(w, MASTERS == _FP32_BF16)
            block.store(master, w, here, tl.float32, PLAIN)
        elif MASTERS == _SPLIT:
            high, low = storage.encode_split(w)
            block.store(master, low, here, tl.int16, PLAIN)
        elif MASTERS == _SPLIT8:
            high, low = storage.encode_split8(w, storage.remainder_noise(noise_bits))
            block.store(master, low, here, tl.int8, PLAIN)
        else:
            high = storage.encode_stochastic(w, storage.weight_noise(noise_bits))
        block.store(weight, high, here, tl.int16, PLAIN)
        if not PLAIN:
            _, _, mask = here
            high = tl.where(mask, high, 0)
        return storage.is_infinite(high, MASTERS != _FP32_FP16)
