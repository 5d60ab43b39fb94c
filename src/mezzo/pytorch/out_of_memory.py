"""Is it memory that ran out? Each device, library and Python itself says it in another way."""

from __future__ import annotations

import torch

# An allocation that failed: torch's own (any accelerator), CUDA's, and those of libraries that ask for workspace.
SAYINGS = (
    "OutOfMemoryError",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MemoryError",
)


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text, or the end of a log, speaks of memory that ran out."""
    return any(saying in text for saying in SAYINGS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or the one that it was raised from, says that memory ran out."""
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(one, RuntimeError) and says_out_of_memory(str(one)):
            return True
        one = one.__cause__
    return False
