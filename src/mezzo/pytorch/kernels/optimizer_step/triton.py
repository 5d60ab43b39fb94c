"""The step in Triton: one launch for all parameters of a device, of any shapes and storage.

Each program reads from the tables which parameter and which blocks of 1024 elements to process. `KINDS` lists the
storage formats and rules that occur, each compiled to straight code. Settings are table entries: no recompilation.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.pytorch.dtypes import FLOATS
from mezzo.pytorch.kernels import block
from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, address, form, formulas

# How `step_kernel` must be compiled: IEEE arithmetic without contraction, and four programs of 256 threads per SM.
# (Speed is estimated for a Hopper: FP32 moves in vectors of 16 bytes, all loads of a block come before their first
# use.)
OPTIONS: Mapping[str, Any] = MappingProxyType({"num_warps": 8, "maxnreg": 64, "enable_fp_fusion": False})

BLOCK = 1024  # elements that a program processes at a time: 16 groups of 64
ROW_WORDS = 11
CURRENT_WORDS = 3
HYPER_WORDS = 8
_MOST_BLOCKS = 16  # per program

_TABLES = 1024  # cached by one stepper: with gradient release every parameter has its own

_BLOCK = tl.constexpr(BLOCK)
_PART = tl.constexpr(256)  # elements of a short or unaligned block at a time: one per thread
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_CURRENT_WORDS = tl.constexpr(CURRENT_WORDS)
_HYPER_WORDS = tl.constexpr(HYPER_WORDS)
_ADAMW, _PLAIN = (tl.constexpr(formulas.RULES.index(rule)) for rule in ("adamw", "plain"))
_OWN, _FP16, _NONE = (tl.constexpr(formulas.FORMS.index(form)) for form in ("own", "fp16", "none"))

# By the index of a form of masters, of a state's format and of a codec: types in memory, codecs, whether with scales.
_KEPT_TYPES = tl.constexpr(
    tuple(getattr(tl, kept) if kept else None for kept in formulas.kept_types.values())
)
_CODES = tuple(formulas.codecs)
_CODE_TYPES = tl.constexpr(tuple(getattr(tl, memory) for memory in formulas.codecs.values()))
_SIGNED = tl.constexpr(tuple(_CODES.index(how.signed) for how in formulas.state_formats.values()))
_UNSIGNED = tl.constexpr(tuple(_CODES.index(how.unsigned) for how in formulas.state_formats.values()))
_IS_SCALED = tl.constexpr(tuple(how.is_scaled for how in formulas.state_formats.values()))

# The names of the functions by the index of a rule, a form and a codec. Triton does not see which functions a kernel
# calls by `getattr`, so the source of all of them is a part of this table, and so of the key in Triton's cache.
_RULES = tl.constexpr((*formulas.RULES, hashlib.sha256(inspect.getsource(formulas).encode()).hexdigest()))
_CONSTANTS = tl.constexpr(tuple(function.__name__ for function in formulas.constants_of.values()))
_DECODE, _ENCODE = (tl.constexpr(tuple(map(verb.__add__, formulas.FORMS))) for verb in ("decode_", "encode_"))
_VALUE, _CODE = (tl.constexpr(tuple(map(verb.__add__, formulas.codecs))) for verb in ("value_", "code_"))


@triton.jit
def power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """``base ** exponent`` of an FP64 scalar by squaring, the same on every device; error about `exponent` * 2**-53."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


# The formulas' primitives. In the interpreter they are plain functions, which it need not rewrite, and those that
# Triton has are looked up at each call, because the interpreter replaces them while a kernel runs.

_IS_INTERPRETED = not isinstance(power, triton.runtime.JITFunction)


def _inline(function: Callable[..., Any]) -> Any:
    return function if _IS_INTERPRETED else triton.jit(function)


def _builtin(name: str) -> Any:
    return (lambda *args: getattr(tl, name)(*args)) if _IS_INTERPRETED else getattr(tl, name)


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


