"""From finished runs to `verdict.json`: parity, speed and memory of every candidate, as strict JSON."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from mezzo.compare.answer import STARTS_DIFFER, in_no_layer
from mezzo.compare.folder import strict
from mezzo.compare.measure import speed
from mezzo.compare.request import BASELINE, FRAMEWORKS, PERTURBED, Request
from mezzo.compare.runs import TRACEBACK, FinishedRun
from mezzo.core.comparison import WIDE, Comparison, Parity
from mezzo.core.compute import QUANTIZED
from mezzo.core.policy import policy
from mezzo.core.records import EMULATED, HAD_TF32, OWN, OWN_PRECISION, SWITCHED_OFF
from mezzo.core.verdict import Margins, RunResult, Verdict, judge

SCHEMA = 1
# Differences of the first losses, as shares: one ulp in the weights changes the first one by 1e-6 or so.
_SAME_START = 1e-4, 0.01, 0.01

Results = Mapping[str, Mapping[int, RunResult]]
Runs = dict[str, dict[int, FinishedRun]]
"""Runs by precision (`fp32-ulp` for the perturbed baseline) and by the number of their seed."""


def verdict(request: Request, runs: Runs) -> dict[str, Any]:
    """The whole of `verdict.json`; docs/compare.md explains its keys."""
    baseline = runs[BASELINE]
    results = {
        name: {k: run.result(request.how_metric) for k, run in some.items() if run.succeeded}
        for name, some in runs.items()
    }
    margins = _margins(request, baseline)
    return {
        "schema": SCHEMA,
        "framework": request.framework,
        "baseline": BASELINE,
        "candidates": {one: _candidate(request, one, runs, results, margins) for one in request.precisions},
        "own": ", ".join(baseline[min(baseline)].switched_off) or None,
        "machine": strict(baseline[min(baseline)].machine),
        "request": strict(asdict(request)),
    }


def _margins(request: Request, baseline: Mapping[int, FinishedRun]) -> Margins:
    metric = request.how_metric
    if metric is None:
        return Margins(request.margin)
    found = [one for run in baseline.values() if (one := run.metric(metric)) is not None]
    return metric.margins(request.margin, any(one.percent or abs(one.value) > 1.5 for one in found))


def _candidate(request: Request, name: str, each: Runs, results: Results, margins: Margins) -> dict[str, Any]:
    runs, baseline = each.get(name, {}), each[BASELINE]
    finished = {k: run for k, run in runs.items() if run.succeeded}
    failed = next((run for run in runs.values() if not run.succeeded), None)
    if failed is not None:
        ended = failed.ended
        how = "was killed or crashed" if ended is None else f"ended with exit status {ended.status}"
        where = f"(output: runs/{failed.log.name})"
        why = f"run {failed.name} {how}, FP32's did not {where}: {last_error(failed)}"
        judged = Verdict(Parity.DIVERGENT, f"Failed: {why}", len(finished), cause=why)
    else:
        judged = judge(results[BASELINE], results.get(name, {}), results.get(PERTURBED, {}), margins)
    why = next((run.ran_nothing for run in runs.values() if run.ran_nothing), "")
    if not why and any(run.in_no_layer for run in runs.values()):
        why = in_no_layer(name)
    lacking = [] if why else _lacking(request, runs)
    others = (SWITCHED_OFF, OWN_PRECISION, HAD_TF32, *[EMULATED] * bool(lacking or why))
    noted = dict.fromkeys(note for run in runs.values() for note in run.notes if not note.startswith(others))
    if failed is None and why:
        noted.pop(why, None)
        reason = f"{why}. {judged.reason}"
        judged = replace(judged, parity=Parity.INCONCLUSIVE, reason=reason, notes=(), cause=why)
    pairs = [(baseline[k], finished[k]) for k in sorted(set(baseline) & set(finished))]
    perturbed = [run.times() for run in each.get(PERTURBED, {}).values() if run.succeeded]
    fast = speed([(fp32.times(), ours.times()) for fp32, ours in pairs], perturbed)
    told_apart = fast.word if fast and len(pairs) > 1 else "not told apart"
    reason = judged.reason
    if fast is not None and fast.interval[1] <= WIDE * fast.interval[0]:
        between = "95 % interval {:.2f} to {:.2f}".format(*fast.interval)
        reason += f" Speed: {fast.speedup:.2f}x that of FP32 ({between}): {told_apart}."
    loss = judged.loss
    printed = [one for run in [*baseline.values(), *runs.values()] if (one := run.metric(request.how_metric))]
    status = 0 if failed is None else failed.ended.status if failed.ended is not None else None
    found: dict[str, Any] = strict(
        {
            "parity": judged.parity.value,
            "reason": reason,
            "cause": judged.cause,
            "departed": judged.departed,
            "overflow": _overflow(runs.values()) if judged.cause else "",
            "speedup": fast.speedup if fast else None,
            "speedup_interval": fast.interval if fast else None,
            "speed_word": told_apart if fast else None,
            "steps_timed": fast.steps if fast else 0,
            **_memory(pairs),
            "seeds": judged.pairs,
            "margin_relative": margins.loss,
            **_quantity(judged.loss, "loss", ""),
            "loss_gap_relative": loss.gap / abs(loss.baseline) if loss and loss.baseline else None,
            "resolution": loss.resolution if loss else None,
            **_quantity(judged.metric, "metric", "metric_"),
            "metric_decimals": max((one.decimals for one in printed), default=0) if judged.metric else None,
            "metric_unit": ("%" if any(one.percent for one in printed) else "") if judged.metric else None,
            "metric_better": ("higher" if margins.metric_higher else "lower") if judged.metric else None,
            "steps": int(statistics.median(run.steps for run in finished.values())) if finished else 0,
            "skipped_steps": sum(update.skipped for run in runs.values() for update in run.updates),
            "pairs": [
                {"seed": k, "loss_gap": gap, "metric": ours, "fp32_metric": theirs}
                for k, gap, ours, theirs in judged.differences
            ],
            "notes": [*_starts(each), *_in_turns(request, baseline), *judged.notes, *lacking, *noted],
            "failed": failed is not None,
            "exit_status": status,
        }
    )
    return found


def _starts(each: Runs) -> list[str]:
    """A note if FP32 and the noise check, whose weights differ by one ulp, began with other losses."""
    both = [run.losses if (run := each.get(name, {}).get(0)) else () for name in (BASELINE, PERTURBED)]
    for step, (one, other, share) in enumerate(zip(*both, _SAME_START)):
        if abs(one.loss - other.loss) > share * max(abs(one.loss), abs(other.loss)):
            found = f"{one.loss:.6g} and {other.loss:.6g} in step {step}"
            how = "draws from more than the generators of torch, NumPy and random, such as the time or os.urandom"
            return [f"{STARTS_DIFFER}{found}: the script {how}."]
    return []


def _in_turns(request: Request, baseline: Mapping[int, FinishedRun]) -> list[str]:
    """A note if optimizers step in turns, each after a backward pass of its own, and no metric is given."""
    run = baseline[min(baseline)]
    others = {update.optimizer for update in run.updates} - set(run.phases.leaders)
    if request.metric or not others or len(run.losses) < len(run.updates):
        return []
    return [
        "Optimizers step in turns. If they train against each other, as in a GAN, judge by --metric, not by losses."
    ]


def _quantity(part: Comparison | None, name: str, prefix: str) -> dict[str, Any]:
    """The numbers of one quantity under their keys; None for each if it was not compared."""
    keys = {
        f"{prefix}margin": "margin",
        f"{name}_gap": "gap",
        f"{name}_gap_interval": "interval",
        f"final_{name}": "candidate",
        f"fp32_{name}": "baseline",
        f"{name}_parity": "parity",
        f"{prefix}power": "power",
        f"{prefix}pairs_needed": "pairs_needed",
        f"{prefix}noise_floor": "ulp_noise",
        f"{prefix}seed_noise": "seed_noise",
    }
    return {key: getattr(part, field, None) for key, field in keys.items()}


def _overflow(runs: Iterable[FinishedRun]) -> str:
    """The place of the first overflow on record that a smaller loss scale would not avoid."""
    found = [one.finding for run in runs for one in run.overflows if one.finding.op and one.finding.alarms]
    line = ":".join(found[0].line.split(":")[:2]) if found else ""
    return f"{found[0].where}{f' ({line})' if line else ''}" if found else ""


# The line of an exception, which PyTorch prints with the rank.
_ERROR = re.compile(r"(?P<rank>\[rank\d+\]: )?(?P<error>[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*)")


def last_error(run: FinishedRun) -> str:
    """The line of the exception that ended a run, or its last line."""
    lines = run.failure().rstrip().splitlines()
    # On several ranks, what the others print may come between the lines of the traceback, or after it.
    whole = lines[0].startswith(TRACEBACK)
    errors = (found["error"] for line in lines if (found := _ERROR.match(line)) and (found["rank"] or whole))
    return next(errors, lines[-1]).strip()


def _memory(pairs: list[tuple[FinishedRun, FinishedRun]]) -> dict[str, Any]:
    """Median peaks of FP32 and the candidate; None if they were not measured, or not in the same way."""
    both = [(fp32.memory, ours.memory) for fp32, ours in pairs]
    found = [(fp32, ours) for fp32, ours in both if fp32 and ours and fp32.how == ours.how]
    keys = ("peak_memory_ratio", "peak_memory_bytes", "fp32_peak_memory_bytes", "memory_how")
    if not found:
        return dict.fromkeys(keys)
    theirs = int(statistics.median(fp32.peak_bytes for fp32, _ in found))
    peak = int(statistics.median(ours.peak_bytes for _, ours in found))
    return dict(zip(keys, (peak / theirs if peak and theirs else None, peak, theirs, found[0][1].how)))


# How formats that no device here has are emulated.
_HOW = {one: f"inputs of a product are rounded to {one} and multiplied in wider formats" for one in QUANTIZED}
_HOW["tf32"] = "inputs of a product are rounded and multiplied in FP32, which shows TF32's numerical effect"


def _lacking(request: Request, runs: Mapping[int, FinishedRun]) -> list[str]:
    """Notes on formats of a candidate's runs that the device does not compute in."""
    notes: dict[str, None] = {}
    for run in runs.values():
        native = run.machine.get("native_formats")
        if run.started is None or not isinstance(native, list) or run.started.policy == OWN:
            continue
        device = str(run.machine.get("device_type", ""))
        here = "this CPU" if device == "cpu" else f"this {device} device"
        for name in sorted(policy(run.started.policy).computed - {"fp32", "auto", *native}):
            how = f": {_HOW.get(name, 'stored in 16 bits, computed in FP32')}"
            why = [note.partition(": ")[2].rstrip(".") for note in run.notes if note.startswith(EMULATED)]
            if name in QUANTIZED and why:
                how = f" ({min(why, key=lambda one: name not in one)}){how}"
            if not FRAMEWORKS[request.framework].emulates:
                how = f" by {run.machine.get('backend') or request.framework}"
            notes[f"{name} is emulated on {here}{how}. Speed on hardware with {name} will differ."] = None
    return list(notes)
