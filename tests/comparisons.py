"""Folders such as `mezzo compare` leaves, made by code: a healthy one, and one for each thing that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.core.records import (
    LossRecord,
    MemoryRecord,
    OpFormats,
    OpsRecord,
    RecordWriter,
    RunEnded,
    RunStarted,
    UpdateRecord,
)

HOSTILE = (
    '</script></style></svg><img src=x onerror="window.stolen=1"><script>window.stolen=1</script>'
    "'\"&\x00\x1b[31m\u202e{{7*7}}\udcff"
)
MACHINE = {
    "os": "Linux 6.1",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "mezzo": "0.1.0",
    "cpu": "AMD EPYC 9R14",
    "cores": 2,
    "isa": ["avx2", "avx512f", "avx512_bf16"],
    "gpu": None,
    "threads": 2,
}
OPS = [
    OpFormats(
        "convolution", "lower", "bf16 -> bf16", "bf16 -> bf16", 3, 6, "tensor cores and half the bytes"
    ),
    OpFormats("addmm", "lower", "bf16 -> bf16", "bf16 -> bf16", 2, 5, "tensor cores and half the bytes"),
    OpFormats("relu", "promote", "bf16 -> bf16", "bf16 -> bf16", 3, 0, "follows its input"),
    OpFormats("log_softmax", "fp32", "fp32 -> fp32", "fp32 -> fp32", 1, 1, "ends the model: exp overflows"),
    OpFormats(
        "nll_loss_forward", "fp32", "fp32 -> fp32", "fp32 -> fp32", 1, 0, "a loss is a sum over the batch"
    ),
]


@dataclass
class Written:
    """One run to write: its losses, and all else that a run may leave."""

    losses: Sequence[float]
    scales: Sequence[float] = ()
    skipped: Mapping[int, str] = field(default_factory=dict)
    peak: int | None = 400_000_000
    ops: Sequence[OpFormats] = ()
    status: int | None = 0
    notes: Sequence[str] = ()
    policy: str = "fp32"
    script: str = "digits.py"
    argv: Sequence[str] = ()
    log: str = ""
    machine: Mapping[str, Any] = field(default_factory=lambda: MACHINE)


def write(directory: Path, verdict: Mapping[str, Any], runs: Mapping[str, Written]) -> Path:
    """Write a comparison's folder: the verdict and each named run."""
    folder = directory / "runs"
    folder.mkdir(parents=True)
    (directory / "verdict.json").write_text(json.dumps(verdict), encoding="utf-8")
    for name, run in runs.items():
        seed = int(name.rsplit("-", 1)[1])
        writer = RecordWriter(folder / f"{name}.jsonl")
        writer.write(
            RunStarted(
                run.script,
                list(run.argv),
                run.policy,
                seed,
                "-ulp-" in name,
                dict(run.machine),
                "2026-11-21T04:00:00+00:00",
            )
        )
        for index, loss in enumerate(run.losses):
            writer.write(LossRecord(index, float(loss), 0.01 * index))
            if run.scales:
                reason = run.skipped.get(index, "")
                writer.write(
                    UpdateRecord(
                        index,
                        0,
                        not reason,
                        bool(reason),
                        run.scales[index],
                        0.01 * index + 0.005,
                        reason,
                        index < 3,
                    )
                )
        if run.peak is not None:
            writer.write(MemoryRecord(run.peak, "tensor bytes"))
        if run.ops:
            writer.write(OpsRecord(list(run.ops)))
        if run.status is not None:
            writer.write(RunEnded(run.status, 0.01 * len(run.losses), list(run.notes)))
        writer.close()
        if run.log:
            (folder / f"{name}.log").write_text(run.log, encoding="utf-8", errors="surrogateescape")
    return directory


def curve(steps: int, seed: int, shift: float = 0.0, noise: float = 0.25) -> list[float]:
    """A loss that falls as a real one does, noisy from batch to batch; ``shift`` moves its end."""
    draw = np.random.default_rng(seed)
    t = np.arange(steps) / max(1, steps - 1)
    clean = 2.3 * np.exp(-6 * t) + 0.04 + shift * t
    return (clean * np.exp(noise * draw.standard_normal(steps))).tolist()


def drift(losses: Sequence[float], seed: int, size: float) -> list[float]:
    """The same losses with a relative noise that grows over the run: what rounding does to a trajectory."""
    draw = np.random.default_rng(1000 + seed)
    t = np.arange(len(losses)) / max(1, len(losses))
    return (np.array(losses) * np.exp(size * t * draw.standard_normal(len(losses)))).tolist()


