"""From finished runs to `verdict.json`: parity, speed and memory of every candidate, as strict JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from mezzo.compare.folder import strict
from mezzo.compare.measure import Speed, speed
from mezzo.compare.request import BASELINE, TWIN, Request, framework
from mezzo.compare.runs import FinishedRun
from mezzo.core.comparison import Comparison, Parity
from mezzo.core.policy import policy
from mezzo.core.verdict import Margins, RunResult, Verdict, judge

SCHEMA = 1

Runs = dict[str, dict[int, FinishedRun]]
"""Runs by precision (`fp32-ulp` for the twins) and by the number of their seed."""


def verdict(request: Request, runs: Runs) -> dict[str, Any]:
    """The whole of `verdict.json`; its keys are explained in `docs/verdict.md`."""
    baseline = runs[BASELINE]
    first = baseline[min(baseline)]
    results = {k: run.result(request.how_metric) for k, run in baseline.items()}
    twins = {k: run.result(request.how_metric) for k, run in runs.get(TWIN, {}).items()}
    margins = _margins(request, baseline)
    return {
        "schema": SCHEMA,
        "framework": request.framework,
        "baseline": BASELINE,
        "candidates": {
            name: _candidate(request, runs.get(name, {}), baseline, results, twins, margins)
            for name in request.precisions
        },
        "machine": strict(first.machine),
        "request": strict(asdict(request)),
    }


def _margins(request: Request, baseline: Mapping[int, FinishedRun]) -> Margins:
    metric = request.how_metric
    if metric is None:
        return Margins(request.margin)
    found = [value for run in baseline.values() if (value := run.metric(metric)) is not None]
    return metric.margins(request.margin, any(percent or abs(value) > 1.5 for value, percent in found))


def _candidate(
    request: Request,
    runs: Mapping[int, FinishedRun],
    baseline: Mapping[int, FinishedRun],
    results: Mapping[int, RunResult],
    twins: Mapping[int, RunResult],
    margins: Margins,
) -> dict[str, Any]:
    finished = {k: run for k, run in runs.items() if run.succeeded}
    failed = next((run for run in runs.values() if not run.succeeded), None)
    if failed is not None:
        judged = Verdict(Parity.DIVERGENT, _failure(failed), len(finished))
    else:
        judged = judge(
            results, {k: run.result(request.how_metric) for k, run in finished.items()}, twins, margins
        )
    numbers = sorted(set(baseline) & set(finished))
    fast = speed([(baseline[k].times(), finished[k].times()) for k in numbers])
    if fast is not None:
        low, high = fast.interval
        text = f"Step time: {fast.speedup:.2f} times FP32's speed ({low:.2f} to {high:.2f}): {fast.word}."
        judged = replace(judged, reason=f"{judged.reason} {text}")
    peak, fp32_peak, how = _peaks([baseline[k] for k in numbers], [finished[k] for k in numbers])
    ratio = peak / fp32_peak if peak and fp32_peak else None
    loss, metric = judged.loss, judged.metric
    status = (
        failed.ended.status
        if failed is not None and failed.ended is not None
        else 0
        if failed is None
        else None
    )
    found: dict[str, Any] = strict(
        {
            "parity": judged.parity.value,
            "reason": judged.reason,
            "speedup": fast.speedup if fast else None,
            "speedup_interval": list(fast.interval) if fast else None,
            "speed_word": fast.word if fast else None,
            "steps_timed": fast.steps if fast else 0,
            "peak_memory_ratio": ratio,
            "peak_memory_bytes": peak,
            "fp32_peak_memory_bytes": fp32_peak,
            "memory_how": how,
            "seeds": judged.pairs,
            "margin": loss.margin if loss else None,
            "margin_relative": margins.loss,
            "loss_gap": loss.gap if loss else None,
            "loss_gap_relative": loss.gap / abs(loss.baseline) if loss and loss.baseline else None,
            "loss_gap_interval": list(loss.interval) if loss and loss.interval else None,
            "final_loss": loss.candidate if loss else None,
            "fp32_loss": loss.baseline if loss else None,
            "loss_parity": loss.parity.value if loss else None,
            "power": loss.power if loss else None,
            "pairs_needed": loss.pairs_needed if loss else None,
            "noise_floor": loss.twin_noise if loss else None,
            "seed_noise": loss.seed_noise if loss else None,
            "resolution": loss.resolution if loss else None,
            **_metric(metric, margins),
            "steps": int(statistics.median(run.steps for run in finished.values())) if finished else 0,
            "skipped_steps": sum(update.skipped for run in runs.values() for update in run.updates),
            "pairs": [
                {"seed": k, "loss_gap": gap, "metric": ours, "fp32_metric": theirs}
                for k, gap, ours, theirs in judged.differences
            ],
            "notes": [*judged.notes, *_lacking(request, runs, ratio, fast), *_run_notes(runs)],
            "failed": failed is not None,
            "exit_status": status,
        }
    )
    return found


def _metric(metric: Comparison | None, margins: Margins) -> dict[str, Any]:
    return {
        "final_metric": metric.candidate if metric else None,
        "fp32_metric": metric.baseline if metric else None,
        "metric_gap": metric.gap if metric else None,
        "metric_gap_interval": list(metric.interval) if metric and metric.interval else None,
        "metric_margin": metric.margin if metric else None,
        "metric_better": ("higher" if margins.metric_higher else "lower") if metric else None,
        "metric_parity": metric.parity.value if metric else None,
        "metric_power": metric.power if metric else None,
        "metric_noise_floor": metric.twin_noise if metric else None,
        "metric_seed_noise": metric.seed_noise if metric else None,
    }


def _failure(run: FinishedRun) -> str:
    last = next(
        (line for line in reversed(run.failure().splitlines()) if line.strip()), "nothing was printed"
    )
    where = f"runs/{run.log.name}"
    if run.ended is None:
        return f"Failed: {run.name} died without an end (see {where}): {last.strip()}"
    status = run.ended.status
    return f"Failed: {run.name} ended with exit status {status}, FP32 did not (see {where}): {last.strip()}"


def _lacking(
    request: Request, runs: Mapping[int, FinishedRun], memory: float | None, fast: Speed | None
) -> list[str]:
    """What a reader of the speeds must know: the 16-bit formats that the device only stores.

    Args:
        request: whose framework runs them.
        runs: of a candidate.
        memory: its peak over FP32's.
        fast: its speed.
    """
    notes: dict[str, None] = {}
    for run in runs.values():
        native = run.machine.get("native_formats")
        if run.started is None or not isinstance(native, list):
            continue
        device = str(run.machine.get("device_type", ""))
        here = "this CPU" if device == "cpu" else f"this {device} device"
        for name in sorted(policy(run.started.policy).computed - {"fp32", "auto", *native}):
            if framework(request.framework).emulates:
                what = f"{name} is emulated on {here}: {_HOW.get(name, _IN_16_BITS)}"
            else:
                library = run.machine.get("backend") or request.framework
                what = f"{here} has no {name} arithmetic, and {library} computes in it in a way of its own"
            notes[f"{what}: {saved(memory, fast)}"] = None
    return list(notes)


_IN_16_BITS = "stored in 16 bits, computed in FP32"
# What is done in a format that no device here has.
_HOW = {
    "fp8": "factors are rounded to 8 bits and kept so, and multiplied in a wider format",
    "tf32": "factors are rounded and multiplied in FP32, which shows what TF32 does to the numbers",
}


def saved(memory: float | None, fast: Speed | None) -> str:
    """What a candidate saves, in words that follow the figures as they are printed.

    Args:
        memory: its peak over FP32's; None where it was not measured.
        fast: its speed; None where it was not measured.
    """
    less = memory is not None and round(memory, 2) < 1.0
    of_memory = (
        "was not measured" if memory is None else "is saved" if less else f"is not saved ({memory:.2f}x)"
    )
    not_told = "is not" if less else "is not saved"
    of_time = (
        {"faster": "is saved", "slower": "is lost"}.get(fast.word, not_told) if fast else "was not measured"
    )
    return f"memory {of_memory}, time {of_time}"


def _run_notes(runs: Mapping[int, FinishedRun]) -> list[str]:
    notes: dict[str, None] = {}
    for run in runs.values():
        notes.update(dict.fromkeys(run.ended.notes if run.ended else ()))
    return list(notes)


def _peaks(
    baseline: list[FinishedRun], candidate: list[FinishedRun]
) -> tuple[int | None, int | None, str | None]:
    """Median peaks of both, and how they were measured; None where they were not, or not in the same way."""
    pairs = [
        (ours.memory, theirs.memory)
        for ours, theirs in zip(candidate, baseline)
        if ours.memory and theirs.memory and ours.memory.how == theirs.memory.how
    ]
    if not pairs:
        return None, None, None
    ours = int(statistics.median(pair[0].peak_bytes for pair in pairs))
    theirs = int(statistics.median(pair[1].peak_bytes for pair in pairs))
    return ours, theirs, pairs[0][0].how
