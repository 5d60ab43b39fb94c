"""Tables of the tensors of one step in one int64 buffer on their device, by which one launch serves them all.

`current` (addresses of weights and gradients, settings) is copied only if it changed, asynchronously from pinned
memory. A word of `chunks` is one program's work: the parameter's line in the upper half, its first block in the lower.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, address, form
from mezzo.pytorch.kernels.optimizer_step.formulas import FORMS, RULES, state_formats

BLOCK = 1024  # elements that a program processes at a time: 16 groups of 64
ROW_WORDS = 11
CURRENT_WORDS = 3
HYPER_WORDS = 8
_MOST_BLOCKS = 16  # per program

_GRADS = (torch.float32, torch.bfloat16, torch.float16)


def variant(hyper: Hyper) -> int:
    """The code that settings need, as a number: ``rule + 8 * has an L2 term + 16 * maximize``."""
    return RULES.index(hyper.rule) + 8 * (hyper.l2 != 0) + 16 * hyper.maximize


def kind(row: Row, hyper: Hyper) -> int:
    """The code that a row needs, as a number: ``masters + 8 * state + 64 * gradient + 256 * variant``."""
    masters = FORMS.index(form(row.masters, row.weight.dtype))
    state = tuple(state_formats).index(row.state)
    return masters + 8 * state + 64 * _GRADS.index(_grad(row).dtype) + 256 * variant(hyper)


class PointerTable:
    """The tables for at least one row, each with a gradient of a certain dtype, all on one device."""

    def __init__(self, groups: Groups) -> None:
        self.owner = [row for _, rows in groups for row in rows]
        self.device = self.owner[0].weight.device
        kinds = [kind(row, hyper) for hyper, rows in groups for row in rows]
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
