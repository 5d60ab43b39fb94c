"""The largest batch size whose training step fits into memory, and the speed of each size tried.

Sizes grow by a factor until one fails, then the gap is halved down to one multiple. If bytes are measured against a
limit, a line through the nearest two measured sizes predicts the size at the limit, and that size is tried next. A size
predicted to take far more than the limit is not tried: a CPU that allocates too much does not fail but swaps.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.core.byte_counts import parse_bytes, written_bytes
from mezzo.core.errors import MezzoError, UsageError
from mezzo.pytorch import distributed
from mezzo.pytorch.memory import PeakTensorBytes
from mezzo.pytorch.snapshot import Snapshot

BEYOND = 0.10
"""A size is tried if it is predicted to take at most this share above the limit."""
UNCHANGING = 64
"""If sizes this factor apart take the same bytes, the step does not use the batch size."""
MARGIN, LEAST_MARGIN = 0.10, 512 * 1024**2
"""Share and bytes (the larger counts) of the available memory that are left for everything but tensors."""
MATTERS = 0.02
"""The fastest size is named if it is faster than the largest by more than this share."""
OVER, OUT_OF_MEMORY = "over the limit", "out of memory"

# In the errors of torch, CUDA's libraries and Python for a failed allocation.
_OUT_OF_MEMORY_TEXTS = (
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
        refused: the next larger size, if it was not tried because it is predicted to take far more than the limit.
        notes: sentences that qualify the result.
    """

    trials: tuple[Trial, ...]
    limit: int | None = None
    device: str = "cpu"
    refused: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def counted(self) -> list[Trial]:
        """The trials that fit, by size, without those whose batches may have held fewer samples than asked for."""
        end = _data_end(self.trials)
        return sorted((t for t in self.trials if t.fits and t.size < end), key=lambda trial: trial.size)

    @property
    def fits(self) -> bool:
        """Whether any size fits."""
        return bool(self.counted)

    @property
    def largest(self) -> int:
        """The largest batch size that fits.

        Raises:
            NothingFitsError: none does.
        """
        if not self.fits:
            raise NothingFitsError(self.sentence())
        return self.counted[-1].size

    @property
    def fastest(self) -> int:
        """The batch size that trains the most samples per second; `largest` if none was timed."""
        timed = [trial for trial in self.counted if trial.seconds]
        return max(timed, key=lambda trial: trial.samples_per_second or 0.0).size if timed else self.largest

    def table(self) -> list[str]:
        """A header, and a line per size, in order of size."""
        rows = [("size", "peak", "steps/s", "samples/s", "fits")]
        for trial in sorted(self.trials, key=lambda trial: trial.size):
            peak = "-" if trial.peak_bytes is None else written_bytes(trial.peak_bytes)
            steps = _speed(1 / trial.seconds if trial.seconds else None)
            fits = "yes" if trial.fits else f"no: {trial.why}"
            rows.append((str(trial.size), peak, steps, _speed(trial.samples_per_second), fits))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return ["  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths)), row[-1]]) for row in rows]

    def sentence(self, name: str = "batch size ") -> str:
        """The recommendation. `name` precedes each size, for instance ``"--batch="``."""
        if not self.fits:
            smallest = min(self.trials, key=lambda trial: trial.size)
            if smallest.peak_bytes is None or self.limit is None:
                return f"nothing fits: {name}{smallest.size} does not run ({smallest.why})."
            took, limit = written_bytes(smallest.peak_bytes), written_bytes(self.limit)
            return f"nothing fits: {name}{smallest.size} takes {took}, and the limit is {limit}."
        largest = self.counted[-1]
        bounded = self.refused is not None or not all(trial.fits for trial in self.trials)
        text = f"{name}{largest.size} is the largest that {'fits' if bounded else 'was tried, and it fits'}"
        if largest.peak_bytes is not None:
            limit = "" if self.limit is None else f" of {written_bytes(self.limit)}"
            text += f" ({written_bytes(largest.peak_bytes)}{limit})"
        fastest = next(trial for trial in self.counted if trial.size == self.fastest)
        most, speed = fastest.samples_per_second, largest.samples_per_second
        if most is None or speed is None:
            return f"{text}."
        if fastest is largest or most / speed - 1 < MATTERS:
            return f"{text}. It trains {_speed(speed)} samples per second; no smaller size is notably faster."
        return f"{text}. {name}{fastest.size} trains more samples per second: {_speed(most)}, against {_speed(speed)}."

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        trials = [{**asdict(one), "samples_per_second": one.samples_per_second} for one in self.trials]
        for trial in trials:
            trial["seconds_per_step"] = trial.pop("seconds")
        return {
            "device": self.device,
            "limit_bytes": self.limit,
            "largest": self.largest if self.fits else None,
            "fastest": self.fastest if self.fits else None,
            "refused": self.refused,
            "trials": trials,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join([*self.table(), *(f"note: {note}" for note in self.notes), self.sentence()])


@dataclass(frozen=True)
class Search:
    """Which sizes are tried. The methods' `limit` is the bytes that a step may take; None if only failure counts.

    Args:
        start: the first size, rounded up to a multiple.
        multiple_of: every size is a multiple of it; it is also the smallest size.
        factor: how sizes grow, above 1.
        max_size: the largest size tried.

    Raises:
        UsageError: an argument out of range.
    """

    start: int = 8
    multiple_of: int = 1
    factor: float = 2.0
    max_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "multiple_of"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: give 1 or more")
        if not (1.0 < self.factor < math.inf):
            raise UsageError(f"factor={self.factor}: sizes grow by it, so give a number above 1, such as 2")
        if self.max_size is not None and self.max_size < self.multiple_of:
            raise UsageError(
                f"max_size={self.max_size} (--max) is below multiple_of={self.multiple_of} (--multiple-of), so there "
                "is no size to try: raise max_size or lower multiple_of"
            )

    def next_size(self, trials: Sequence[Trial], limit: int | None) -> int | None:
        """The size to try after these trials; None when the search is over."""
        step = self.multiple_of
        ceiling = math.inf if self.max_size is None else self.max_size // step * step
        if not trials:
            return int(min(-(-self.start // step) * step, ceiling))
        if _data_end(trials) < math.inf or unchanging(trials):
            return None
        low, high = _bracket(trials)
        aimed = self._aim(trials, limit)
        if high is not None:
            if high - low <= step:
                return None
            # Every other trial halves, because aiming alone may approach slowly.
            middle = (low + high) // 2 // step * step
            size = aimed if aimed is not None and len(trials) % 2 and aimed < high else middle
            return min(max(size, low + step), high - step)
        if low >= ceiling:
            return None
        grown = int(min(max(int(low * self.factor) // step * step, low + step), ceiling))
        if limit is None or predicted_bytes(trials, grown) <= limit:
            return grown
        size = low + step if aimed is None else min(max(aimed, low + step), grown)
        return None if _is_far_beyond(trials, size, limit) else size

    def _aim(self, trials: Sequence[Trial], limit: int | None) -> int | None:
        """The largest multiple that the line puts within the limit; None if the line does not rise."""
        (x0, y0), (x1, y1) = _line(trials)
        if limit is None or x1 == x0 or y1 <= y0:
            return None
        return int(x1 + (limit - y1) * (x1 - x0) / (y1 - y0)) // self.multiple_of * self.multiple_of

    def result(
        self, trials: Sequence[Trial], limit: int | None, device: str, notes: Iterable[str] = ()
    ) -> BatchSizeResult:
        """The result after the last trial, with notes on how the search ended."""
        found, refused = [], None
        if (end := _data_end(trials)) < math.inf:
            found.append(
                f"from size {end} on the bytes no longer grow with the size: the data may hold no more samples, so "
                "larger sizes don't count"
            )
        low, high = _bracket(trials)
        above = low + self.multiple_of
        may_grow = low and high is None and (self.max_size is None or above <= self.max_size)
        if may_grow and limit is not None and _is_far_beyond(trials, above, limit):
            refused, predicted = above, written_bytes(int(predicted_bytes(trials, above)))
            found.append(
                f"size {above} was not tried: it is predicted to take {predicted}, far more than the limit"
            )
        return BatchSizeResult(tuple(trials), limit, device, refused, (*found, *notes))


def predicted_bytes(trials: Sequence[Trial], size: int) -> float:
    """The bytes of a size, on the line through the nearest two measured sizes.

    With one measured size the line goes through zero, an upper bound for larger sizes. 0 if nothing was measured.
    """
    (x0, y0), (x1, y1) = _line(trials)
    return y1 if x1 == x0 else y1 + (size - x1) * (y1 - y0) / (x1 - x0)


def unchanging(trials: Sequence[Trial]) -> bool:
    """Whether sizes that are far apart all took the same bytes."""
    sizes, peaks = [trial.size for trial in trials], {trial.peak_bytes for trial in trials}
    return len(peaks) == 1 and None not in peaks and max(sizes) >= UNCHANGING * min(sizes)


def _data_end(trials: Sequence[Trial]) -> float:
    """The size from which bytes no longer grow (two larger sizes must show it): the data may hold no more samples."""
    measured = sorted((t.size, t.peak_bytes) for t in trials if t.fits and t.peak_bytes is not None)
    most = max((peak for _, peak in measured), default=0)
    at = [size for size, peak in measured if peak == most]
    if not at or measured[0][1] == most or sum(size > at[0] for size, _ in measured) < 2:
        return math.inf
    return at[0] if len(at) > 1 else next(size for size, _ in measured if size > at[0])


def _bracket(trials: Sequence[Trial]) -> tuple[int, int | None]:
    """The largest size that fits (0 if none), and the smallest that does not."""
    low = max((trial.size for trial in trials if trial.fits), default=0)
    return low, min((trial.size for trial in trials if not trial.fits), default=None)


def _line(trials: Sequence[Trial]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two measured (size, bytes) nearest to the limit; (0, 0) stands for a missing one."""
    points = sorted((t.size, t.peak_bytes) for t in trials if t.peak_bytes is not None)
    low, _ = _bracket(trials)
    below = [point for point in points if point[0] <= low]
    above = [point for point in points if point[0] > low]
    chosen = [(0, 0), (0, 0), *([*below[-1:], above[0]] if above else below)]
    return chosen[-2], chosen[-1]


def _is_far_beyond(trials: Sequence[Trial], size: int, limit: int) -> bool:
    """Whether a size is predicted to take far more than the limit; False until two sizes were measured."""
    measured = sum(trial.peak_bytes is not None for trial in trials)
    return measured > 1 and predicted_bytes(trials, size) > limit * (1 + BEYOND)


def _speed(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def find_batch_size(
    step: Callable[[int], object],
    start: int = 8,
    *,
    limit: int | str | None = None,
    device: torch.device | str | None = None,
    max_size: int | None = None,
    multiple_of: int = 1,
    factor: float = 2.0,
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
    pass the model and the optimizer, and they are restored to the bit, gradients, buffers and random state included
    (random state is always restored).

    Args:
        step: runs one whole training step with a batch of exactly this many samples.
        start: the first size. Sizes grow from it, and shrink if it doesn't fit.
        limit: bytes, or text such as ``"4 GiB"``. Default on a CPU: what the machine or the container has left, less
            10 % or 512 MiB, plus what tensors hold already. Default on a GPU: none.
        device: a CPU or a CUDA device whose memory is measured. Default: the model's; without a model, CUDA if
            this process has used it, else the CPU.
        max_size: the largest size tried.
        multiple_of: sizes are multiples of it.
        factor: how sizes grow.
        rounds: timed steps per size; 0 times none.
        model: one or several, restored afterwards.
        optimizer: one or several, restored afterwards.
        restore: other objects with `state_dict` and `load_state_dict` to restore: a scheduler, a scaler,
            a `MixedPrecision`.
        on_trial: called with each `Trial`.

    Returns:
        A `BatchSizeResult`: `largest`, `fastest`, `trials`; print it for a table.

    Raises:
        NothingFitsError: not even one multiple fits; the message says what it took.
        UsageError: an argument out of range; no limit is known on this system; the bytes don't depend on the size;
            several ranks (a rank that runs out of memory would leave the others waiting).
        Exception: any other error of the step, after everything is restored.

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
    place = _device_of(device, models)
    if rounds < 0:
        raise UsageError(f"rounds={rounds}: give how many steps are timed for each size, 0 or more")
    search = Search(start, multiple_of, factor, max_size)
    if distributed.is_distributed():
        raise UsageError(
            "find_batch_size runs in one process: if one rank runs out of memory, the others wait for ever. "
            "Call it before init_process_group, or in a separate process."
        )
    snapshot = Snapshot(models, [*optimizers, *restore])
    most = parse_bytes(limit) if limit is not None else None
    if limit is None and place.type == "cpu":
        spendable = spendable_bytes()
        if spendable is None:
            raise UsageError(
                "this system does not say how much memory is available. Give the bytes that a step may take, such as "
                "limit='8 GiB'."
            )
        most = max(1, spendable + _peak_bytes(place))
    tried: list[Trial] = []
    try:
        while (size := search.next_size(tried, most)) is not None:
            for parameter in chain.from_iterable(one.parameters() for one in models):
                parameter.grad = None  # of a step that failed half-way
            try:
                tried.append(_try_size(step, size, place, most, rounds))
            except Exception as error:
                if not tried or any(one.fits for one in tried):
                    raise
                raise NothingFitsError(
                    f"{search.result(tried, most, str(place)).sentence()} No smaller size can be tried, since {size} "
                    f"fails for another reason: {error}"
                ) from error
            on_trial(tried[-1])
    finally:
        snapshot.restore()
    if unchanging(tried):
        sizes = [trial.size for trial in tried]
        raise UsageError(
            f"the step takes the same bytes at every size from {min(sizes)} to {max(sizes)}: make a batch of "
            f"`step`'s argument's size in it. If it does, give a larger start, such as {max(sizes)}."
        )
    result = search.result(tried, most, str(place))
    if not result.fits:
        raise NothingFitsError(result.sentence())
    return result


def _try_size(
    step: Callable[[int], object], size: int, device: torch.device, limit: int | None, rounds: int
) -> Trial:
    """Run steps of one size: one to warm up, one measured for memory, `rounds` timed."""
    cuda, why = device.type == "cuda", ""
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    with torch.cuda.device(device) if cuda else contextlib.nullcontext():
        try:
            step(size)
            gc.collect()  # reference cycles of an earlier size don't count for this one
            peak = _peak_bytes(device, lambda: step(size))
            if limit is not None and peak > limit:
                return Trial(size, fits=False, peak_bytes=peak, why=OVER)
            seconds = []
            for _ in range(rounds):
                wait()
                start = time.perf_counter()
                step(size)
                wait()
                seconds.append(time.perf_counter() - start)
            return Trial(size, True, peak, statistics.median(seconds) if seconds else None)
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
        peak = watch.stop().peak_bytes
    return peak


def _device_of(device: torch.device | str | None, models: Sequence[nn.Module]) -> torch.device:
    first = next(chain.from_iterable(model.parameters() for model in models), None)
    default = "cuda" if torch.cuda.is_initialized() else "cpu"
    place = torch.device(device if device is not None else default if first is None else first.device)
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(place)!r}: memory is measured on cpu and cuda devices only")
    return place


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (RuntimeError, MemoryError)) and says_out_of_memory(repr(error)):
            return True
        error = error.__cause__
    return False


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text, or the end of a log, says that memory ran out."""
    return any(one in text for one in _OUT_OF_MEMORY_TEXTS)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that a process could allocate now without swapping; None if the system doesn't say.

    From Linux's `/proc/meminfo` and the limits of the process's control groups. Droppable file pages count as free.
    """
    try:
        text = (root / "proc/meminfo").read_text()
        machine = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return max(0, min([machine * 1024, *_left_of_groups(root)]))


def spendable_bytes(root: Path = Path("/")) -> int | None:
    """The available bytes less 10 % or 512 MiB (the larger), which are left for everything but tensors."""
    available = available_bytes(root)
    return None if available is None else max(0, available - max(int(MARGIN * available), LEAST_MARGIN))


def _left_of_groups(root: Path) -> Iterator[int]:
    """What each control group above this process has left, by versions 2 and 1."""
    versions = (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for (_, controllers, path), version in ((line.split(":", 2), v) for line in groups for v in versions):
        controller, limit, used, droppable = version
        if controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controller
        place = top / path.lstrip("/")
        while place.is_relative_to(top):
            try:
                left = int((place / limit).read_text()) - int((place / used).read_text())
                stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                yield left + int(stat.get(droppable, 0))
            except (OSError, ValueError):  # no such group, or "max": no limit here
                pass
            place = place.parent
