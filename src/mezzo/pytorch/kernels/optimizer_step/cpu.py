"""The step on a CPU: one compiled loop over all parameters of one kind, on PyTorch's threads. A `jit` template.

A kind is a rule, the storage of masters and states, and the gradient's dtype. A step writes the addresses of gradients
and weights into a table in Python, about half a microsecond per parameter; the rest of the table is cached. Threads
take chunks of it by a counter. Every word has 64 bits. A 16-bit tensor's elements are loaded as bit patterns.

With scaled states (`groups`) new states of a group wait on the stack, because the largest determines the scale.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.pytorch.kernels import cpu, jit
from mezzo.pytorch.kernels.cpu import Pointer, expand, f32, i16, i32, inline, int64_at, loop, types, u32
from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, address, form, formulas
from mezzo.pytorch.kernels.optimizer_step.formulas import GROUP

# A job: what the compiled function is given.
COUNTER, CHUNKS, CHUNK_LIST, TABLE, CONSTANT_TABLE, OVERFLOW, JOB_WORDS = range(7)

# A row of the table, one per parameter; tensors by their addresses, 0 for none. A state is followed by its scales.
WEIGHT, MASTER, GRAD, FIRST, FIRST_SCALES, SECOND, SECOND_SCALES = range(7)
NUMEL, ORDINAL, OFFSET, CONSTANTS, STEP, ROW_WORDS = range(7, 13)

# A row of the constants, FP32, one per group and step count; the rule's own seven come last.
MULTIPLIER, MOVE, L2, RULE, CONSTANT_WORDS = 0, 1, 2, 3, 10

# What `count_moves` is given: how many rows, the table's address, and that of an FP32 for each row.
MOVED_ROWS, MOVED_TABLE, MOVES = range(3)

# Elements: whole groups; small enough to distribute evenly, large compared to the counter's cost.
CHUNK = 1 << 15

_PLANS = 4096  # cached by one stepper: with gradient release every parameter has its own

_LOADS = {"": "nothing", "float32": "cpu.load_fp32"}  # by type in memory; other types hold patterns
_STORES = {"": "nothing", "float32": "cpu.store_fp32"}

Words = npt.NDArray[np.int64]
Call = Callable[[int, int], None]
# Rule, whether L2, states, their format, form of the weight, gradient.
Kind = tuple[str, bool, int, str, str, torch.dtype]


class DeviceStepper:
    """The step for rows on the CPU; not for several threads at once."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], _Plan] = {}

    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Update every row that has a gradient; see `Stepper`."""
        if found_inf is not None and found_inf.item() != 0:
            return
        present = [[row for row in rows if row.grad is not None] for _, rows in groups]
        rows = [row for of_group in present for row in of_group]
        if not rows:
            return
        dtypes = [row.grad.dtype for row in rows]  # type: ignore[union-attr]
        shape = [
            ((hyper.rule, hyper.l2 != 0, len(hyper.states)), len(of_group))
            for (hyper, _), of_group in zip(groups, present)
        ]
        key = (rows[0].ordinal, len(rows))
        plan = self._plans.get(key)
        if plan is None or not plan.fits(rows, dtypes, shape):
            if plan is not None or len(self._plans) >= _PLANS:
                self._plans.clear()  # rows were replaced: release the tensors of the old ones
            plan = self._plans[key] = _Plan(rows, dtypes, shape)
        factor = 1.0 if multiplier is None else multiplier.item()
        plan.run([hyper for hyper, _ in groups], factor, overflow)


class _Plan:
    """The table for one sequence of rows with gradients of these dtypes, and the launches over it."""

    def __init__(
        self, rows: list[Row], dtypes: list[torch.dtype], shape: list[tuple[tuple[str, bool, int], int]]
    ) -> None:
        self.key = rows, dtypes, shape
        group_of = [group for group, (_, count) in enumerate(shape) for _ in range(count)]
        by_kind: dict[Kind, list[int]] = {}
        for index, (row, dtype, group) in enumerate(zip(rows, dtypes, group_of)):
            rule, l2, states = shape[group][0]
            state = row.state if states else "fp32"
            kind = (rule, l2, states, state, form(row.masters, row.weight.dtype), dtype)
            by_kind.setdefault(kind, []).append(index)
        order = [index for indices in by_kind.values() for index in indices]
        self.rows = [rows[index] for index in order]
        self.groups = np.array([group_of[index] for index in order])
        self.table: Words = np.array([_row_words(row) for row in self.rows], np.int64)
        self.constants = np.zeros((0, CONSTANT_WORDS), np.float32)
        self.moves = np.zeros(len(rows), np.float32)
        self.no_overflow = np.zeros(1, np.float32)
        self.launches: list[tuple[Call, int, Words, Words]] = []  # how, the loop, its job and its chunks
        start = 0
        for kind, indices in by_kind.items():
            sizes = [rows[index].weight.numel() for index in indices]
            pieces = [(row, at) for row, size in enumerate(sizes, start) for at in range(0, size, CHUNK)]
            chunks: Words = np.array(pieces, np.int64).reshape(-1, 2)
            job: Words = np.zeros(JOB_WORDS, np.int64)
            job[CHUNKS], job[CHUNK_LIST] = len(pieces), chunks.ctypes.data
            call = jit.alone if sum(sizes) <= CHUNK else jit.parallel
            self.launches.append((call, _kernel(kind).address, job, chunks))
            start += len(indices)
        self.counting = jit.kernel(sys.modules[__name__], {}, "count_moves").address
        self.counting_job = np.array([len(rows), self.table.ctypes.data, self.moves.ctypes.data], np.int64)

    def fits(self, *key: object) -> bool:
        """Whether the plan is for these rows (by identity), dtypes and groups."""
        return self.key == key

    def run(self, hypers: Sequence[Hyper], factor: float, overflow: Tensor | None) -> None:
        self.table[:, WEIGHT] = [row.weight.data_ptr() for row in self.rows]
        self.table[:, GRAD] = [row.grad.data_ptr() for row in self.rows]  # type: ignore[union-attr]
        jit.alone(self.counting, self.counting_job.ctypes.data)
        self._write_constants(hypers, factor)
        flag = self.no_overflow.ctypes.data if overflow is None else overflow.data_ptr()
        for call, main, job, _ in self.launches:
            job[COUNTER] = 0
            job[TABLE], job[CONSTANT_TABLE] = self.table.ctypes.data, self.constants.ctypes.data
            job[OVERFLOW] = flag
            call(main, job.ctypes.data)

    def _write_constants(self, hypers: Sequence[Hyper], factor: float) -> None:
        """A row of constants for each pair of a group and a step count."""
        first = self.moves[0]
        if (self.moves == first).all():
            pairs = [(group, float(first)) for group in range(len(hypers))]
            self.table[:, CONSTANTS] = self.groups
        else:
            both = np.stack([self.groups.astype(np.float64), self.moves])
            distinct, which = np.unique(both, axis=1, return_inverse=True)
            pairs = [(int(group), float(move)) for group, move in distinct.T.tolist()]
            self.table[:, CONSTANTS] = which.reshape(-1)
        if len(self.constants) != len(pairs):
            self.constants = np.zeros((len(pairs), CONSTANT_WORDS), np.float32)
        for constants, (group, move) in zip(self.constants, pairs):
            hyper = hypers[group]
            own = formulas.constants_of[hyper.rule](hyper.numbers, int(move))
            constants[:] = (-factor if hyper.maximize else factor, move, hyper.l2, *own)


def _row_words(row: Row) -> list[int]:
    """One row of the table; weight, gradient and constants are written at each step."""
    made = [0] * ROW_WORDS
    made[NUMEL] = row.weight.numel()
    made[ORDINAL], made[OFFSET] = row.ordinal, row.offset
    made[STEP] = row.step.data_ptr()
    made[MASTER] = address(row.master)
    for at, state, scale in zip((FIRST, SECOND), row.states, row.scales):
        made[at : at + 2] = address(state), address(scale)
    return made


def _kernel(kind: Kind) -> jit.Kernel:
    rule, l2, states, state, weight, grad_dtype = kind
    bindings = {
        "rule": f"f.{rule}",
        "coupled": "f.coupled" if l2 else "f.uncoupled",
        "decode": f"f.decode_{weight}",
        "encode": f"f.encode_{weight}",
        "infinite": "nothing" if weight == "own" else "is_infinite",
        "INFINITY": "0x7C00" if weight == "fp16" else "0x7F80",
        "weight_noise": "noise_apart" if weight == "none" else "noise_same",
        **jit.elements(grad_dtype, load="load_grad", at="grad_at"),
        **_access("weight", "float32" if weight == "own" else "int16"),
        **_access("master", formulas.kept_types[weight]),
    }
    how = formulas.state_formats[state]
    for index, (name, codec) in enumerate((("first", how.signed), ("second", how.unsigned))):
        exists = index < states
        bindings |= _access(name, formulas.codecs[codec] if exists else "")
        bindings |= {
            f"{each}_{name}": f"f.{each}_{codec}" if exists else "nothing" for each in ("value", "code")
        }
    if not how.is_scaled:
        return jit.kernel(sys.modules[__name__], bindings)
    if states == 1:
        bindings |= {"load_second_scale": "nothing", "store_second_scale": "nothing"}
    return jit.kernel(sys.modules[__name__], {**bindings, "walk": "walk_groups"})


def _access(name: str, memory: str) -> dict[str, str]:
    """Bindings for the elements of a tensor of this type; "" for an absent tensor."""
    load, store = _LOADS.get(memory, "load_pattern"), _STORES.get(memory, "store_pattern")
    return {f"load_{name}": load, f"store_{name}": store, f"{name}_at": f"cpu.{memory or 'int16'}_at"}


def _where(typing: Any, condition: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    kind = typing.unify_types(types.unliteral(a), types.unliteral(b))
    return kind(types.boolean, kind, kind), build


@inline
def _shifted(x: int, count: int) -> int:
    return u32(u32(x) >> count)


@inline
def _float_of_half(pattern: int) -> float:
    return cpu.float_of_half(i16(pattern))


_OWN = {"float_of_half": _float_of_half, "shifted": _shifted, "where": cpu.intrinsic(_where)}
_SHARED = {name: getattr(cpu, name) for name in ("bits", "float_of", "half_bits", "i32", "u32", "fma")}
_OTHERS = {"least": min, "most": max, "sqrt": math.sqrt, "divide": operator.truediv, "multiply_add": cpu.fma}
f = formulas.over(
    {**_OWN, **_SHARED, **_OTHERS},
    inline,
    "mezzo.pytorch.kernels.optimizer_step.cpu_formulas",
    lambda number: f32(number) if isinstance(number, float) else number,
)


@inline
def nothing(*arguments: Any) -> float:
    """Load or store an element of an absent tensor."""
    return f32(0)


@inline
def load_pattern(x: Pointer, i: int) -> int:
    """An integer of any width."""
    return i32(x[i])


@inline
def store_pattern(x: Pointer, i: int, pattern: int) -> None:
    """As many low bits as an element has."""
    x[i] = pattern


INFINITY = 0x7F80  # bound


@inline
def is_infinite(weight: Pointer, i: int) -> bool:
    """Whether a 16-bit weight in memory is an infinity."""
    return i16(weight[i] & i16(0x7FFF)) == i16(INFINITY)


@inline
def noise_same(word: int, key: int, at: int) -> Any:
    """For a weight with an 8-bit remainder, from the states' word."""
    return f.remainder_noise(word)


