"""The largest batch size whose training step fits into memory, and the speed of each size tried.

Sizes grow by a factor until one does not fit, then the gap is bisected down to one multiple. A CPU that allocates too
much swaps instead of failing, so with a limit sizes grow no further than a line through the last two predicts to fit.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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

UNCHANGING = 64
"""If sizes this factor apart take the same bytes, the batch does not grow with the size."""
RISE, DOUBLED_TWICE = 1.05, 4
"""The speed of a size has risen if it is this many times that of one which is four times smaller."""
MARGIN, LEAST_MARGIN = 0.10, 512 * 1024**2
"""Share and bytes (the larger counts) of the available memory that are left for everything but tensors."""
OVER, OUT_OF_MEMORY = "over the limit", "out of memory"
_HEADER = ("size", "peak", "steps/s", "samples/s", "fits")

# In the errors of torch, CUDA's libraries and Python for a failed allocation.
MEMORY_ERROR = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|ALLOC(ATION)?_FAILED|DefaultCPUAllocator: (can't|not enough)"
)


class NothingFitsError(MezzoError, RuntimeError):
    """Not even the smallest batch size fits into memory."""


@dataclass(frozen=True)
class Trial:
    """The measurement of one batch size: its peak (None if the step did not finish), the median seconds of a step (None
    if it was not timed), and why it does not fit.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None
    seconds: float | None = None
    why: str = ""

    @property
    def samples_per_second(self) -> float | None:
        """`size / seconds`."""
        return self.size / self.seconds if self.seconds else None


@dataclass(frozen=True)
class BatchSizeResult:
    """All trials of a search. `print(result)` shows one line per size and the recommendation.

    Attributes:
        trials: every size tried, in order.
        limit: the bytes that a step may take; None if only a failed allocation counts.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`.
        notes: sentences that qualify the result.
        complete: whether the search ended by itself; False after an interrupt, or when its time was over.
    """

    trials: tuple[Trial, ...]
    limit: int | None = None
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    complete: bool = True

    @property
    def fits(self) -> bool:
        """Whether any size fits."""
        return any(trial.fits for trial in self.trials)

    @property
    def largest(self) -> int:
        """The largest batch size that fits; raises NothingFitsError if none does."""
        if not self.fits:
            raise NothingFitsError(self.sentence())
        return max(trial.size for trial in self.trials if trial.fits)

    @property
    def bounded(self) -> bool:
        """Whether a larger size was tried and does not fit."""
        return self.complete and not all(trial.fits for trial in self.trials)

    @property
    def best(self) -> Trial:
        """The trial of the size that trains the most samples per second; of the largest if none was timed."""
        _ = self.largest  # raises if nothing fits
        return max((t for t in self.trials if t.fits), key=lambda t: (t.samples_per_second or 0.0, t.size))

    @property
    def fastest(self) -> int:
        """The batch size of `best`."""
        return self.best.size

    def table(self) -> list[str]:
        """A header, and a line per size, in order of size."""
        rows = [_HEADER, *self._rows()] if self.trials else []
        return ["{:>8}{:>10}{:>10}{:>11}  {}".format(*row) for row in rows]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for trial in sorted(self.trials, key=lambda trial: trial.size):
            steps = _speed(1 / trial.seconds if trial.seconds else None)
            fits = "yes" if trial.fits else f"no: {trial.why}"
            yield str(trial.size), _bytes(trial.peak_bytes), steps, _speed(trial.samples_per_second), fits

    def __repr__(self) -> str:
        found = f"largest={self.largest}, fastest={self.fastest}" if self.fits else "no size fits"
        return f"BatchSizeResult({found}, {len(self.trials)} sizes tried on {self.device})"

    def _repr_html_(self) -> str:
        return html_table(self.sentence(), self._rows(), _HEADER)

    def sentence(self, name: str = "batch size ") -> str:
        """The recommendation. `name` precedes each size, for instance ``"--batch="``."""
        if not self.trials:
            return "no size was measured."
        by_size = {trial.size: trial for trial in self.trials}
        if not self.fits:
            smallest = by_size[min(by_size)]
            why = f"takes {_bytes(smallest.peak_bytes)}, and the limit is {_bytes(self.limit)}"
            if smallest.peak_bytes is None:
                why = f"does not run ({smallest.why})"
            return f"no size fits: {name}{smallest.size} {why}."
        largest, fastest = by_size[self.largest], self.best
        text = f"{name}{largest.size} is the largest that {'fits' if self.bounded else 'was tried and fits'}"
        if largest.peak_bytes is not None:
            limit = "" if self.limit is None else f" of {_bytes(self.limit)}"
            text += f" ({_bytes(largest.peak_bytes)}{limit})"
        if largest.samples_per_second is None:
            return f"{text}."
        text += f". It trains {_speed(largest.samples_per_second)} samples per second"
        if fastest is largest:
            return f"{text}, the most of those tried."
        return f"{text}; {name}{fastest.size} is the fastest, with {_speed(fastest.samples_per_second)}."

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        names = ("size", "fits", "peak_bytes", "why", "samples_per_second")
        return {
            "device": self.device,
            "limit_bytes": self.limit,
            "largest": self.largest if self.fits else None,
            "fastest": self.fastest if self.fits else None,
            "trials": [
                {name: getattr(trial, name) for name in names} | {"seconds_per_step": trial.seconds}
                for trial in self.trials
            ],
            "notes": list(self.notes),
            "complete": self.complete,
        }

    def __str__(self) -> str:
        return "\n".join([*self.table(), *(f"note: {note}" for note in self.notes), self.sentence()])


