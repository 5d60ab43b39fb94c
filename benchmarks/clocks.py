"""A device's clock, the speed at which it copies memory, and the kernels that it launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def seconds(call: Call, device: str) -> float:
    """How long one call takes: by the host's clock on a CPU, between two events of the stream on CUDA."""
    if device == "cuda":
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3
    begun_at = time.perf_counter()
    call()
    return time.perf_counter() - begun_at


def copy_bandwidth(device: str, size: int = 2**28) -> float:
    """Bytes a second that `Tensor.copy_` reads and writes: the speed of memory, for a tensor of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    for _ in range(3):
        target.copy_(source)
    median = statistics.median(seconds(lambda: target.copy_(source), device) for _ in range(20))
    return 2 * size / median


def launches(call: Call) -> list[str]:
    """The names of the kernels, copies and fills that one call launches on CUDA, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        call()
        torch.cuda.synchronize()
    return [str(event.name) for event in watched.events() or [] if event.device_type.name == "CUDA"]
