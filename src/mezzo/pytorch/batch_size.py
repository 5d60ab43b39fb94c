"""The largest batch size whose training step fits into memory, and the speed of each size tried.

Sizes double until one does not fit, then the gap is bisected down to an eighth. A CPU that allocates too much swaps
instead of failing, so with a limit no size is tried that a line through two measured sizes predicts to be over it.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.core.byte_counts import parse_bytes, written_bytes
from mezzo.core.errors import MezzoError, UsageError, checks_keywords
from mezzo.core.notebook import html_table
from mezzo.pytorch import distributed
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.snapshot import Snapshot
from mezzo.pytorch.training.mixed_precision import drop_windows

_HEADER = ("size", "peak", "samples/s", "fits")

# In the errors of torch, CUDA's libraries and Python for a failed allocation.
MEMORY_ERROR = re.compile(r"out of memory|MemoryError|ALLOC(ATION)?_FAILED|CPUAllocator: (can't|not enough)")


@dataclass(frozen=True)
class Trial:
    """One batch size: its peak (None if the step did not finish), speed (None if not timed), why it does not fit."""

    size: int
    fits: bool
    peak_bytes: int | None = None
    samples_per_second: float | None = None
    why: str = ""


@dataclass
class BatchSizeResult:
    """All trials of a search, which `print` shows. `limit`: bytes, as text `typed`; None: an allocation must fail."""

    trials: list[Trial] = field(default_factory=list)
    limit: int | None = None
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)
    typed: str = ""

    @property
    def largest(self) -> int:
        """The largest batch size tried that fits; 0 if none does."""
        return max((trial.size for trial in self.trials if trial.fits), default=0)

    @property
    def fastest(self) -> int:
        """The batch size that trains the most samples per second; the largest if none was timed."""
        fit = ((trial.samples_per_second or 0.0, trial.size) for trial in self.trials if trial.fits)
        return max(fit, default=(0.0, 0))[1]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for trial in sorted(self.trials, key=lambda trial: trial.size):
            peak = "-" if trial.peak_bytes is None else written_bytes(trial.peak_bytes)
            speed = "-"
            if trial.samples_per_second is not None:  # three digits, never as 1.23e+04
                speed = np.format_float_positional(trial.samples_per_second, 3, fractional=False, trim="-")
            yield str(trial.size), peak, speed, "yes" if trial.fits else f"no: {trial.why}"

    def sentence(self) -> str:
        """The recommendation."""
        rows = {int(size): (speed, fits) for size, _, speed, fits in self._rows()}
        if not rows:
            return "no size was measured."
        if not self.largest:
            why = rows[min(rows)][1].removeprefix("no: ")
            return f"no size that was tried fits, not even batch size {min(rows)}: {why}."
        speed = rows[self.fastest][0]
        limit = f" into {written_bytes(self.limit, self.typed)}" if self.limit else ""
        timed = f"; {self.fastest} is the fastest, with {speed} samples per second" if speed != "-" else ""
        return f"batch size {self.largest} is the largest tried that fits{limit}{timed}."

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        values = {"limit_bytes": self.limit, "largest": self.largest or None, "fastest": self.fastest or None}
        return values | {key: value for key, value in asdict(self).items() if key not in ("limit", "typed")}

    def __str__(self) -> str:
        lines = ["{:>8}{:>10}{:>12}  {}".format(*row) for row in (_HEADER, *self._rows())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.sentence()])

    def __repr__(self) -> str:
        sizes = f"largest={self.largest}, fastest={self.fastest}"
        return f"BatchSizeResult({sizes}, {len(self.trials)} sizes tried on {self.device})"

    def _repr_html_(self) -> str:
        return html_table(self.sentence(), self._rows(), _HEADER)


def search(
    found: BatchSizeResult, measure: Callable[[int], Trial], start: int | None, last: int | None, flat: bool
) -> None:
    """Append to `found` trials of sizes from `start` to `last`; `flat` ends them when samples/s no longer rise."""
    whole = all(one is None or isinstance(one, (int, np.integer)) for one in (start, last))
    size = 0 if not whole else min(8, last or 8) if start is None else start
    if not 1 <= size <= (size if last is None else last):
        raise UsageError(
            f"start={start!r}, max_size={last!r}: needs 1 <= start <= max_size, integers as 8, 64 (--start 8 --max 64)"
        )
    while size:
        trial = measure(size)
        if found.limit is not None and (trial.peak_bytes or 0) > found.limit:
            why = f"over the limit of {written_bytes(found.limit, found.typed)}"
            trial = replace(trial, fits=False, why=why)
        found.trials.append(trial)
        speeds = {one.size: one.samples_per_second or 0.0 for one in found.trials if one.fits}
        early = [speeds[one] for one in speeds if 4 * one <= found.largest]
        if flat and early and max(speeds.values()) < 1.05 * max(early):
            found.notes.append(f"samples/s no longer rise. For larger sizes: --max {16 * found.largest}")
            return
        size = _next_size(found, last or sys.maxsize)


def _next_size(found: BatchSizeResult, last: int) -> int:
    """Twice the largest size that fits, or halfway to one that does not; 0 if the gap is an eighth or less."""
    low, high = found.largest, min((trial.size for trial in found.trials if not trial.fits), default=0)
    peaks = {trial.size: trial.peak_bytes for trial in found.trials if trial.peak_bytes is not None}
    if low and peaks[low] <= peaks.get(low // 64, -1):
        raise UsageError(
            f"sizes from {low // 64} to {low} take the same bytes. Does the step use its batch size (is --vary the "
            f"right option)? If the data set is that small, use --max {low // 64} (max_size={low // 64})."
        )
    step = (high - low) // 2 if high else min(low, last - low)
    if (limit := found.limit) is not None and low:
        if len(found.trials) == 1 and low > 1 and 2 * peaks[low] > limit:
            return low // 2  # two sizes predict whether twice the first is safe
        if len(peaks) > 1:
            (x0, y0), (x1, y1) = sorted(peaks.items(), key=lambda point: abs(point[1] - limit))[:2]
            slope = (y1 - y0) / (x1 - x0)
            while step and y0 + slope * (low + step - x0) > limit:
                step //= 2
    return low + step if step >= max(1, min(last - low, low // 16 + 1)) else 0


@checks_keywords
def find_batch_size(
    step: Callable[[int], object],
    start: int | None = None,
    *,
    limit: int | str | None = None,
    device: torch.device | str | None = None,
    max_size: int | None = None,
    rounds: int = 3,
    model: nn.Module | Sequence[nn.Module] = (),
    optimizer: Optimizer | Sequence[Optimizer] = (),
    restore: Iterable[Any] = (),
) -> BatchSizeResult:
    """The largest batch size whose training step fits into memory, within an eighth, and how fast each size tried is.

    **The steps train the model**: pass it and the optimizer, and they are restored to the bit, with gradients and
    buffers. Random state is always restored. MezzoError if not even one sample fits; other errors are the step's.

    Args:
        step: runs one whole training step with a batch of exactly this many samples.
        start, max_size: the first size (default 8, or what `max_size` allows) and the largest.
        limit: the bytes that all tensors of a step may take, or text such as ``"4 GiB"``. Default on a GPU: none, since
            an allocation fails. Default on a CPU, which swaps: what the machine has left, less 10 % or 512 MiB.
        device: whose memory is measured. Default: the model's; without one CUDA, if this process uses it, else the CPU.
        rounds: timed steps per size, after one to warm up and one to measure memory; 0 times none.
        model, optimizer: one or several of each, restored afterwards.
        restore: other objects with `state_dict` and `load_state_dict`: a scheduler, a scaler, a `MixedPrecision`.
    """
    if not callable(step):
        raise UsageError(f"find_batch_size: step is {step!r}. Pass a function of the batch size.")
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    parameters = [parameter for one in models for parameter in one.parameters()]
    default = "cuda" if torch.cuda.is_initialized() else "cpu"
    place = torch.device(device or (parameters[0].device if parameters else default))
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(place)!r}: memory can be measured on cpu and cuda devices only")
    if distributed.is_distributed():
        raise UsageError("find_batch_size runs in one process only. Call it before init_process_group.")
    snapshot, watch = Snapshot(models, [*optimizers, *restore]), PeakTensorBytes(place.type)
    wait: Callable[[], object] = torch.cuda.synchronize if place.type == "cuda" else lambda: None
    most = None if limit is None else parse_bytes(limit, "limit=")
    found = BatchSizeResult(limit=most, device=str(place), typed=limit if isinstance(limit, str) else "")
    if limit is None and place.type == "cpu":
        watch.start()
        found.limit = spendable_bytes() + watch.stop().peak_bytes

    def measure(size: int) -> Trial:
        drop_windows(models)  # of a step that failed half-way
        for parameter in parameters:
            parameter.grad = None
        try:
            step(size)
            gc.collect()  # reference cycles of an earlier size don't count for this one
            watch.start()
            step(size)
            peak = watch.stop().peak_bytes
            ends = [time.perf_counter()]
            for _ in range(rounds if found.limit is None or peak <= found.limit else 0):
                step(size)
                wait()
                ends.append(time.perf_counter())
            return Trial(size, True, peak, size / float(np.median(np.diff(ends))) if ends[1:] else None)
        except Exception as error:
            if not MEMORY_ERROR.search(f"{error!r} {error.__cause__!r}"):
                raise
            # Kept as text: outside this block no traceback holds the failed step's tensors.
            why = ". ".join(str(error).split(". ")[:2]).strip() or "out of memory"
        finally:
            with contextlib.suppress(RuntimeError):  # it counts only if the step failed
                watch.stop()
            gc.collect()
            torch.cuda.empty_cache()
        return Trial(size, False, why=why)

    try:
        with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
            search(found, measure, start, max_size, flat=False)
    finally:
        drop_windows(models)
        snapshot.restore()
    if not found.largest:
        raise MezzoError(found.sentence())
    return found


def spendable_bytes(root: Path = Path("/")) -> int:
    """Bytes that a process can allocate now without swapping, less 10 % or 512 MiB (the larger) for all but tensors."""
    try:
        left = [1024 * int(re.findall(r"MemAvailable: *(\d+)", (root / "proc/meminfo").read_text())[0])]
    except (OSError, IndexError):
        raise UsageError("the memory left is unknown. Give a limit: --limit 8GiB (limit='8GiB')") from None
    groups, top = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for path in re.findall(r"(?m)^0::/(.*)$", groups.read_text() if groups.exists() else ""):
        for place in (top / path, *(top / path).parents):  # the control groups (version 2) above this process
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max": no limit here
                most, used = (int((place / f"memory.{name}").read_text()) for name in ("max", "current"))
                cache = re.findall(r"(?m)^inactive_file (\d+)", (place / "memory.stat").read_text())
                left.append(most - used + sum(map(int, cache)))
    return max(1, min(left) - max(min(left) // 10, 512 * 1024**2))
