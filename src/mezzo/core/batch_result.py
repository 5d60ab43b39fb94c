"""What a search for a batch size found: each size's bytes and speed, the largest, the fastest, and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mezzo.core.batch_search import BatchSearch, NothingFitsError, Trial
from mezzo.core.byte_counts import written_bytes

HEADS = ("size", "peak", "steps/s", "samples/s", "fits")
MISSING = "-"
MATTERS = 0.02
"""The fastest size is named beside the largest if it is faster by more than this share."""


@dataclass(frozen=True)
class BatchSizeResult:
    """What was tried, and what came of it.

    `print(result)` shows a line for each size and the recommendation.

    Attributes:
        search: the trials in their order, and the limit.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`.
        notes: what the reader should know of the trials.
    """

    search: BatchSearch
    device: str
    notes: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every size tried, in order."""
        return self.search.trials

    @property
    def limit(self) -> int | None:
        """The bytes that a step might take; None where only a failed allocation told."""
        return self.search.limit

    @property
    def fits(self) -> bool:
        """Whether any size does."""
        return self.search.largest is not None

    @property
    def largest(self) -> int:
        """The largest batch size that fits.

        Raises:
            NothingFitsError: none does.
        """
        found = self.search.largest
        if found is None:
            raise NothingFitsError(self.sentence())
        return found.size

    @property
    def fastest(self) -> int:
        """The batch size that fits and trains the most samples a second; the largest where none was timed.

        Raises:
            NothingFitsError: none fits.
        """
        found = self.search.fastest
        return self.largest if found is None else found.size

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each size in order of size, under `HEADS`."""
        return [
            (
                str(trial.size),
                MISSING if trial.peak_bytes is None else written_bytes(trial.peak_bytes),
                _speed(1 / trial.seconds if trial.seconds else None),
                _speed(trial.samples_per_second),
                "yes" if trial.fits else f"no: {trial.why}",
            )
            for trial in sorted(self.trials, key=lambda trial: trial.size)
        ]

    def sentence(self, name: str = "batch size", *, join: str = " ") -> str:
        """The recommendation in a sentence or two; `name` and `join` say how a size is written for the user."""
        largest, fastest = self.search.largest, self.search.fastest
        limit = f" of {written_bytes(self.limit)}" if self.limit is not None else ""
        if largest is None:
            return self._nothing(name, join)
        took = f" ({written_bytes(largest.peak_bytes)}{limit})" if largest.peak_bytes is not None else ""
        text = f"{name}{join}{largest.size} is the largest that {self._why_no_larger()}{took}"
        speed = largest.samples_per_second
        if fastest is None or speed is None or fastest.samples_per_second is None:
            return f"{text}."
        gain = fastest.samples_per_second / speed - 1
        if fastest.size == largest.size:
            return f"{text}, and trains the most samples a second: {_speed(speed)}."
        if gain < MATTERS:
            return f"{text}. It trains {_speed(speed)} samples a second; no smaller one is notably faster."
        return (
            f"{text}. {name}{join}{fastest.size} trains more samples a second: "
            f"{_speed(fastest.samples_per_second)}, against {_speed(speed)}."
        )

    def _why_no_larger(self) -> str:
        """Fits, or merely was tried."""
        ended = any(not trial.fits for trial in self.trials) or self.search.refused is not None
        return "fits" if ended else "was tried, and it fits"

    def _nothing(self, name: str, join: str) -> str:
        if not self.trials:
            return f"no {name} was tried."
        smallest = min(self.trials, key=lambda trial: trial.size)
        if smallest.peak_bytes is None:
            return f"nothing fits: {name}{join}{smallest.size} does not run ({smallest.why})."
        limit = f", and the limit is {written_bytes(self.limit)}" if self.limit is not None else ""
        return f"nothing fits: {name}{join}{smallest.size} takes {written_bytes(smallest.peak_bytes)}{limit}."

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        largest, fastest = self.search.largest, self.search.fastest
        return {
            "device": self.device,
            "limit_bytes": self.limit,
            "largest": None if largest is None else largest.size,
            "fastest": None if fastest is None else fastest.size,
            "refused": self.search.refused,
            "trials": [
                {
                    "size": trial.size,
                    "fits": trial.fits,
                    "peak_bytes": trial.peak_bytes,
                    "seconds_per_step": trial.seconds,
                    "samples_per_second": trial.samples_per_second,
                    "why": trial.why,
                }
                for trial in self.trials
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = columns([HEADS, *self.rows()])
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.sentence()])


def _speed(value: float | None) -> str:
    """Four digits, written out: 5.619e+04 samples is no way to tell a user."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned text; the last column is flush left, all others flush right.

    >>> columns([("size", "fits"), ("8", "yes")])
    ['size  fits', '   8  yes']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths)), row[-1]]) for row in rows]


def remarks(search: BatchSearch) -> list[str]:
    """What the reader should know of a search's end, a sentence each."""
    found = []
    if search.reach is not None:
        found.append(
            f"from size {search.reach} on the bytes no longer grow with the size: the data may hold no more samples "
            "than that, so larger sizes don't count"
        )
    if search.refused is not None:
        found.append(
            f"size {search.refused} was not tried: it is expected to take "
            f"{written_bytes(int(search.expected(search.refused)))}, far beyond the limit"
        )
    return found
