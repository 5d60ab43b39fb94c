"""What an optimizer remembers of one parameter from step to step, and how it sees that it is no longer true."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step import Row
from mezzo.pytorch.kernels.optimizer_step.storage import StateSpec
from mezzo.pytorch.optim import storage
from mezzo.pytorch.optim.storage import Entries, Storage

Modes = tuple[str, str, tuple[StateSpec, ...]]


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's row for the kernels, and what it was made from.

    Args:
        row: the kernels' description.
        how: the form of its entries.
        entries: `optimizer.state[param]`.
        tensors: the values of `entries`.
        modes: `masters` and `state_format` of its group, and its states.
        address: of the weight's storage: another one after `param.data = other`.
        dtype: the weight's.
        stride: the weight's.
        contiguous: whether the weight is.
        device: the weight's; one object for all slots of a device.
        empty: there is no element.
    """

    row: Row
    how: Storage
    entries: Entries
    tensors: tuple[Any, ...]
    modes: Modes
    address: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    contiguous: bool
    device: torch.device
    empty: bool

    @classmethod
    def of(cls, param: Tensor, entries: Entries, how: Storage, modes: Modes, ordinal: int) -> Slot:
        """The slot of a parameter with fitting entries."""
        return cls(
            row=storage.row(param, entries, how, ordinal),
            how=how,
            entries=entries,
            tensors=tuple(entries.values()),
            modes=modes,
            address=param.data_ptr(),
            dtype=param.dtype,
            stride=param.stride(),
            contiguous=param.is_contiguous(),
            device=_DEVICES.setdefault(param.device, param.device),
            empty=param.numel() == 0,
        )

    def is_of(self, param: Tensor, entries: Entries | None, modes: Modes) -> bool:
        """Whether weight, entries and modes are those that this was made from."""
        return (
            self.address == param.data_ptr()
            and self.dtype is param.dtype
            and self.stride == param.stride()
            and self.modes == modes
            and entries is self.entries
            and len(self.tensors) == len(self.entries)
            and all(map(is_, self.entries.values(), self.tensors))
        )


_DEVICES: dict[torch.device, torch.device] = {}