_OWN_PRIMITIVES = (_bits, _float_of, _half_bits, _float_of_half, _i32, _u32, _shifted)
_BUILTINS = {"where": "where", "least": "minimum", "most": "maximum", "sqrt": "sqrt_rn", "divide": "div_rn"}
f = formulas.over(
    {
        **{own.__name__.removeprefix("_"): _inline(own) for own in _OWN_PRIMITIVES},
        **{name: _builtin(of_triton) for name, of_triton in _BUILTINS.items()},
        "root": _builtin("sqrt"),
        # tl.fma is the GPU's own instruction, also where the compiler may contract nothing.
        "fma": _builtin("fma"),
        "power": power,
        # Triton looks up annotations, and its interpreter the module.
        **dict.fromkeys(("Any", "Bits", "Pattern", "Value"), tl.tensor),
        "Numbers": tl.tuple,
        "tl": tl,
    },
    _inline,
    f"{__name__}.formulas",
    tl.constexpr,
)


def _variant(hyper: Hyper) -> int:
    """The code that settings need, as a number: ``rule + 8 * has an L2 term + 16 * maximize``."""
    return formulas.RULES.index(hyper.rule) + 8 * (hyper.l2 != 0) + 16 * hyper.maximize


def kind_of(row: Row, hyper: Hyper) -> int:
    """The code that a row needs, as a number: ``masters + 8 * state + 64 * gradient + 256 * variant``."""
    masters = formulas.FORMS.index(form(row.masters, row.weight.dtype))
    state = tuple(formulas.state_formats).index(row.state)
    return masters + 8 * state + 64 * FLOATS.index(_grad(row).dtype) + 256 * _variant(hyper)


