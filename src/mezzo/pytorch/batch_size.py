"""The largest batch size whose training step fits into memory, and the speed of each size tried.

Sizes double until one does not fit, then the gap is bisected. A CPU that allocates too much swaps instead of failing,
so with a limit sizes grow no further than a line through the last two predicts to fit.
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
MEMORY_ERROR = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|ALLOC(ATION)?_FAILED|DefaultCPUAllocator: (can't|not enough)"
)


class NothingFitsError(MezzoError, RuntimeError):
    """Not even the smallest batch size fits into memory."""


@dataclass(frozen=True)
class Trial:
    """The measurement of one batch size: its peak (None if the step did not finish), the speed (None if it was not
    timed), and why it does not fit.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None
    samples_per_second: float | None = None
    why: str = ""


@dataclass
class BatchSizeResult:
    """All trials of a search. `print(result)` shows one line per size and the recommendation.

    Attributes:
        trials: every size tried, in order.
        limit: the bytes that a step may take; None if only a failed allocation counts.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`.
        notes: sentences that qualify the result.
    """

    trials: list[Trial] = field(default_factory=list)
    limit: int | None = None
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)

    @property
    def largest(self) -> int:
        """The largest batch size that fits; 0 if none does."""
        return max((trial.size for trial in self.trials if trial.fits), default=0)

    @property
    def best(self) -> Trial:
        """The trial of the size that trains the most samples per second; of the largest if none was timed."""
        fit = [trial for trial in self.trials if trial.fits]
        return max(fit, key=lambda one: (one.samples_per_second or 0.0, one.size), default=Trial(0, False))

    @property
    def fastest(self) -> int:
        """The batch size of `best`."""
        return self.best.size

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for trial in sorted(self.trials, key=lambda trial: trial.size):
            peak = "-" if trial.peak_bytes is None else written_bytes(trial.peak_bytes)
            speed = "-" if trial.samples_per_second is None else f"{trial.samples_per_second:.2f}"
            yield str(trial.size), peak, speed, "yes" if trial.fits else f"no: {trial.why}"

    def sentence(self) -> str:
        """The recommendation."""
        if not self.trials:
            return "no size was measured."
        if not self.largest:
            smallest = min(self.trials, key=lambda trial: trial.size)
            return f"no size that was tried fits, not even batch size {smallest.size}: {smallest.why}."
        text = f"batch size {self.largest} is the largest tried that fits"
        if self.best.samples_per_second is not None:
            text += (
                f"; {self.fastest} is the fastest, with {self.best.samples_per_second:.2f} samples per second"
            )
        return f"{text}."

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        values = asdict(self)
        limit, largest, fastest = values.pop("limit"), self.largest or None, self.fastest or None
        return {"limit_bytes": limit, "largest": largest, "fastest": fastest, **values}

    def __str__(self) -> str:
        lines = ["{:>8}{:>10}{:>12}  {}".format(*row) for row in (_HEADER, *self._rows())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.sentence()])

    def __repr__(self) -> str:
        sizes = f"largest={self.largest}, fastest={self.fastest}"
        return f"BatchSizeResult({sizes}, {len(self.trials)} sizes tried on {self.device})"

    def _repr_html_(self) -> str:
        return html_table(self.sentence(), self._rows(), _HEADER)


def search(
    found: BatchSizeResult,
    measure: Callable[[int], Trial],
    start: int | None = None,
    max_size: int | None = None,
    *,
    until_flat: bool = False,
) -> None:
    """Measure sizes from `start` (8, or less where `max_size` is) to `max_size`, and append each trial to `found`.

    A trial that takes more than `found.limit` does not fit. `until_flat` ends the search when samples/s no longer rise.
    """
    last = sys.maxsize if max_size is None else max_size
    if not 1 <= (1 if start is None else start) <= last:
        raise UsageError(
            f"start={start}, max_size={max_size} (--start, --max): give sizes of at least 1, and a largest that is "
            "not below the first size. Example: --start 8 --max 64"
        )
    low, high = 0, last + 1
    while low + 1 < high:
        if not found.trials:
            size = min(start or 8, last)
        elif not all(trial.fits for trial in found.trials):
            size = (low + high) // 2
        elif until_flat and _is_flat(found.trials):
            found.notes.append(f"samples/s no longer rise. For larger sizes: --max {16 * low}")
            return
        else:
            size = min(_larger(found), last)
        trial = measure(size)
        if found.limit is not None and (trial.peak_bytes or 0) > found.limit:
            trial = replace(trial, fits=False, why=f"over the limit of {written_bytes(found.limit)}")
        found.trials.append(trial)
        low, high = (size, high) if trial.fits else (low, size)