def _speed(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _bytes(count: int | None) -> str:
    return "-" if count is None else written_bytes(count)


@dataclass(frozen=True)
class Search:
    """Which sizes are tried: `start`, then twice the last up to `max_size`; `until_flat`: while samples/s rise."""

    start: int | None = None  # 8, or less where `max_size` is
    multiple_of: int = 1
    max_size: int | None = None
    until_flat: bool = False
    # As the user writes the first three.
    names: tuple[str, str, str] = ("start=", "multiple_of=", "max_size=")

    def __post_init__(self) -> None:
        for name, value in zip(self.names, (self.start, self.multiple_of)):
            if value is not None and value < 1:
                raise UsageError(f"{name}{value} is less than 1. Example: {name}8")
        first = -(-(self.start or 1) // self.multiple_of) * self.multiple_of
        if self.max_size is not None and self.max_size < first:
            name, most = self.names[1 if self.start is None else 0], self.names[2]
            raise UsageError(
                f"{most}{self.max_size} is less than the first size, {first} ({name}{self.start or self.multiple_of}). "
                f"Use {most}{first} or more, or a smaller {name.strip(' =')}"
            )

    def next_size(self, trials: Sequence[Trial], limit: int | None) -> int | None:
        """The size to try after these trials, of which a step may take `limit` bytes; None when the search is over."""
        step = self.multiple_of
        ceiling = (self.max_size or sys.maxsize) // step * step
        if not trials:
            return min(-(-(self.start or 8) // step) * step, ceiling)
        low = max((trial.size for trial in trials if trial.fits), default=0)
        high = min((trial.size for trial in trials if not trial.fits), default=None)
        if high is not None:
            return None if high - low <= step else (low + high) // 2 // step * step
        if low >= ceiling or (self.until_flat and flat_since(trials)):
            return None
        points = sorted((one.size, one.peak_bytes) for one in trials if one.peak_bytes is not None)
        first = min((size for size, peak in points if peak >= points[-1][1]), default=low)
        if low >= UNCHANGING * first:
            raise UsageError(
                f"sizes from {first} to {low} take the same bytes. If the data set is that small, use "
                f"{self.names[2]}{first}. If not, check that the step uses its batch size (--vary may name the wrong "
                f"option), or begin with a larger size: {self.names[0]}{low}."
            )
        grown = min(2 * low, ceiling)
        if limit is not None and points:  # the line through the last two sizes meets the limit here
            (x0, y0), (x1, y1) = [(0, 0), *points][-2:]
            if y1 > y0:
                grown = min(grown, int(x1 + (limit - y1) * (x1 - x0) / (y1 - y0)))
        return max(grown // step * step, low + step)


def flat_since(trials: Sequence[Trial]) -> int | None:
    """The size from which the samples per second have not risen for two doublings; None if they still rise."""
    speeds = {trial.size: trial.samples_per_second or 0.0 for trial in trials if trial.seconds}
    early = {size: speed for size, speed in speeds.items() if DOUBLED_TWICE * size <= max(speeds)}
    if not early:
        return None
    since = max(early, key=early.__getitem__)
    risen = max(speed for size, speed in speeds.items() if size not in early)
    return since if risen < RISE * early[since] else None


@checks_keywords
def find_batch_size(
    step: Callable[[int], object],
    start: int | None = None,
    *,
    limit: int | str | None = None,
    device: torch.device | str | None = None,
    max_size: int | None = None,
    multiple_of: int = 1,
    rounds: int = 3,
    model: nn.Module | Sequence[nn.Module] = (),
    optimizer: Optimizer | Sequence[Optimizer] = (),
    restore: Iterable[Any] = (),
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> BatchSizeResult:
    """The largest batch size whose training step fits into memory, and how fast each size tried is.

    On a GPU a size fails when an allocation does. A CPU swaps instead, so there the bytes of all tensors at the step's
    peak are compared with `limit`.

    Each size runs one step to warm up, one to measure memory, and `rounds` that are timed. **They train the model**:
    pass the model and the optimizer, and they are restored to the bit, including gradients and buffers. Random state is
    always restored.

    Args:
        step: runs one whole training step with a batch of exactly this many samples.
        start: the first size (default 8, or what `max_size` allows). Sizes grow from it, and shrink if it doesn't fit.
        limit: bytes, or text such as ``"4 GiB"``. Default on a CPU: what the machine or the container has left, less
            10 % or 512 MiB, plus what tensors hold already. Default on a GPU: none.
        device: a CPU or a CUDA device whose memory is measured. Default: the model's; without a model, CUDA if
            this process has used it, else the CPU.
        max_size: the largest size tried.
        multiple_of: sizes are multiples of it.
        rounds: timed steps per size; 0 times none.
        model, optimizer: one or several of each, restored afterwards.
        restore: other objects with `state_dict` and `load_state_dict` to restore: a scheduler, a scaler,
            a `MixedPrecision`.
        on_trial: called with each `Trial`.

    Returns:
        A `BatchSizeResult`: `largest`, `fastest`, `trials`; print it for a table.

    Raises:
        NothingFitsError: not even one multiple fits.
        UsageError: an argument out of range; no limit is known on this system; the bytes don't depend on the size;
            several ranks.
        Exception: any other error of the step.

    >>> import torch, mezzo
    >>> model = torch.nn.Linear(100, 10)
    >>> def step(batch_size):
    ...     model(torch.randn(batch_size, 100)).sum().backward()
    ...     model.zero_grad()
    >>> found = mezzo.find_batch_size(step, limit="1 MB", multiple_of=64, rounds=0, model=model)
    >>> found.largest % 64
    0
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    parameters = [parameter for one in models for parameter in one.parameters()]
    default = "cuda" if torch.cuda.is_initialized() else "cpu"
    place = torch.device(device or (parameters[0].device if parameters else default))
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(place)!r}: memory can be measured on cpu and cuda devices only")
    if rounds < 0:
        raise UsageError(f"rounds={rounds} is less than 0: it is the number of timed steps. Example: 3")
    search = Search(start, multiple_of, max_size)
    if distributed.is_distributed():
        raise UsageError(
            "find_batch_size runs in one process only: if one rank ran out of memory, the others would wait forever. "
            "Call it before torch.distributed.init_process_group, or in a separate process."
        )
    snapshot = Snapshot(models, [*optimizers, *restore])
    most = parse_bytes(limit, "limit=") if limit is not None else None
    if limit is None and place.type == "cpu":
        most = spendable_bytes() + _peak_bytes(place)
    tried: list[Trial] = []
    try:
        while (size := search.next_size(tried, most)) is not None:
            drop_windows(models)  # of a step that failed half-way
            for parameter in parameters:
                parameter.grad = None
            tried.append(_try_size(step, size, place, most, rounds))
            on_trial(tried[-1])
    finally:
        drop_windows(models)
        snapshot.restore()
    result = BatchSizeResult(tuple(tried), most, str(place))
    _ = result.largest  # raises if nothing fits
    return result


def _try_size(
    step: Callable[[int], object], size: int, device: torch.device, limit: int | None, rounds: int
) -> Trial:
    """Run steps of one size: one to warm up, one measured for memory, `rounds` timed."""
    cuda = device.type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    with torch.cuda.device(device) if cuda else contextlib.nullcontext():
        try:
            step(size)
            gc.collect()  # reference cycles of an earlier size don't count for this one
            peak = _peak_bytes(device, lambda: step(size))
            if limit is not None and peak > limit:
                return Trial(size, fits=False, peak_bytes=peak, why=OVER)
            wait()
            times = [time.perf_counter()]
            for _ in range(rounds):
                step(size)
                wait()
                times.append(time.perf_counter())
            seconds = float(np.median(np.diff(times))) if rounds else None
            return Trial(size, fits=True, peak_bytes=peak, seconds=seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Kept as text: outside this block no traceback holds the failed step's tensors.
            why = ". ".join(str(error).split(". ")[:2]).strip() or OUT_OF_MEMORY
        finally:
            if cuda:
                gc.collect()
                torch.cuda.empty_cache()
    return Trial(size, fits=False, why=why)


def _peak_bytes(device: torch.device, run: Callable[[], object] = lambda: None) -> int:
    """The most tensor bytes that are alive at once while `run` runs."""
    watch = PeakTensorBytes(device.type)
    watch.start()
    try:
        run()
    finally:
        record = watch.stop()
    return record.peak_bytes


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (RuntimeError, MemoryError)) and MEMORY_ERROR.search(repr(error)):
            return True
        error = error.__cause__
    return False


def spendable_bytes(root: Path = Path("/")) -> int:
    """Bytes that a process can allocate now without swapping, less 10 % or 512 MiB (the larger) for all but tensors."""
    try:
        text = (root / "proc/meminfo").read_text()
        left = [1024 * int(re.findall(r"^MemAvailable: *(\d+)", text, re.MULTILINE)[0])]
    except (OSError, IndexError):
        raise UsageError(
            "the available memory of this system is unknown. Give the bytes that a step may take as the limit, such as "
            "8GiB"
        ) from None
    groups, top = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    text = groups.read_text() if groups.exists() else ""
    for path in re.findall(r"^0::/(.*)$", text, re.MULTILINE):
        for place in (top / path, *(top / path).parents):  # the control groups (version 2) above this process
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max": no limit here
                most, used = (int((place / f"memory.{name}").read_text()) for name in ("max", "current"))
                cache = re.findall(r"^inactive_file (\d+)", (place / "memory.stat").read_text(), re.MULTILINE)
                left.append(most - used + sum(map(int, cache)))
    return max(1, min(left) - max(int(MARGIN * min(left)), LEAST_MARGIN))
