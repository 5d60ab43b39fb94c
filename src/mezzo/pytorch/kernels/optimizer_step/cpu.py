"""The step on a CPU: one compiled loop over all parameters of one kind, on PyTorch's threads.

A kind is a rule, the storage of masters and states, and the gradient's dtype. A step writes the addresses of gradients
and weights into a table in Python, about half a microsecond per parameter; the rest of the table is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.pytorch.kernels import jit
from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, address, form
from mezzo.pytorch.kernels.optimizer_step import cpu_loops as words
from mezzo.pytorch.kernels.optimizer_step.formulas import codecs, constants_of, kept_types, state_formats

_PLANS = 4096  # cached by one stepper: with gradient release every parameter has its own

_LOADS = {"": "nothing", "float32": "cpu.load_fp32"}  # by type in memory; other types hold patterns
_STORES = {"": "nothing", "float32": "cpu.store_fp32"}

Words = npt.NDArray[np.int64]
Call = Callable[[int, int], None]
Kind = tuple[
    str, bool, int, str, str, torch.dtype
]  # rule, L2, states, their format, form of the weight, gradient


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
        self.constants = np.zeros((0, words.CONSTANT_WORDS), np.float32)
        self.moves = np.zeros(len(rows), np.float32)
        self.no_overflow = np.zeros(1, np.float32)
        self.launches: list[tuple[Call, int, Words, Words]] = []  # how, the loop, its job and its chunks
        start = 0
        for kind, indices in by_kind.items():
            sizes = [rows[index].weight.numel() for index in indices]
            pieces = [
                (row, at) for row, size in enumerate(sizes, start) for at in range(0, size, words.CHUNK)
            ]
            chunks: Words = np.array(pieces, np.int64).reshape(-1, 2)
            job: Words = np.zeros(words.JOB_WORDS, np.int64)
            job[words.CHUNKS], job[words.CHUNK_LIST] = len(pieces), chunks.ctypes.data
            call = jit.alone if sum(sizes) <= words.CHUNK else jit.parallel
            self.launches.append((call, _kernel(kind).address, job, chunks))
            start += len(indices)
        self.counting = jit.kernel(words, {}, "count_moves").address
        self.counting_job = np.array([len(rows), self.table.ctypes.data, self.moves.ctypes.data], np.int64)

    def fits(self, *key: object) -> bool:
        """Whether the plan is for these rows (by identity), dtypes and groups."""
        return self.key == key

    def run(self, hypers: Sequence[Hyper], factor: float, overflow: Tensor | None) -> None:
        """One step."""
        self.table[:, words.WEIGHT] = [row.weight.data_ptr() for row in self.rows]
        self.table[:, words.GRAD] = [row.grad.data_ptr() for row in self.rows]  # type: ignore[union-attr]
        jit.alone(self.counting, self.counting_job.ctypes.data)
        self._write_constants(hypers, factor)
        flag = self.no_overflow.ctypes.data if overflow is None else overflow.data_ptr()
        for call, loop, job, _ in self.launches:
            job[words.COUNTER] = 0
            job[words.TABLE], job[words.CONSTANT_TABLE] = self.table.ctypes.data, self.constants.ctypes.data
            job[words.OVERFLOW] = flag
            call(loop, job.ctypes.data)

    def _write_constants(self, hypers: Sequence[Hyper], factor: float) -> None:
        """A row of constants for each pair of a group and a step count."""
        first = self.moves[0]
        if (self.moves == first).all():
            pairs = [(group, float(first)) for group in range(len(hypers))]
            self.table[:, words.CONSTANTS] = self.groups
        else:
            both = np.stack([self.groups.astype(np.float64), self.moves])
            distinct, which = np.unique(both, axis=1, return_inverse=True)
            pairs = [(int(group), float(move)) for group, move in distinct.T.tolist()]
            self.table[:, words.CONSTANTS] = which.reshape(-1)
        if len(self.constants) != len(pairs):
            self.constants = np.zeros((len(pairs), words.CONSTANT_WORDS), np.float32)
        for constants, (group, move) in zip(self.constants, pairs):
            hyper = hypers[group]
            own = constants_of[hyper.rule](hyper.numbers, int(move))
            constants[:] = (-factor if hyper.maximize else factor, move, hyper.l2, *own)


def _row_words(row: Row) -> list[int]:
    """One row of the table; weight, gradient and constants are written at each step."""
    made = [0] * words.ROW_WORDS
    made[words.NUMEL] = row.weight.numel()
    made[words.ORDINAL], made[words.OFFSET] = row.ordinal, row.offset
    made[words.STEP] = row.step.data_ptr()
    made[words.MASTER] = address(row.master)
    for at, state, scale in zip((words.FIRST, words.SECOND), row.states, row.scales):
        made[at : at + 2] = address(state), address(scale)
    return made


def _kernel(kind: Kind) -> jit.Kernel:
    """The loop of a kind."""
    rule, l2, states, state, weight, grad_dtype = kind
    infinite = {"own": "nothing", "fp16": "infinite_fp16"}.get(weight, "infinite_bf16")
    bindings = {
        "rule": f"f.{rule}",
        "coupled": "f.coupled" if l2 else "f.uncoupled",
        "decode": f"f.decode_{weight}",
        "encode": f"f.encode_{weight}",
        "infinite": infinite,
        "weight_noise": "noise_apart" if weight == "none" else "noise_same",
        **jit.elements(grad_dtype, load="load_grad", at="grad_at"),
        **_access("weight", "float32" if weight == "own" else "int16"),
        **_access("master", kept_types[weight]),
    }
    how = state_formats[state]
    for index, (name, codec) in enumerate((("first", how.signed), ("second", how.unsigned))):
        exists = index < states
        bindings |= _access(name, codecs[codec] if exists else "")
        bindings |= {
            f"{each}_{name}": f"f.{each}_{codec}" if exists else "nothing" for each in ("value", "code")
        }
    if not how.is_scaled:
        return jit.kernel(words, bindings, "step_elements")
    if states == 1:
        bindings |= {"load_second_scale": "nothing", "store_second_scale": "nothing"}
    return jit.kernel(words, bindings, "step_groups")


def _access(name: str, memory: str) -> dict[str, str]:
    """Bindings for the elements of a tensor of this type; "" for an absent tensor."""
    load, store = _LOADS.get(memory, "load_pattern"), _STORES.get(memory, "store_pattern")
    return {f"load_{name}": load, f"store_{name}": store, f"{name}_at": f"cpu.{memory or 'int16'}_at"}