@inline
def noise_apart(word: int, key: int, at: int) -> Any:
    """For a weight without a remainder, from a word of the stream `WEIGHT`."""
    return f.weight_noise(f.noise(key, at))


rule = f.adamw  # bound
coupled = f.uncoupled  # bound
decode = f.decode_split  # bound
encode = f.encode_split  # bound
infinite = is_infinite  # bound
weight_noise = noise_same  # bound
load_weight = load_pattern  # bound
store_weight = store_pattern  # bound
weight_at = cpu.int16_at  # bound
load_master = load_pattern  # bound
store_master = store_pattern  # bound
master_at = cpu.int16_at  # bound
load_grad = cpu.load_bf16  # bound
grad_at = cpu.int16_at  # bound
load_first = cpu.load_fp32  # bound
store_first = cpu.store_fp32  # bound
first_at = cpu.float32_at  # bound
value_first = f.value_fp32  # bound
code_first = f.code_fp32  # bound
load_second = cpu.load_fp32  # bound
store_second = cpu.store_fp32  # bound
second_at = cpu.float32_at  # bound
value_second = f.value_fp32  # bound
code_second = f.code_fp32  # bound
load_second_scale = cpu.load_bf16  # bound
store_second_scale = store_pattern  # bound

Pointers = tuple[Pointer, ...]


