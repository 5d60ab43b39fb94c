"""Faster training steps on a CPU: freed memory is kept in the process.

glibc's `malloc` gets each large block from the kernel and returns it when it is freed, so every step's activations and
gradients are on new pages. The kernel clears each page of 4 KiB at its first use, in a page fault. PyTorch's CUDA
allocator keeps freed memory for the same reason. `benchmarks/keep_memory.py` counts page faults and measures the gain.
"""

from __future__ import annotations

import ctypes
import platform

# <malloc.h>: the parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1  # bytes; mallopt takes an int


def keep_memory() -> bool:
    """Keep freed memory in this process, which makes training steps on a CPU faster.

    Equals ``MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=2147483647`` in the environment of the process.
    Call it once, before the model is built. Results do not change. The process keeps the memory of its peak until it
    ends. FP32 training gets faster too, so this is not a gain of mixed precision.

    Returns:
        True if the C library keeps freed memory. False if nothing was done: the C library is not glibc (macOS, Windows,
        Alpine), or another allocator replaces malloc (jemalloc, tcmalloc; they keep freed memory anyway).

    Example::

        mezzo.keep_memory()
        model = build_model()
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