def candidate(**changes: Any) -> dict[str, Any]:
    """A candidate of `verdict.json`, healthy unless changed."""
    values: dict[str, Any] = {
        "speedup": 1.62,
        "speed_word": "faster",
        "speedup_interval": [1.58, 1.66],
        "peak_memory_ratio": 0.61,
        "parity": "equivalent",
        "seeds": 3,
        "margin": 0.0021,
        "loss_gap": -0.0003,
        "final_loss": 0.0412,
        "final_metric": 98.4,
        "steps": 300,
        "skipped_steps": 0,
        "reason": "The gap's 90 % interval, from -0.0011 to 0.0005, lies within the margin of 0.0021.",
    }
    return {**values, **changes}


def healthy(directory: Path, steps: int = 300, seeds: int = 3) -> Path:
    """bf16 equivalent, fp16 consistent with two skips a run: seeds, FP32 twins, a metric, memory, ops."""
    runs: dict[str, Written] = {}
    scales = [2.0 ** (16 - min(2, index // 2)) if index < 200 else 2.0**15 for index in range(steps)]
    for seed in range(seeds):
        base = curve(steps, seed)
        plain = [1.0] * steps
        runs[f"fp32-{seed}"] = Written(base, plain, peak=412_000_000)
        runs[f"fp32-ulp-{seed}"] = Written(drift(base, 50 + seed, 0.06), plain, peak=None)
        runs[f"bf16-{seed}"] = Written(
            drift(base, seed, 0.08), plain, peak=251_000_000, ops=OPS, policy="bf16"
        )
        runs[f"fp16-{seed}"] = Written(
            drift(base, 90 + seed, 0.07),
            scales,
            {1: "inf in the gradients", 3: "inf in the gradients"},
            255_000_000,
            [_in_fp16(op) for op in OPS],
            policy="fp16",
            notes=["2 updates were skipped while the loss scale found its height."],
        )
    pairs = [
        {"seed": k, "loss_gap": -0.0003, "metric": 98.3 + 0.1 * k, "fp32_metric": 98.2 + 0.15 * k}
        for k in range(seeds)
    ]
    verdict = {
        "schema": 1,
        "baseline": "fp32",
        "candidates": {
            "bf16": candidate(
                seeds=seeds,
                steps=steps,
                loss_gap_interval=[-0.0011, 0.0005],
                power=0.93,
                pairs=pairs,
                fp32_loss=0.0415,
                loss_gap_relative=-0.0072,
                margin_relative=0.005,
                noise_floor=0.0009,
                seed_noise=0.0031,
                pairs_needed=3,
                fp32_metric=98.35,
                metric_gap=0.05,
                metric_better="higher",
                metric_gap_interval=[-0.02, 0.12],
                metric_margin=0.2,
                metric_power=0.99,
                steps_timed=840,
                notes=["seed 0: a note of the verdict"],
                exit_status=0,
            ),
            "fp16": candidate(
                seeds=seeds,
                steps=steps,
                parity="consistent",
                speedup=0.97,
                speedup_interval=[0.94, 1.0],
                skipped_steps=2 * seeds,
                loss_gap=0.0008,
                loss_gap_interval=[-0.0009, 0.0025],
                peak_memory_ratio=0.62,
                pairs=pairs,
                reason="No harm seen; the gap's interval reaches past the margin.",
            ),
        },
        "machine": MACHINE,
        "request": {
            "demo": "digits",
            "target": "digits.py",
            "precisions": ["bf16", "fp16"],
            "seeds": seeds,
            "argv": ["--epochs", "3"],
        },
    }
    return write(directory, verdict, runs)


def _in_fp16(op: OpFormats) -> OpFormats:
    observed = "fp32 -> fp32" if op.op == "relu" else op.observed.replace("bf16", "fp16")
    return OpFormats(
        op.op, op.rule, op.planned.replace("bf16", "fp16"), observed, op.calls, op.casts, op.reason
    )


def hostile(directory: Path) -> Path:
    """Every text that a script or a user can put into a folder, replaced by one that tries to break out."""
    ops = [OpFormats(HOSTILE, HOSTILE, HOSTILE, HOSTILE + "!", 1, 1, HOSTILE, HOSTILE)]
    run = Written(
        curve(20, 0),
        [1.0] * 20,
        {2: HOSTILE},
        1000,
        ops,
        1,
        [HOSTILE],
        HOSTILE,
        HOSTILE,
        [HOSTILE],
        HOSTILE,
        {HOSTILE.replace("\udcff", ""): HOSTILE, "cpu": HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
    )
    odd = candidate(reason=HOSTILE, parity=HOSTILE)
    verdict = {
        "schema": 1,
        "baseline": "fp32",
        "candidates": {HOSTILE: odd, "bf16": candidate(reason=HOSTILE)},
        "machine": {HOSTILE: HOSTILE},
        "request": {"target": HOSTILE, "argv": [HOSTILE], "metric": HOSTILE, "precisions": [HOSTILE]},
    }
    return write(directory, verdict, {"fp32-0": run, "bf16-0": run, "zz-0": run})


def one_seed(directory: Path) -> Path:
    """One pair, no metric, no memory, no updates, nothing skipped."""
    base = curve(40, 0)
    values = candidate(
        parity="consistent",
        seeds=1,
        steps=40,
        final_metric=None,
        peak_memory_ratio=None,
        speedup_interval=None,
        reason="One pair, and the gap lies within the margin.",
    )
    runs = {"fp32-0": Written(base, peak=None), "bf16-0": Written(drift(base, 1, 0.05), peak=None)}
    return write(
        directory, {"schema": 1, "baseline": "fp32", "candidates": {"bf16": values}, "machine": MACHINE}, runs
    )


def failed(directory: Path) -> Path:
    """A candidate whose loss goes NaN, one that crashes, one that was killed and one that left nothing."""
    base = curve(120, 0)
    sick = drift(base, 1, 0.05)
    sick[60:] = [value * 10 ** (2 * i) for i, value in enumerate(sick[60:75])] + [math.inf] + [math.nan] * 44
    gone = dict.fromkeys(
        ("speedup", "speedup_interval", "peak_memory_ratio", "loss_gap", "final_loss", "final_metric"), None
    )
    runs = {
        "fp32-0": Written(base, [1.0] * 120),
        "fp16-0": Written(
            sick, [2.0**-i for i in range(120)], {i: "inf in the gradients" for i in range(60, 120)}
        ),
        "bf16-0": Written(
            drift(base[:30], 2, 0.05),
            status=1,
            log="Traceback (most recent call last):\nRuntimeError: no such kernel",
        ),
        "tf32-0": Written(base[:50], status=None),
    }
    verdict = {
        "schema": 1,
        "baseline": "fp32",
        "machine": {},
        "candidates": {
            "fp16": candidate(
                parity="divergent",
                seeds=1,
                final_loss="nan",
                loss_gap="nan",
                skipped_steps=60,
                reason="The loss is NaN from step 76 on.",
            ),
            "bf16": candidate(
                parity="divergent",
                seeds=0,
                reason="The script failed in bf16 with exit status 1.",
                exit_status=1,
                **gone,
            ),
            "tf32": candidate(parity="inconclusive", seeds=0, **gone),
            "fp8": candidate(parity="inconclusive", seeds=0, reason="No run finished.", **gone),
        },
    }
    return write(directory, verdict, runs)


def one_step(directory: Path) -> Path:
    """A training of a single step."""
    runs = {"fp32-0": Written([2.3], [1.0]), "bf16-0": Written([2.31], [1.0])}
    values = candidate(seeds=1, steps=1, parity="inconclusive", reason="One step says nothing.")
    return write(
        directory, {"schema": 1, "baseline": "fp32", "candidates": {"bf16": values}, "machine": MACHINE}, runs
    )


def bare(directory: Path) -> Path:
    """A verdict with a candidate of no keys, and no runs at all."""
    return write(directory, {"candidates": {"bf16": {}}}, {})


def many_ops(directory: Path) -> Path:
    """A candidate with more ops than one wants to see, two of them not as planned."""
    ops = [
        OpFormats(
            f"op_{i:02}",
            "lower",
            "bf16 -> bf16",
            "bf16 -> bf16",
            i,
            1,
            "matmul",
            f"blocks.{i}.attention.projection",
        )
        for i in range(60)
    ]
    ops[7] = OpFormats("op_07", "fp32", "fp32 -> fp32", "bf16 -> bf16", 7, 0, "a sum", "blocks.7.norm")
    ops[9] = OpFormats("op_09", "lower", "bf16 -> bf16", "fp32 -> fp32", 9, 0, "matmul", "head")
    base = curve(50, 0)
    runs = {"fp32-0": Written(base), "bf16-0": Written(base, ops=ops)}
    return write(
        directory,
        {
            "schema": 1,
            "baseline": "fp32",
            "candidates": {"bf16": candidate(seeds=1, steps=50)},
            "machine": MACHINE,
        },
        runs,
    )


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "healthy": healthy,
    "hostile": hostile,
    "one_seed": one_seed,
    "failed": failed,
    "one_step": one_step,
    "bare": bare,
    "many_ops": many_ops,
}
