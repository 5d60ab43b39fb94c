"""Tuning a script: measure it, find the policy, write it down, and let a comparison judge it beside the preset."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.core.policy import policy as policy_of
from mezzo.core.tuning import Tuned, tune
from mezzo.core.whole_file import write_whole
from mezzo.verify.children import LAUNCH, terminated_like_an_interrupt
from mezzo.verify.compare import compare
from mezzo.verify.folder import locked, strict
from mezzo.verify.progress import Silent, Watcher
from mezzo.verify.tune.calibration import RESULTS, calibrate
from mezzo.verify.tune.request import TuneRequest

POLICY = "policy.toml"
TUNING = "tuning.json"
COMPARISON = "comparison"
OURS = (POLICY, TUNING, RESULTS, COMPARISON, "runs", "report.html")
"""What may lie in a tuning's folder; `mezzo report` writes the last."""


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Args:
        tuned: the policy and its reasons.
        policy: the file that holds it.
        verdict: of the comparison; None where none was made.
        preset, candidate: the two names in the verdict: the preset's and the policy's (the same if they are equal).
    """

    tuned: Tuned
    policy: Path
    verdict: Mapping[str, Any] | None
    preset: str
    candidate: str

    @property
    def finding(self) -> str:
        """What the comparison holds against the policy, in words; ``""`` if nothing."""
        if self.verdict is None:
            return ""
        both = self.verdict["candidates"]
        mine, theirs = both[self.candidate], both[self.preset]
        if mine["parity"] == "divergent":
            return f"the tuned policy is divergent. {mine['reason']}"
        ours, other = mine["speedup_interval"], theirs["speedup_interval"]
        if theirs["parity"] != "divergent" and ours and other and ours[1] < other[0]:
            return (
                f"the tuned policy is slower than {self.preset}: {mine['speedup']:.2f}x of FP32's speed against "
                f"{theirs['speedup']:.2f}x. Use {self.preset}."
            )
        return ""

    def to_json(self) -> dict[str, Any]:
        """As plain values, without the verdict, which has a file of its own."""
        tuned = self.tuned
        plain = {
            "policy": str(tuned.policy),
            "file": str(self.policy),
            "preset": tuned.preset,
            "margin": tuned.margin,
            "loss": tuned.loss,
            "expected_change": tuned.change,
            "preset_expected_change": tuned.preset_change,
            "predicted_seconds": tuned.seconds,
            "preset_predicted_seconds": tuned.preset_seconds,
            "fp32_predicted_seconds": tuned.fp32_seconds,
            "modules": [vars(choice) for choice in tuned.choices],
            "notes": list(tuned.notes),
            "compared": self.verdict is not None,
            "finding": self.finding,
        }
        whole: dict[str, Any] = strict(plain)
        return whole


def tune_script(
    request: TuneRequest,
    folder: Path,
    *,
    judged: bool = True,
    watcher: Callable[[], Watcher] = Silent,
    command: Sequence[str] = LAUNCH,
) -> Outcome:
    """Tune a script. The folder gets `policy.toml`, `tuning.json`, the measurements, and the comparison's folder.

    Args:
        request: what is tuned.
        folder: where all is written; made if need be. An older tuning in it is replaced.
        judged: whether preset and policy are then compared with FP32.
        watcher: makes who is told of the runs.
        command: as for `calibrate`.

    Raises:
        ScriptError: the script fails in FP32, or can't be measured.
        UsageError: the folder holds other things, or can't be written.
        KeyboardInterrupt: interrupted; the run under way is deleted.
    """
    try:
        _check_folder(folder)
        with locked(folder):
            with watcher() as told, terminated_like_an_interrupt():
                measured = calibrate(request, folder, told, command)
            tuned = tune(measured, margin=request.margin, goal=request.goal)
            path = folder / POLICY
            write_whole(path, tuned.to_toml())
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror or error}. Name a folder that can be written with --out."
        ) from error
    assert policy_of(path) == tuned.policy
    # A policy that lowers nothing is the baseline, and one without a line is the preset: neither runs twice.
    alone = tuned.policy.is_fp32 or tuned.policy == policy_of(request.preset)
    name = request.preset if alone else os.fspath(path)
    verdict = None
    if judged and not tuned.policy.is_fp32:
        precisions = (request.preset,) if alone else (request.preset, name)
        verdict = compare(
            request.comparison(precisions),
            folder / COMPARISON,
            fresh=True,
            watcher=watcher(),
            command=command,
        )
    outcome = Outcome(tuned, path, verdict, request.preset, name)
    write_whole(folder / TUNING, json.dumps(outcome.to_json(), indent=2, allow_nan=False) + "\n")
    return outcome


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"--out {folder}: is a file. Name a folder.")
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in OURS and not p.name.startswith("."))
    if strangers:
        raise UsageError(
            f"--out {folder}: holds other files ({', '.join(strangers[:5])}). Name an empty or a new folder."
        )