@inline
def settings(constants: Pointer, ordinal: int, offset: int) -> tuple[Any, ...]:
    """From a row of constants: multiplier, L2, the rule's own seven, and the keys of the noise."""
    c, move = constants, u32(constants[MOVE])
    own = c[3], c[4], c[5], c[6], c[7], c[8], c[9]
    keys = f.noise_key(move, ordinal, f.STEP), f.noise_key(move, ordinal, f.WEIGHT)
    return c[MULTIPLIER], c[L2], own, f.key_from(keys[0], offset), f.key_from(keys[1], offset)


def count_moves(job: Pointer) -> None:
    """Add 1 to the step of every row of a table, and copy the result."""
    table, moves = job[MOVED_TABLE], cpu.float32_at(job[MOVES])
    for row in range(job[MOVED_ROWS]):
        step = cpu.float32_at(int64_at(table + row * (8 * ROW_WORDS))[STEP])
        move = step[0] + f32(1)
        step[0] = move
        moves[row] = move


@loop
def elements(of: Pointers, constants: Pointer, ordinal: int, offset: int, start: int, stop: int) -> int:
    """Update the elements from `start` to `stop`; returns whether one of the weights is now infinite."""
    weight, master, grad, first_state, second_state = of
    multiplier, l2, own, step_key, weight_key = settings(constants, ordinal, offset)
    overflow, at = i32(0), f.place(start)
    for i in range(start, stop):
        w = decode(load_weight(weight, i), load_master(master, i))
        g = coupled(w, load_grad(grad, i) * multiplier, l2)
        a = value_first(load_first(first_state, i), f.ONE)
        b = value_second(load_second(second_state, i), f.ONE)
        w, a, b = rule(w, g, a, b, own)
        word = f.noise(step_key, at)
        store_first(first_state, i, code_first(a, f.ONE, f.first_noise(word)))
        store_second(second_state, i, code_second(b, f.ONE, f.second_noise(word)))
        stored, kept = encode(w, weight_noise(word, weight_key, at))
        store_weight(weight, i, stored)
        store_master(master, i, kept)
        if infinite(weight, i):
            overflow = i32(1)
        at = f.following(at)
    return overflow


