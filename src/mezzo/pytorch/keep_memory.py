"""Freed memory stays with the process: a training step on a CPU then pays for its pages once, and not every time.

glibc's `malloc` asks the kernel for each large block and gives it back when it is freed, so that the activations and
gradients of every step are made of new pages: the kernel clears them, one fault for each 4 KiB. PyTorch's
CUDA allocator keeps what it once got for the same reason. `benchmarks/keep_memory.py` counts the faults of a step, and
measures what it brings.
"""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_memory"]

# <malloc.h>: the parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1  # bytes; mallopt takes an int


def keep_memory() -> bool:
    """Keep freed memory for the next allocation, for the rest of this process; whether the C library does so.

    Equals ``MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=2147483647`` in the environment at the process's
    start. Call it before the model is built. Numbers do not change, and neither do the tensors' bytes; what the
    process once needed at its peak, it keeps until it ends. It speeds up PyTorch's own operations as well, FP32 ones
    among them: this is no precision's gain.

    Returns:
        False, and nothing is done, where the C library is not glibc (macOS, Windows, Alpine), and where another
        allocator has taken malloc's place (jemalloc, tcmalloc: they keep freed memory anyway).
    """
    if platform.libc_ver()[0] != "glibc" or _is_replaced():
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def _is_replaced() -> bool:
    """Whether `malloc` comes from elsewhere than the C library that `mallopt` would tune."""
    found, own = (
        ctypes.cast(library.malloc, ctypes.c_void_p).value
        for library in (ctypes.CDLL(None), ctypes.CDLL("libc.so.6"))
    )
    return found != own
