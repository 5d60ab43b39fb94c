"""Experiments of no work: each finds what a test wants it to find, or ends as it wants it to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzo.reproduce.experiment import Effort, Experiment, Finding, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def finding(name: str, *, holds: bool = True) -> Finding:
    return Finding(name, f"{name} is so.", f"{name} is 42.", holds)


def experiment(
    name: str,
    *findings: Finding,
    numbers: dict[str, Any] | None = None,
    ends: BaseException | None = None,
    draw: Callable[[dict[str, Any], Figure], None] | None = None,
) -> Experiment:
    """An experiment that reports twice, and then raises `ends` or returns the findings."""

    def run(effort: Effort) -> Outcome:
        effort.report("training, fp16", 0.25)
        effort.report("training, bf16", 0.75)
        if ends is not None:
            raise ends
        found = (
            {"size": effort.name, "drawn at random": torch.rand(3).tolist()} if numbers is None else numbers
        )
        return Outcome(findings, found)

    def line(numbers: dict[str, Any], figure: Figure) -> None:
        figure.subplots().plot([0, 1], [0, len(numbers)])

    return Experiment(name, f"About {name}", "nowhere, section 1", run, draw or line)


class Heard:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def begin(self, name: str, index: int, count: int) -> None:
        self.told.append(("begin", name, index, count))

    def stage(self, words: str, share: float) -> None:
        self.told.append(("stage", words, share))

    def end(self, result: Any) -> None:
        self.told.append(("end", result.name))


def draw_plainly(experiment: Experiment, numbers: dict[str, Any]) -> dict[str, bytes]:
    """`mezzo.reproduce.figures.draw` without what takes its time, which is the saving."""
    from matplotlib.figure import Figure

    experiment.draw(numbers, Figure())
    return {"figure.svg": b"<svg/>", "figure.png": b"PNG"}