class PointerTable:
    """The tables for at least one row, each with a gradient of a certain dtype, all on one device, in one int64 buffer.

    `current` (addresses of weights and gradients, settings) is copied only if it changed, asynchronously from pinned
    memory. A word of `chunks` is one program's work: the parameter's line in the upper half, its first block below.
    """

    def __init__(self, groups: Groups) -> None:
        self.owner = [row for _, rows in groups for row in rows]
        self.device = self.owner[0].weight.device
        kinds = [kind_of(row, hyper) for hyper, rows in groups for row in rows]
        of_group = [i for i, (_, rows) in enumerate(groups) for _ in rows]
        self.kinds = tuple(sorted(set(kinds)))
        blocks = [max(1, -(-row.weight.numel() // BLOCK)) for row in self.owner]
        self.blocks = _blocks_a_program(sum(blocks), self.device)

        self._fixed_aligned = np.array(
            [all(address(each) % 16 == 0 for each in (row.master, *row.states)) for row in self.owner]
        )
        self._now = self._read(groups)
        rows = [
            (*_fixed(row), self.kinds.index(code), group, row.offset)
            for row, code, group in zip(self.owner, kinds, of_group)
        ]
        chunks = np.concatenate(
            [(i << 32) + np.arange(0, n, self.blocks, dtype=np.int64) for i, n in enumerate(blocks)]
        )
        parts = self._now, np.array(rows, dtype=np.int64).ravel(), chunks
        self._buffer = self._pinned(np.concatenate(parts)).to(self.device, non_blocking=True)
        self.current, self.rows, self.chunks = self._buffer.split([len(part) for part in parts])
        self.hypers = self.current[CURRENT_WORDS * len(self.owner) :].view(torch.float64)
        self.programs = len(chunks)
        self.tickets = torch.zeros(len(self.owner), dtype=torch.int32, device=self.device)

    def refresh(self, groups: Groups) -> None:
        """Bring `current` up to date, in stream order, without waiting for the device."""
        now = self._read(groups)
        if not np.array_equal(now, self._now):
            self.current.copy_(self._pinned(now), non_blocking=True)
            self._now = now

    def _read(self, groups: Groups) -> np.ndarray:
        """The present content of `current`."""
        addresses = np.empty((len(self.owner), CURRENT_WORDS), dtype=np.int64)
        addresses[:, 0] = [row.weight.data_ptr() for row in self.owner]
        addresses[:, 1] = [_grad(row).data_ptr() for row in self.owner]
        addresses[:, 2] = self._fixed_aligned & ((addresses[:, 0] | addresses[:, 1]) & 15 == 0)
        numbers = np.zeros((len(groups), HYPER_WORDS))
        for line, (hyper, _) in zip(numbers, groups):
            line[:] = (hyper.l2, *hyper.numbers)
        return np.concatenate([addresses.ravel(), numbers.view(np.int64).ravel()])

    def _pinned(self, words: np.ndarray) -> Tensor:
        # PyTorch reuses pinned memory only after copies from it are done; in a CUDA graph, never.
        host = torch.from_numpy(words)
        return host.pin_memory() if self.device.type == "cuda" else host.clone()


def _grad(row: Row) -> Tensor:
    assert row.grad is not None  # rows without one were left out
    return row.grad


def _fixed(row: Row) -> tuple[int, ...]:
    states, scales = [*row.states, None, None], [*row.scales, None, None]
    tensors = (row.master, states[0], states[1], scales[0], scales[1], row.step)
    return (*(address(tensor) for tensor in tensors), row.weight.numel(), row.ordinal)


def _blocks_a_program(blocks: int, device: torch.device) -> int:
    """Blocks per program that leave four rounds of programs, five resident per SM, so that the last round is short."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    return min(max(1, blocks // (20 * processors)), _MOST_BLOCKS)


class DeviceStepper:
    """The step on a CUDA device or in Triton's interpreter, without a wait; a compiled one can be in a CUDA graph."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], PointerTable] = {}

    @torch.no_grad()
    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Update every row that has a gradient; see `Stepper`."""
        moving = [(hyper, [row for row in rows if row.grad is not None]) for hyper, rows in groups]
        moving = [(hyper, rows) for hyper, rows in moving if rows]
        if not moving:
            return
        with torch.cuda.device_of(moving[0][1][0].weight):
            table = self._table(moving)
            arrays = table.chunks, table.rows, table.current, table.hypers, table.tickets
            scalars = multiplier, found_inf, overflow, table.blocks
            step_kernel[(table.programs,)](*arrays, *scalars, KINDS=table.kinds, **OPTIONS)

    def _table(self, groups: Groups) -> PointerTable:
        rows = [row for _, rows in groups for row in rows]
        key = (
            tuple((_variant(hyper), len(rows)) for hyper, rows in groups),
            tuple(map(id, rows)),
            tuple([row.grad.dtype for row in rows if row.grad is not None]),
        )
        if rows[0].weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return PointerTable(groups)  # in the graph's memory, written again by each replay
        table = self._tables.get(key)
        if table is None:
            # Rows that were replaced would keep the old states alive.
            now = {row.ordinal: row for row in rows}
            known = [row for table in self._tables.values() for row in table.owner]
            if len(self._tables) >= _TABLES or any(now.get(row.ordinal, row) is not row for row in known):
                self._tables.clear()
            table = self._tables[key] = PointerTable(groups)
        else:
            table.refresh(groups)
        return table


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
    """One program's `blocks` of one parameter; the tables are those of `PointerTable`, KINDS their kinds of rows."""
    is_live = True
    if found_inf is not None:
        is_live = tl.load(found_inf) == 0
    if is_live:
        scale = 1.0
        if multiplier is not None:
            scale = tl.load(multiplier)
        _blocks_of_row((chunks, rows, current, hypers, tickets), scale, overflow, blocks, KINDS)


@triton.jit
def _blocks_of_row(
    table: tl.tuple, scale: tl.tensor, overflow: tl.tensor, blocks: tl.tensor, KINDS: tl.constexpr
) -> None:
    chunks, rows, current, hypers, tickets = table
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
    RULE: tl.constexpr = KINDS[0] // 256 % 8  # all are of one optimizer
    numbers = [tl.load(hyper + i) for i in (1, 2, 3, 4, 5, 6, 7)]
    numbers = getattr(f, _CONSTANTS[RULE])(numbers, step)
    constants = [each.to(tl.float32) for each in numbers]  # in Triton the variable outlives the brackets
    l2 = tl.load(hyper).to(tl.float32)
    offset = tl.load(row + 10)
    step_key = f.key_from(f.noise_key(step, ordinal, 0), offset)
    weight_key = f.key_from(f.noise_key(step, ordinal, 1), offset)
    given = (row, moving, step_key, weight_key, constants, l2, scale)

    blocks_of_row = tl.maximum(tl.cdiv(numel, _BLOCK), 1).to(tl.int32)
    infinite = tl.zeros((_BLOCK // 64, 16), tl.int32)
    for at_block in range(first, tl.minimum(first + blocks, blocks_of_row)):
        start = tl.cast(at_block, tl.int64) * _BLOCK
        is_plain = is_aligned & (start + _BLOCK <= numel)
        for i in tl.static_range(len(KINDS)):
            if len(KINDS) == 1 or kind == i:
                if is_plain:
                    found = _update(given, start, numel, KINDS[i], True)
                    infinite |= tl.max(tl.reshape(found.to(tl.int32), (_BLOCK // 64, 16, 4)), axis=2)
                else:
                    for part in range(tl.cdiv(tl.minimum(numel - start, _BLOCK), _PART)):
                        odd = _update(given, start + part * _PART, numel, KINDS[i], False)
                        _report(odd, overflow)
    _report(infinite, overflow)

    # All programs of a row read its step count, so only the last to have read it may write the new one: a ticket per
    # row determines it, after a barrier for all warps of the program. A second launch would cost more.
    tl.debug_barrier()
    # Loaded again, because size and count would take registers during the loop.
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
def _update(
    given: tl.tuple, start: tl.tensor, numel: tl.tensor, KIND: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tensor:
    """Update one block of one kind; `PLAIN` for a whole, aligned one. Returns where weights are infinite."""
    MASTERS: tl.constexpr = KIND % 8
    STATE: tl.constexpr = KIND // 8 % 8
    GRAD: tl.constexpr = KIND // 64 % 4
    RULE: tl.constexpr = KIND // 256 % 8
    HAS_L2: tl.constexpr = KIND // 2048 % 2
    MAXIMIZES: tl.constexpr = KIND // 4096
    FIRST: tl.constexpr = _SIGNED[STATE]
    SECOND: tl.constexpr = _UNSIGNED[STATE]
    SCALED: tl.constexpr = _IS_SCALED[STATE]
    HAS_FIRST: tl.constexpr = RULE != _PLAIN
    HAS_SECOND: tl.constexpr = RULE == _ADAMW
    row, moving, step_key, weight_key, constants, l2, scale = given
    # Loaded again for each block, from the cache, because they would take 14 registers.
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

    # All loads come before their first use.
    g = block.load_float(grad, here, GRAD, PLAIN)
    w = block.load(weight, here, tl.float32 if MASTERS == _OWN else tl.int16, PLAIN)
    kept = 0
    if _KEPT_TYPES[MASTERS] is not None:
        kept = block.load(master, here, _KEPT_TYPES[MASTERS], PLAIN)
    first, second = (state0, scale0, here, scales_here), (state1, scale1, here, scales_here)
    m = _load_state(first, HAS_FIRST, FIRST, SCALED, PLAIN)
    v = _load_state(second, HAS_SECOND, SECOND, SCALED, PLAIN)

    w = getattr(f, _DECODE[MASTERS])(w, kept)
    g = block.decode_float(g, GRAD) * scale
    if MAXIMIZES:
        g = g * -1.0
    if HAS_L2:
        g = f.coupled(w, g, l2)
    if HAS_FIRST:
        m = _decode_state(m, FIRST, SCALED)
    else:
        m = g
    if HAS_SECOND:
        v = _decode_state(v, SECOND, SCALED)
    else:
        v = g

    w, m, v = getattr(f, _RULES[RULE])(w, g, m, v, constants)

    place = f.place(start.to(tl.uint32) + index.to(tl.uint32))
    word = f.noise(step_key, place)
    if HAS_FIRST:
        _store_state(m, f.first_noise(word), first, FIRST, SCALED, PLAIN)
    if HAS_SECOND:
        _store_state(v, f.second_noise(word), second, SECOND, SCALED, PLAIN)
    if MASTERS == _NONE:
        noise = f.weight_noise(f.noise(weight_key, place))
    else:
        noise = f.remainder_noise(word)
    return _store_master(w, noise, (weight, master), here, MASTERS, PLAIN)


@triton.jit
def _store_master(
    w: tl.tensor, noise: tl.tensor, to: tl.tuple, here: tl.tuple, MASTERS: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tensor:
    """Returns where the weight became infinite in 16 bits; `to`: the addresses of weight and master."""
    weight, master = to
    if MASTERS == _OWN:
        block.store(weight, w, here, tl.float32, PLAIN)
        return tl.zeros(w.shape, tl.int1)
    else:
        high, kept = getattr(f, _ENCODE[MASTERS])(w, noise)
        if _KEPT_TYPES[MASTERS] is not None:
            block.store(master, kept, here, _KEPT_TYPES[MASTERS], PLAIN)
        block.store(weight, high, here, tl.int16, PLAIN)
        if not PLAIN:
            _, _, mask = here
            high = tl.where(mask, high, 0)
        return (high & 0x7FFF) == (0x7C00 if MASTERS == _FP16 else 0x7F80)


@triton.jit
def _load_state(
    at: tl.tuple, EXISTS: tl.constexpr, CODEC: tl.constexpr, SCALED: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tuple:
    """A state's codes and the patterns of its scales, if it exists and is scaled; 0.0 and 0 otherwise."""
    address, scale, here, scales_here = at
    if not EXISTS:
        return 0.0, 0
    elif SCALED:
        codes = block.load(address, here, _CODE_TYPES[CODEC], PLAIN)
        return codes, block.load(scale, scales_here, tl.int16, False)
    else:
        return block.load(address, here, _CODE_TYPES[CODEC], PLAIN), 0


@triton.jit
def _decode_state(stored: tl.tuple, CODEC: tl.constexpr, SCALED: tl.constexpr) -> tl.tensor:
    """The FP32 values of what `_load_state` returned."""
    codes, scale = stored
    if SCALED:
        return getattr(f, _VALUE[CODEC])(codes, f.value_bf16(scale, 1.0)[:, None])
    else:
        return getattr(f, _VALUE[CODEC])(codes, 1.0)


@triton.jit
def _store_state(
    value: tl.tensor,
    noise: tl.tensor,
    at: tl.tuple,
    CODEC: tl.constexpr,
    SCALED: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Write FP32 values as codes, with the scales of their groups if they are scaled; noise from 0 to 2**20 - 1."""
    address, scale, here, scales_here = at
    if SCALED:
        if not PLAIN:
            _, _, mask = here
            value = tl.where(mask, value, 0.0)  # elements beyond the end don't affect their group's scale
        largest = tl.max(f.magnitude(value), axis=1)
        value = f.cut(value, largest[:, None])
        codes = getattr(f, _CODE[CODEC])(value, f.group_inverse(largest)[:, None], noise)
        block.store(address, codes, here, _CODE_TYPES[CODEC], PLAIN)
        block.store(scale, f.group_scale(largest), scales_here, tl.int16, False)
    else:
        block.store(address, getattr(f, _CODE[CODEC])(value, 1.0, noise), here, _CODE_TYPES[CODEC], PLAIN)