@inline
def walk_elements(row: Pointer, start: int, stop: int, constants: Pointer) -> int:
    """Update one chunk of one parameter."""
    weight, master, grad = weight_at(row[WEIGHT]), master_at(row[MASTER]), grad_at(row[GRAD])
    of = weight, master, grad, first_at(row[FIRST]), second_at(row[SECOND])
    return elements(of, constants, row[ORDINAL], row[OFFSET], start, stop)


# Below, `of` is: weight, master, gradient, first state and its scales, second state and its scales; `new` is a group's
# new states and noise.


@expand
def move(
    of: Pointers, given: tuple[Any, ...], places: Pointer, start: int, count: int, new: Pointers
) -> tuple[int, int, int]:
    """Update `count` weights from `start`, a group's first; their new states and noise stay in `new`. Returns whether a
    weight is now infinite, and the `magnitude` of the largest new states.
    """
    weight, master, grad, first, first_scales, second, second_scales = of
    multiplier, l2, own, step_key, weight_key = given
    a_new, b_new, words = new
    this = start // GROUP
    a_scale, b_scale = cpu.load_bf16(first_scales, this), load_second_scale(second_scales, this)
    step_mark, weight_mark = u32(step_key + f.place(start)), u32(weight_key + f.place(start))
    a_largest, b_largest, overflow = i32(0), u32(0), i32(0)
    for j in range(count):
        i = start + j
        w = decode(load_weight(weight, i), load_master(master, i))
        g = coupled(w, load_grad(grad, i) * multiplier, l2)
        a, b = value_first(load_first(first, i), a_scale), value_second(load_second(second, i), b_scale)
        w, a, b = rule(w, g, a, b, own)
        a_new[j], b_new[j] = a, b
        a_largest = max(a_largest, f.magnitude(a))
        b_largest = max(b_largest, u32(cpu.bits(b)))  # not negative, unless a NaN
        word = f.noise(step_mark, places[j])
        words[j] = word
        stored, kept = encode(w, weight_noise(word, weight_mark, places[j]))
        store_weight(weight, i, stored)
        store_master(master, i, kept)
    for j in range(count):  # a separate loop over 16-bit elements, which needs half the vectors
        if infinite(weight, start + j):
            overflow = i32(1)
    return overflow, a_largest, i32(b_largest & u32(0x7FFFFFFF))


