"""Faster training steps on a CPU: freed memory is kept in the process.

glibc's `malloc` gets each large block from the kernel and returns it when it is freed, so every step's activations and
gradients are on new pages. The kernel clears each page of 4 KiB at its first use, in a page fault. PyTorch's CUDA
allocator keeps freed memory for the same reason. `benchmarks/keep_memory.py` counts page faults and measures the gain.
"""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_memory"]

# <malloc.h>: the parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1  # bytes; mallopt takes an int


def keep_memory() -> bool:
    """Keep freed memory in this process for later allocations, which makes training steps on a CPU faster.

    Equals ``MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=2147483647`` in the environment at the process's
    start. Call it before building the model. Results do not change. The process keeps its peak memory until it ends.
    All of PyTorch's operations gain, in FP32 too, so use it on both sides when you compare precisions.

    Returns:
        Whether it has an effect. False without glibc (macOS, Windows, Alpine), and with another allocator (jemalloc,
        tcmalloc), which keeps freed memory anyway.
    """
    if platform.libc_ver()[0] != "glibc" or _is_replaced():
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def _is_replaced() -> bool:
    """Whether `malloc` is not that of the C library, which `mallopt` would tune."""
    found, own = (
        ctypes.cast(library.malloc, ctypes.c_void_p).value
        for library in (ctypes.CDLL(None), ctypes.CDLL("libc.so.6"))
    )
    return found != own
