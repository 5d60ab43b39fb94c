"""Peak memory of training steps: from the allocator on a GPU; on a CPU, the tensor bytes alive at the peak.

On a CPU a dispatch mode counts each storage once, from the op that makes it until C++ frees it, without the scratch
space inside one op. Code of `torch.compile` does not pass through the dispatcher: once a graph has been compiled, the
CPU allocator's events are read through the profiler instead, which sees scratch space too (the record's `how`).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler_legacy import profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mezzo.core.records import MemoryRecord
from mezzo.pytorch.nested import tensors


class PeakTensorBytes:
    """The most bytes that tensors of a ``"cpu"`` or ``"cuda"`` device occupied at once between `start` and `stop`.

    Counting costs a few microseconds per op and a scan of Python's objects at `start`: never time such a step.

    >>> peak = PeakTensorBytes("cpu")
    >>> peak.start()
    >>> a = torch.ones(1000)
    >>> b = a.view(10, 100)  # shares the bytes of a
    >>> peak.stop().how
    'tensor bytes'
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._device_type = device_type
        self._counter: _CudaCounter | _StorageCounter | _AllocatorCounter | None = None

    def start(self) -> None:
        """Begin to count."""
        if self._counter is not None:
            raise RuntimeError("PeakTensorBytes is already counting. Call stop() first.")
        if self._device_type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"device type {self._device_type!r}: peak memory is measured on cpu and cuda only."
            )
        if self._device_type == "cpu" and _something_is_compiled():
            with contextlib.suppress(RuntimeError):  # the script uses the profiler itself
                allocator = _AllocatorCounter()
                allocator.start()
                self._counter = allocator
                return
        self._counter = _CudaCounter() if self._device_type == "cuda" else _StorageCounter()
        self._counter.start()

    def stop(self) -> MemoryRecord:
        """Stop counting; the peak in bytes, and how it was measured."""
        if self._counter is None:
            raise RuntimeError("PeakTensorBytes is not counting. Call start() first.")
        counter, self._counter = self._counter, None
        return MemoryRecord(peak_bytes=counter.stop(), how=counter.how)


class _CudaCounter:
    how = "cuda allocator"

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def stop(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())


class _StorageCounter(TorchDispatchMode):
    """Counts each CPU storage from the op that made it until its Python object dies, which C++ keeps alive."""

    how = "tensor bytes"
    supports_higher_order_operators = True  # else torch.cond and its like raise in the user's script

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._bytes = 0
        self._peak = 0
        self._counting = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise Dynamo would give up on every frame it meets while we watch, and for good."""
        return True

    def start(self) -> None:
        for tensor in _tensors_alive():
            self._see(tensor)
        self._counting = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> int:
        self._counting = False
        stack = _get_current_dispatch_mode_stack()
        place = next((n for n, mode in enumerate(stack) if mode is self), None)
        if place is not None:  # at any place: the user's code may have entered a mode since
            for mode in reversed(stack[place:]):  # without what a subclass does besides
                TorchDispatchMode.__exit__(mode, None, None, None)
            for mode in stack[place + 1 :]:
                TorchDispatchMode.__enter__(mode)
        self._alive.clear()
        return self._peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._counting:
            for tensor in tensors((args, kwargs, out)):
                self._see(tensor)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = _storage_of(tensor)
        if storage is None:
            return
        key = id(storage)
        size = storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[0]() is storage:
            if known[1] != size:  # resize_ in place
                self._alive[key] = (known[0], size)
                self._add(size - known[1])
            return

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            held = self._alive.get(key)
            if held is not None and held[0] is reference:
                del self._alive[key]
                self._bytes -= held[1]

        if known is not None:  # the address was used again before the callback came
            self._bytes -= known[1]
        self._alive[key] = (weakref.ref(storage, forget), size)
        self._add(size)

    def _add(self, size: int) -> None:
        self._bytes += size
        self._peak = max(self._peak, self._bytes)


class _AllocatorCounter:
    """Counts the CPU allocator's events, on top of the tensors that are alive at the start.

    The allocator reports no event when a block made before the profiler was on is freed, so each storage alive at the
    start leaves a mark in the event stream when it dies.
    """

    how = "tensor bytes (allocator events)"
    _MARK = "mezzo: freed "

    def start(self) -> None:
        profile(profile_memory=True).__enter__()
        storages = {id(s): s for s in map(_storage_of, _tensors_alive()) if s is not None}
        self._before = sum(s.nbytes() for s in storages.values())
        self._watched = [weakref.ref(s, _mark(f"{self._MARK}{s.nbytes()}")) for s in storages.values()]

    def stop(self) -> int:
        self._watched.clear()
        total = peak = self._before
        freed = 0  # bytes of a marked storage, until an event shows whether the allocator reported it too
        for event in (e for thread in torch._C._autograd._disable_profiler_legacy() for e in thread):
            if str(event.kind()) == "memory_alloc":
                change = int(event.cpu_memory_usage())
                total += change - (freed if change != -freed else 0)
                peak = max(peak, total)
                freed = 0
            elif event.name().startswith(self._MARK) and str(event.kind()) == "push":
                total -= freed
                freed = int(event.name()[len(self._MARK) :])
        return peak


def _mark(name: str) -> Callable[[object], None]:
    def leave(_: object) -> None:
        with torch.autograd.profiler.record_function(name):
            pass

    return leave


def _something_is_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"].get("unique_graphs", 0))


def _tensors_alive() -> Iterator[torch.Tensor]:
    """Every tensor that Python's collector knows, and the gradients of the leaves among them."""
    with torch.DisableTorchFunction():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                yield thing
                gradient = thing.grad if thing.is_leaf else None
                if gradient is not None:  # made in C++, perhaps never yet seen from Python
                    yield gradient


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage in the CPU's memory; None for other devices, fakes and wrappers without one."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.device.type == "cpu" else None
    except (RuntimeError, NotImplementedError):
        return None
