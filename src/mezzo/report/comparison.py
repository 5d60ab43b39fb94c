"""A comparison's folder as values: the verdict, every run that left records, and the command that made it.

Only a verdict that is missing or is not JSON is an error: a report is wanted most when something went wrong.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.core.records import file_name
from mezzo.report.numbers import finite
from mezzo.report.run import Run, read_run

SCHEMA = 1


@dataclass(frozen=True)
class Comparison:
    """A comparison's folder: `verdict.json` as it stands, the candidates in it, and the runs."""

    directory: Path
    verdict: Mapping[str, Any]
    candidates: Mapping[str, Mapping[str, Any]]
    baseline: str = "fp32"
    runs: tuple[Run, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)

    def of(self, precision: str) -> list[Run]:
        """The paired runs of one precision, by seed, without the one-ulp twins."""
        found = (run for run in self.runs if run.precision == precision and not run.nudged)
        return sorted(found, key=lambda run: run.seed)

    @property
    def twins(self) -> list[Run]:
        """FP32 runs whose initial weights were moved by one ulp, by seed."""
        return sorted((run for run in self.runs if run.nudged), key=lambda run: run.seed)

    def peak(self, precision: str) -> float | None:
        """Peak memory of one precision in bytes: the median over its runs; None if none recorded it."""
        found = [float(run.memory.peak_bytes) for run in self.of(precision) if run.memory]
        return median(found) if found else None

    def metrics(self, precision: str) -> dict[int, float]:
        """The final metric of each run of one precision, by seed, from the pairs that the verdict lists."""
        of_baseline = precision == self.baseline
        key = f"{self.baseline}_metric" if of_baseline else "metric"
        found: dict[int, float] = {}
        for values in self.candidates.values() if of_baseline else [self.candidates.get(precision, {})]:
            pairs = values.get("pairs")
            for row in pairs if isinstance(pairs, list) else []:
                seed, value = (
                    finite(row.get(name)) if isinstance(row, dict) else None for name in ("seed", key)
                )
                if seed is not None and value is not None:
                    found[int(seed)] = value
        return dict(sorted(found.items()))


def read(directory: Path) -> Comparison:
    """Read a comparison's folder.

    Raises:
        UsageError: there is no `verdict.json`, or this version cannot read it.
    """
    path = directory / "verdict.json"
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file. A report is made from the folder that `mezzo compare --out DIR` wrote."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable verdict ({error}). Run `mezzo compare` again.") from error
    if not isinstance(verdict, dict) or not isinstance(verdict.get("candidates"), dict):
        raise UsageError(f'{path}: not a verdict: it has no object "candidates". Run `mezzo compare` again.')
    schema = verdict.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(
            f"{path}: schema {schema!r}, and this version of Mezzo reads schema {SCHEMA}. "
            "Use the version that wrote it, or run `mezzo compare` again."
        )
    candidates = {name: one if isinstance(one, dict) else {} for name, one in verdict["candidates"].items()}
    baseline = str(verdict.get("baseline", "fp32"))
    known = {file_name(name): name for name in (baseline, *candidates)}
    runs = tuple(read_run(file, known) for file in sorted((directory / "runs").glob("*.jsonl")))
    request = verdict.get("request")
    return Comparison(
        directory, verdict, candidates, baseline, runs, request if isinstance(request, dict) else {}
    )


def command_line(comparison: Comparison) -> str:
    """The ``mezzo compare ...`` that gives this comparison again, quoted for a POSIX shell."""
    started = next((run.started for run in comparison.runs if run.started), None)
    request = {
        "target": started.script if started else "SCRIPT",
        "precisions": list(comparison.candidates),
        "argv": started.argv if started else [],
        **{key: value for key, value in comparison.request.items() if value},
    }
    return shlex.join(command_words(request, comparison.directory.resolve().name))


def command_words(request: Mapping[str, Any], out: str) -> list[str]:
    """The words of the command that runs a request again in the folder `out`."""
    words = ["mezzo", "compare"]
    if request.get("demo"):
        words += ["--demo", str(request["demo"])]
    else:
        words += ["-m"] * bool(request.get("is_module")) + [str(request["target"])]
        if request.get("framework", "pytorch") != "pytorch":
            words += ["--framework", str(request["framework"])]
    precisions = request["precisions"]
    # A flag for each: "params=fp32,compute=bf16" holds a comma of its own.
    for one in precisions if isinstance(precisions, (list, tuple)) else [precisions]:
        words += ["--precision", str(one)]
    for key in ("seeds", "margin", "metric", "metric_better", "metric_margin"):
        if request.get(key) not in (None, "", "auto"):
            words += [f"--{key.replace('_', '-')}", str(request[key])]
    words += ["--out", out, "--fresh"]  # without --fresh the finished runs would be kept
    arguments = request.get("argv")
    if isinstance(arguments, (list, tuple)) and arguments:
        words += ["--", *(str(word) for word in arguments)]
    return words
