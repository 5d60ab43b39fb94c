"""ExponentRows: histograms under way, one for each tensor that is looked at, on the devices where the tensors are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.core.ranges import INFINITE, NAN, ZERO, Histogram, RangeRow
from mezzo.pytorch import distributed
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.kernels import exponents

_SLAB = 64  # rows allocated, and later read, at once


_PLAIN = (Tensor, torch.nn.Parameter)


class Key(NamedTuple):
    """Which row of a record a tensor counts into; the fields are `RangeRow`'s."""

    module: str
    what: str
    name: str
    format: str


class ExponentRows:
    """Rows of counts by key, in order of first appearance. Adding to one never waits for the device.

    Of a `DTensor` a rank counts the part that it holds.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[Key, torch.device], Tensor] = {}
        self._slabs: dict[torch.device, list[Tensor]] = {}
        self._count: dict[torch.device, Callable[[Tensor, Tensor], None]] = {}
        self._lock = threading.Lock()  # autograd has a thread for each device

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, module: str, what: str, tensor: Tensor, *, name: str = "", format: str = "") -> bool:
        """Count a tensor's elements; those of a sparse one that are there. False: it can't be looked at.

        Args:
            module, what, name: as in `RangeRow`.
            tensor: any; what has no floating numbers in memory is passed over.
            format: to be told in the row; by default the tensor's own.
        """
        numbers = _numbers(tensor)
        if numbers is None:
            return False
        key = Key(module, what, name, format or name_of(numbers.dtype))
        device = numbers.device
        count = self._count.get(device)
        if count is None:
            count = self._count[device] = exponents.counter(device.type)
        row = self._rows.get((key, device))
        count(numbers, self._new(key, device) if row is None else row)
        return True

    def take(self, other: ExponentRows) -> None:
        """Take over the rows of another, whose keys are none of these."""
        self._rows.update(other._rows)

    def read(self, shifts: dict[str, int]) -> list[RangeRow]:
        """The rows, each shifted by the exponents that are given for its `what`. Waits for the devices."""
        of_device: dict[torch.device, list[tuple[Key, Tensor]]] = {}
        for (key, device), row in self._rows.items():
            of_device.setdefault(device, []).append((key, row))
        found: dict[Key, Histogram] = {}
        for rows in of_device.values():
            counted = torch.stack([row for _, row in rows]).cpu().numpy()
            largest = counted[:, exponents.LARGEST].astype(np.int32).view(np.float32)
            for (key, _), words, size in zip(rows, counted, largest.tolist()):
                one = _histogram(words, size, shifts.get(key.what, 0))
                found[key] = found[key].plus(one) if key in found else one
        keys = dict.fromkeys(key for key, _ in self._rows)
        return [RangeRow(key.module, key.what, key.format, found[key], key.name) for key in keys]

    def _new(self, key: Key, device: torch.device) -> Tensor:
        with self._lock:
            free = self._slabs.setdefault(device, [])
            if not free:
                slab = torch.zeros(_SLAB, exponents.WORDS, dtype=torch.int64, device=device)
                free.extend(reversed(slab.unbind(0)))
            return self._rows.setdefault((key, device), free.pop())


def _numbers(tensor: Tensor) -> Tensor | None:
    """The strided floating tensor that holds a tensor's numbers on this rank; None where there is none to be read."""
    if type(tensor) not in _PLAIN:
        tensor = distributed.local(tensor)
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided and hasattr(tensor, "values"):  # compressed, or nested and jagged
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.resolve_neg()


def _histogram(words: npt.NDArray[np.int64], largest: float, shift: int) -> Histogram:
    """`Histogram.from_bins` of the numbers times ``2**shift``, for many rows."""
    used = np.flatnonzero(words[:INFINITE])
    zeros, infinities, nans = words[[ZERO, INFINITE, NAN]].tolist()
    if not len(used):
        return Histogram(0, [], zeros, infinities, nans)
    first, last = int(used[0]), int(used[-1]) + 1
    largest = math.ldexp(largest, shift)
    return Histogram(first - 127 + shift, words[first:last].tolist(), zeros, infinities, nans, largest)
