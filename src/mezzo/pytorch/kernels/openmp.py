"""PyTorch's own threads, for compiled functions that are not PyTorch's.

A second pool of threads would contend with PyTorch's, which spin for a while after each of its operations. GNU's,
Intel's and LLVM's OpenMP libraries all have `GOMP_parallel`, the entry that GCC's `#pragma omp parallel` calls, and
PyTorch has loaded one of them: a parallel region through it costs microseconds. Where there is none (macOS,
Windows), and in a process forked from one that may have used the pool (whose threads are then gone), Python's
threads do it: ctypes lets go of the interpreter's lock for the call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

Parallel = Callable[[int, int, int], None]  # function, data, threads

_forked = False


def parallel(address: int, data: int) -> None:
    """Call a C function ``void f(void *data)`` once on each of PyTorch's threads, and wait for all.

    Args:
        address: of the function, which shares out its work itself (by an atomic counter in its data).
        data: the address that every call is given.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        _function(address)(data)
    else:
        _region()(address, data, threads)


def alone(address: int, data: int) -> None:
    """Call a C function ``void f(void *data)`` on this thread."""
    _function(address)(data)


def has_openmp() -> bool:
    """Whether `parallel` uses PyTorch's threads, and not some of its own."""
    return _region() is not _python_threads


@functools.cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _region() -> Parallel:
    return _python_threads if _forked else _openmp() or _python_threads


@functools.cache
def _openmp() -> Parallel | None:
    # First what interposes on PyTorch's own calls (a preloaded library), then what libtorch is linked to.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            gomp = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        gomp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        gomp.restype = None
        return lambda address, data, threads: gomp(address, data, threads, 0)
    return None


def _python_threads(address: int, data: int, threads: int) -> None:
    function = _function(address)
    others = [_pool(threads - 1).submit(function, data) for _ in range(threads - 1)]
    function(data)
    for other in others:
        other.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mezzo-kernels")


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
