"""What is tuned, as a value that is checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.tuning import GOALS
from mezzo.pytorch.sensitivity.measure import DTYPES
from mezzo.verify.request import Request


@dataclass(frozen=True)
class TuneRequest:
    """A script, the preset to begin from, and what may be spent and lost.

    Args:
        target: the script's path, or a module's name where `is_module`.
        argv: the script's own arguments.
        preset: ``bf16`` or ``fp16``: what every module is to run in unless there is a reason against it.
        budget: updates in which modules are measured.
        first: updates that go by before, unmeasured: the first steps are not like the later ones.
        margin: the largest expected change of the loss, as a share of it; and the comparison's margin.
        goal: a key of `mezzo.core.tuning.GOALS`.
        seeds: pairs of runs of the comparison.
        metric: where the script prints its final metric, for the comparison.
        demo: the demo's name, if the script is one.

    Raises:
        UsageError: a number out of range, or no such script. UnknownNameError: another preset or goal.
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False
    preset: str = "bf16"
    budget: int = 6
    first: int = 10
    margin: float = 0.005
    goal: str = "time"
    seeds: int = 3
    metric: str | None = None
    demo: str | None = None

    def __post_init__(self) -> None:
        if self.preset not in DTYPES:
            raise unknown_name("preset to tune", self.preset, DTYPES)
        if self.goal not in GOALS:
            raise unknown_name("goal", self.goal, GOALS)
        if self.budget < 1:
            raise UsageError(f"--budget {self.budget}: give 1 or more steps to measure in (6 is usual)")
        if self.first < 0:
            raise UsageError(f"--first {self.first}: give the number of steps that go by before, 0 or more")
        _ = self.comparison((self.preset,))  # which checks the rest

    def comparison(self, precisions: tuple[str, ...]) -> Request:
        """The comparison of these precisions with FP32."""
        return Request(
            target=self.target,
            argv=self.argv,
            is_module=self.is_module,
            precisions=precisions,
            seeds=self.seeds,
            margin=self.margin,
            metric=self.metric,
            demo=self.demo,
        )

    @property
    def stem(self) -> str:
        """A short name for the script."""
        return self.demo or (self.target if self.is_module else Path(self.target).resolve().stem)