def _larger(found: BatchSizeResult) -> int:
    """Twice the last size; with a limit, no more than a line through the last two sizes and their bytes predicts."""
    points = [(trial.size, trial.peak_bytes or 0) for trial in found.trials]
    (x0, y0), (x1, y1) = [(0, 0), *points][-2:]
    since = min(size for size, peak in points if peak >= y1)
    if x1 >= 64 * since:
        raise UsageError(
            f"sizes from {since} to {x1} take the same bytes. If the data set is that small, use --max {since} "
            f"(max_size={since}). If not, check that the step uses its batch size (--vary may name the wrong option), "
            f"or begin with a larger size: --start {x1} (start={x1})."
        )
    if found.limit is None or y1 <= y0:
        return 2 * x1
    return max(x1 + 1, min(2 * x1, int(x1 + (found.limit - y1) * (x1 - x0) / (y1 - y0))))


def _is_flat(trials: Sequence[Trial]) -> bool:
    """Whether samples/s have not risen by 5 % since a size that is at most a fourth of the last."""
    speeds = [trial.samples_per_second or 0.0 for trial in trials]
    early = sum(4 * trial.size <= trials[-1].size for trial in trials)
    return early > 0 and max(speeds[early:]) < 1.05 * max(speeds[:early])


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
    """The largest batch size whose training step fits into memory, and how fast each size tried is.

    On a GPU a size fails when an allocation does. A CPU swaps instead, so there the bytes of all tensors at the step's
    peak are compared with `limit`.

    Each size runs one step to warm up, one to measure memory, and `rounds` that are timed. **They train the model**:
    pass the model and the optimizer, and they are restored to the bit, including gradients and buffers. Random state is
    always restored.

    Args:
        step: runs one whole training step with a batch of exactly this many samples.
        start: the first size (default 8, or what `max_size` allows). Sizes grow from it, and shrink if it doesn't fit.
        limit: bytes, or text such as ``"4 GiB"``. Default on a CPU: what the machine has left, less 10 % or 512 MiB,
            plus what tensors hold already. Default on a GPU: none.
        device: whose memory is measured. Default: the model's; without one CUDA, if this process uses it, else the CPU.
        max_size: the largest size tried.
        rounds: timed steps per size; 0 times none.
        model, optimizer: one or several of each, restored afterwards.
        restore: other objects with `state_dict` and `load_state_dict`: a scheduler, a scaler, a `MixedPrecision`.

    Returns:
        A `BatchSizeResult`: `largest`, `fastest`, `trials`; print it for a table.

    Raises:
        NothingFitsError: not even one sample fits.
        UsageError: an argument out of range; no known limit; several ranks; bytes that don't depend on the size.
        Exception: any other error of the step.

    >>> import torch, mezzo
    >>> model = torch.nn.Linear(100, 10)
    >>> def step(batch_size):
    ...     model(torch.randn(batch_size, 100)).sum().backward()
    ...     model.zero_grad()
    >>> found = mezzo.find_batch_size(step, limit="1 MB", rounds=0, model=model)
    >>> found.largest > 100
    True
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    parameters = [parameter for one in models for parameter in one.parameters()]
    default = "cuda" if torch.cuda.is_initialized() else "cpu"
    place = torch.device(device or (parameters[0].device if parameters else default))
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(place)!r}: memory can be measured on cpu and cuda devices only")
    if distributed.is_distributed():
        raise UsageError(
            "find_batch_size runs in one process only: if one rank ran out of memory, the others would wait forever. "
            "Call it before torch.distributed.init_process_group, or in a separate process."
        )
    cuda = place.type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    snapshot = Snapshot(models, [*optimizers, *restore])
    found = BatchSizeResult(device=str(place))
    if limit is not None:
        found.limit = parse_bytes(limit, "limit=")
    elif place.type == "cpu":
        found.limit = spendable_bytes() + _peak_bytes(place)

    def measure(size: int) -> Trial:
        drop_windows(models)  # of a step that failed half-way
        for parameter in parameters:
            parameter.grad = None
        try:
            step(size)
            gc.collect()  # reference cycles of an earlier size don't count for this one
            peak = _peak_bytes(place, lambda: step(size))
            wait()
            times = [time.perf_counter()]
            for _ in range(rounds if found.limit is None or peak <= found.limit else 0):
                step(size)
                wait()
                times.append(time.perf_counter())
            speed = size / float(np.median(np.diff(times))) if times[1:] else None
            return Trial(size, fits=True, peak_bytes=peak, samples_per_second=speed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Kept as text: outside this block no traceback holds the failed step's tensors.
            why = ". ".join(str(error).split(". ")[:2]).strip() or "out of memory"
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        return Trial(size, fits=False, why=why)

    try:
        with torch.cuda.device(place) if cuda else contextlib.nullcontext():
            search(found, measure, start, max_size)
    finally:
        drop_windows(models)
        snapshot.restore()
    if not found.largest:
        raise NothingFitsError(found.sentence())
    return found


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
    return max(1, min(left) - max(min(left) // 10, 512 * 1024**2))
