"""One run, read back from what it left: its records, and what its script printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.core import records
from mezzo.core.verdict import RunResult
from mezzo.verify.measure import Floats, step_times
from mezzo.verify.metric import Metric

TRACEBACK = "Traceback (most recent call last):"
MOST_LINES = 60
# What TensorFlow's libraries log while they start: `I0000 00:00:1795329464.717600   21560 port.cc:153] oneDNN ...`.
CHATTER = re.compile(
    r"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] (?:tensorflow|external)/"
    r"|To enable the following instructions: .* rebuild TensorFlow"
)
RERUNS = re.compile(r"closure run again (\d+) times")  # a reason of mezzo.pytorch.launch.optimizers


@dataclass(frozen=True)
class FinishedRun:
    """What `runs/NAME.jsonl` and `runs/NAME.log` hold. `ended` is None for a run that was killed or never
    began.
    """

    name: str
    started: records.RunStarted | None
    losses: tuple[records.LossRecord, ...]
    updates: tuple[records.UpdateRecord, ...]
    memory: records.MemoryRecord | None
    ended: records.RunEnded | None
    log: Path

    @property
    def succeeded(self) -> bool:
        """Whether the script ran to its end with exit status 0."""
        return self.ended is not None and self.ended.status == 0

    @cached_property
    def output(self) -> str:
        """What the script printed, both streams in order; empty where there is no log."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def said(self) -> list[str]:
        """The lines of what the script printed, without those that TensorFlow's libraries log by themselves."""
        return [line for line in self.output.rstrip().splitlines() if not CHATTER.match(line)]

    def metric(self, metric: Metric | None) -> tuple[float, bool] | None:
        """The final metric, and whether it is in percent; None without a pattern or a match."""
        return metric.read(self.output) if metric else None

    def result(self, metric: Metric | None = None) -> RunResult:
        """What a verdict is made from."""
        found = self.metric(metric)
        moved = sum(update.moved for update in self.updates)
        return RunResult(
            losses=np.array([record.loss for record in self.losses], dtype=np.float64),
            metric=found[0] if found else None,
            moved=moved if self.updates else None,
            skipped=sum(update.skipped for update in self.updates),
            reruns=sum(int(again[1]) for update in self.updates if (again := RERUNS.match(update.reason))),
        )

    def times(self) -> Floats:
        """Seconds of each step that may be timed."""
        return step_times(self.updates, self.losses)

    @property
    def machine(self) -> dict[str, Any]:
        """What the run said of the machine it ran on."""
        return self.started.machine if self.started else {}

    @property
    def steps(self) -> int:
        """Updates of the first optimizer; losses, where no optimizer's step was seen."""
        return sum(update.optimizer == 0 for update in self.updates) or len(self.losses)

    def failure(self) -> str:
        """The end of the log: from its last traceback on, or its last lines; words for an empty one."""
        lines = self.said
        start = max((i for i, line in enumerate(lines) if line.startswith(TRACEBACK)), default=None)
        kept = lines[start:] if start is not None else lines[-20:]
        if len(kept) > MOST_LINES:
            kept = [*kept[: MOST_LINES // 2], "  ...", *kept[-MOST_LINES // 2 :]]
        return "\n".join(kept) or "(it printed nothing)"


def read_run(runs: Path, name: str) -> FinishedRun:
    """Read a run's records; a run that left none has neither a start nor an end."""
    once: dict[str, Any] = {}
    losses: list[records.LossRecord] = []
    updates: list[records.UpdateRecord] = []
    path = runs / f"{name}.jsonl"
    if path.exists():
        for record in records.read(path):
            if isinstance(record, records.LossRecord):
                losses.append(record)
            elif isinstance(record, records.UpdateRecord):
                updates.append(record)
            else:
                once[record.kind] = record
    return FinishedRun(
        name,
        once.get("run"),
        tuple(losses),
        tuple(updates),
        once.get("memory"),
        once.get("end"),
        runs / f"{name}.log",
    )
