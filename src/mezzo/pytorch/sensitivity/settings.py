"""Settings: what a probe in another process is to measure; a file beside the one that it writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mezzo.core.errors import UsageError, unknown_name
from mezzo.pytorch.sensitivity.measure import DTYPES


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        format: the lower format, ``bf16`` or ``fp16``.
        steps: updates that are looked at, at least 1.
        first: updates that go by before.

    Raises:
        UsageError: another format, a number out of range.
    """

    format: str = "bf16"
    steps: int = 6
    first: int = 0

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise unknown_name("format", self.format, DTYPES, where="sensitivity: ")
        if self.steps < 1 or self.first < 0:
            raise UsageError(
                f"sensitivity of {self.steps} steps after {self.first}: give 1 or more, and 0 or more"
            )

    def write(self, results: Path) -> None:
        """Put them where a probe that writes `results` looks for them."""
        _place(results).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def remove(results: Path) -> None:
        """Delete them."""
        _place(results).unlink(missing_ok=True)

    @classmethod
    def beside(cls, results: Path) -> Settings:
        """Those that were written for `results`; the usual ones where there are none."""
        place = _place(results)
        return cls(**json.loads(place.read_text(encoding="utf-8"))) if place.exists() else cls()


def _place(results: Path) -> Path:
    return results.with_suffix(".request.json")
