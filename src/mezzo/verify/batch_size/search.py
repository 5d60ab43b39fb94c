"""The search over an unmodified script: for each precision, one size after another until it is known what fits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mezzo.core.batch_result import BatchSizeResult, remarks
from mezzo.core.batch_search import Trial
from mezzo.core.errors import UsageError
from mezzo.pytorch.free_memory import spendable_bytes
from mezzo.verify.batch_size.child import FailedError, explained, run_size
from mezzo.verify.batch_size.request import BatchSizeRequest
from mezzo.verify.children import LAUNCH, terminated_like_an_interrupt
from mezzo.verify.folder import locked
from mezzo.verify.progress import Silent, Watcher

FILE = "batch-size.json"
OURS = (FILE, "runs")


def search_script(
    request: BatchSizeRequest,
    folder: Path | None = None,
    *,
    watcher: Watcher | None = None,
    command: Sequence[str] = LAUNCH,
) -> dict[str, BatchSizeResult]:
    """Find the largest batch size under each of the request's precisions.

    Every size is a process of its own, one at a time; it is ended as soon as it has taken enough steps, so a script
    that writes files writes those of an unfinished run.

    Args:
        request: what is sought.
        folder: keeps each run's records and output; None keeps nothing.
        watcher: told of every run; by default nothing is said.
        command: what runs a request's file, in place of `python -m mezzo.pytorch.launch` (for tests).

    Returns:
        Precision -> result. A result in which nothing fits says what the smallest size took.

    Raises:
        ScriptError: the script fails at the first size.
        UsageError: it has no such option, or its bytes don't depend on it; the folder can't be written; no limit is
            known on this system.
        UnsupportedPrecisionError: a precision that this machine can't run.
    """
    limit = request.limit if request.limit is not None else spendable_bytes()
    with _place(folder) as runs, watcher or Silent() as told, terminated_like_an_interrupt():
        one = _Search(request, runs, limit, told, tuple(command))
        return {precision: one.under(precision) for precision in request.precisions}


class _Search:
    def __init__(
        self,
        request: BatchSizeRequest,
        runs: Path,
        limit: int | None,
        told: Watcher,
        command: tuple[str, ...],
    ) -> None:
        self._request = request
        self._runs = runs
        self._limit = limit
        self._told = told
        self._command = command
        self._count = 0

    def under(self, precision: str) -> BatchSizeResult:
        """The result under one precision."""
        request = self._request
        search = request.search(self._limit)
        device, failed = "", ""
        while not failed and (size := search.next_size) is not None:
            try:
                trial, device = self._try(precision, size)
            except FailedError as failure:
                if not search.trials:
                    raise explained(request, size, failure) from None
                failed = _why_no_further(size, failure, "larger" if search.counted else "smaller")
                break
            if device not in ("", "cpu"):
                search = replace(search, limit=request.limit)
            elif self._limit is None:
                raise UsageError(
                    "this system does not say how much memory is available: give --limit, such as --limit 8GiB"
                )
            search = search.observe(trial)
        if search.unchanging:
            sizes = [trial.size for trial in search.trials]
            raise UsageError(
                f"{request.target} takes the same bytes at every size from {min(sizes)} to {max(sizes)}, so "
                f"{request.vary.spelling} does not seem to be its batch size. If it is, give a larger --start, such as "
                f"{max(sizes)}."
            )
        notes = [*remarks(search), *([failed] if failed else [])]
        return BatchSizeResult(search, device or "cpu", tuple(notes))

    def _try(self, precision: str, size: int) -> tuple[Trial, str]:
        self._count += 1
        name = f"{precision}  {self._request.vary.written(size)}"
        self._told.begin(name, self._count, self._count, self._request.steps)
        outcome = "failed"
        try:
            trial, device = run_size(
                self._request,
                precision,
                size,
                self._runs,
                self._limit,
                self._told.steps,
                self._command,
            )
            outcome = "fits" if trial.fits else f"does not fit: {trial.why}"
            return trial, device
        except KeyboardInterrupt:
            outcome = "stopped"
            raise
        finally:
            self._told.end(outcome)


def _why_no_further(size: int, failure: FailedError, direction: str) -> str:
    lines = [line for line in str(failure).splitlines() if line.strip()]
    last = f": {lines[-1].strip()}" if len(lines) > 1 else ""
    return f"no {direction} size was tried, since the script {lines[0].partition('. Its output')[0]} at {size}{last}"


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """The folder for the runs' files."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="mezzo-batch-size-") as name:
            yield Path(name)
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder}: is a file. Name a folder.")
        names = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
        if strangers := [name for name in names if name not in OURS and not name.startswith(".")]:
            raise UsageError(
                f"--out {folder}: holds other files ({', '.join(strangers[:5])}). Name an empty or a new folder."
            )
        runs = folder / "runs"
        with locked(folder):
            runs.mkdir(exist_ok=True)
            for old in runs.iterdir():
                old.unlink()
            yield runs
    except OSError as error:
        raise UsageError(
            f"--out {folder}: {error.strerror or error}. Name a folder that can be written."
        ) from error
