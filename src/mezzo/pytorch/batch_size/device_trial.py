"""One batch size on one device: does a step of it run, what does it take, how long does it last?

Steps have one purpose each. The first warms up (an optimizer makes its state, kernels are compiled and chosen), the
second is watched for its peak memory, and only those after it are timed.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from mezzo.core.batch_search import OUT_OF_MEMORY, OVER, Trial
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.out_of_memory import is_out_of_memory

Step = Callable[[int], object]


def try_size(
    step: Step, size: int, device: torch.device, *, limit: int | None, rounds: int, first: bool = False
) -> Trial:
    """Run steps of one size until it is known whether they fit, and how long one takes.

    A size fails where memory runs out, or where the step takes more than `limit` bytes; then it isn't timed. All that a
    failed step held is let go, and the device's cache is emptied.

    Args:
        step: runs one whole training step of so many samples.
        size: of the batch.
        device: a CPU or a CUDA device.
        limit: the bytes that may be taken at the peak; None sets none.
        rounds: how many steps are timed; the median is kept. 0 times none.
        first: count what is alive between two steps as well.

    Raises:
        Exception: whatever the step raises that is not about memory.
    """
    with _current(device):
        try:
            trial = _tried(step, size, device, limit, rounds, first)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            trial = None
            why = ". ".join(str(error).split(". ")[:2]).strip()  # then follows a page of advice
        if trial is None:  # outside the handler: its traceback holds the failed step's tensors
            trial = Trial(size, fits=False, why=why or OUT_OF_MEMORY)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return trial


def _tried(step: Step, size: int, device: torch.device, limit: int | None, rounds: int, first: bool) -> Trial:
    step(size)
    gc.collect()  # what an earlier size left in reference cycles is none of this one's
    resting = bytes_alive(device) if first else None
    watch = PeakTensorBytes(device.type)
    watch.start()
    try:
        step(size)
    finally:
        peak = watch.stop().peak_bytes
    if limit is not None and peak > limit:
        return Trial(size, fits=False, peak_bytes=peak, why=OVER, resting_bytes=resting)
    seconds = [_seconds_of(step, size, device) for _ in range(rounds)]
    median = statistics.median(seconds) if seconds else None
    return Trial(size, fits=True, peak_bytes=peak, seconds=median, resting_bytes=resting)


def _seconds_of(step: Step, size: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step(size)
    _wait(device)
    return time.perf_counter() - start


def bytes_alive(device: torch.device) -> int:
    """Bytes of the tensors on a device that are alive now."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated())
    watch = PeakTensorBytes(device.type)
    watch.start()
    return watch.stop().peak_bytes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