@expand
def store(of: Pointers, start: int, count: int, new: Pointers, a_largest: int, b_largest: int) -> None:
    """Store the new states of `count` elements from `start`, a group's first."""
    _, _, _, first, first_scales, second, second_scales = of
    a_new, b_new, words = new
    this = start // GROUP
    a_inverse, b_inverse = f.group_inverse(a_largest), f.group_inverse(b_largest)
    if f.needs_cut(a_largest) or f.needs_cut(b_largest):
        for j in range(count):
            a_new[j], b_new[j] = f.cut(a_new[j], a_largest), f.cut(b_new[j], b_largest)
    for j in range(count):
        i = start + j
        store_first(first, i, code_first(a_new[j], a_inverse, f.first_noise(words[j])))
        store_second(second, i, code_second(b_new[j], b_inverse, f.second_noise(words[j])))
    store_pattern(first_scales, this, f.group_scale(a_largest))
    store_second_scale(second_scales, this, f.group_scale(b_largest))


@loop
def groups(of: Pointers, constants: Pointer, ordinal: int, offset: int, start: int, stop: int) -> int:
    """Update the elements from `start`, a group's first, to `stop`; returns whether a weight is now infinite."""
    given, overflow, places = settings(constants, ordinal, offset), i32(0), cpu.uint32_scratch(GROUP)
    for j in range(GROUP):
        places[j] = f.place(j)
    new = cpu.float32_scratch(GROUP), cpu.float32_scratch(GROUP), cpu.uint32_scratch(GROUP)
    other = cpu.float32_scratch(GROUP), cpu.float32_scratch(GROUP), cpu.uint32_scratch(GROUP)
    pairs = stop - (stop - start) % (2 * GROUP)
    # Two at a time, so that one's largest values are found while the other is moved; with a count that is known.
    for i in range(start, pairs, 2 * GROUP):
        overflow_0, a_0, b_0 = move(of, given, places, i, GROUP, new)
        overflow_1, a_1, b_1 = move(of, given, places, i + GROUP, GROUP, other)
        store(of, i, GROUP, new, a_0, b_0)
        store(of, i + GROUP, GROUP, other, a_1, b_1)
        overflow = i32(overflow | i32(overflow_0 | overflow_1))
    for i in range(pairs, stop, GROUP):
        count = min(stop - i, GROUP)
        flag, a_0, b_0 = move(of, given, places, i, count, new)
        store(of, i, count, new, a_0, b_0)
        overflow = i32(overflow | flag)
    return overflow


@inline
def walk_groups(row: Pointer, start: int, stop: int, constants: Pointer) -> int:
    """Update one chunk of one parameter."""
    weight, master, grad = weight_at(row[WEIGHT]), master_at(row[MASTER]), grad_at(row[GRAD])
    first, first_scales = first_at(row[FIRST]), cpu.int16_at(row[FIRST_SCALES])
    second, second_scales = second_at(row[SECOND]), cpu.int16_at(row[SECOND_SCALES])
    of = weight, master, grad, first, first_scales, second, second_scales
    return groups(of, constants, row[ORDINAL], row[OFFSET], start, stop)


walk = walk_elements  # bound


def main(job: Pointer) -> None:
    """Take chunks until none is left; `walk` returns whether a weight overflowed."""
    overflow = i32(0)
    chunk_list, table, constant_table = int64_at(job[CHUNK_LIST]), job[TABLE], job[CONSTANT_TABLE]
    while True:
        chunk = cpu.take(job)
        if chunk >= job[CHUNKS]:
            break
        row = int64_at(table + chunk_list[2 * chunk] * (8 * ROW_WORDS))
        start = chunk_list[2 * chunk + 1]
        constants = cpu.float32_at(constant_table + row[CONSTANTS] * (4 * CONSTANT_WORDS))
        overflow = i32(overflow | walk(row, start, min(start + CHUNK, row[NUMEL]), constants))
    if overflow != 0:
        cpu.float32_at(job[OVERFLOW])[0] = f32(1)
