"""Folders such as `mezzo compare` leaves, made by code: a healthy one, and one for each thing that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.core import records

HOSTILE = (
    '</script></style></svg><img src=x onerror="window.stolen=1"><script>window.stolen=1</script>'
    "'\"&\x00\x1b[31m\u202e{{7*7}}\udcff"
)
_CODES = {"\x00": "\\x00", "\x1b": "\\x1b", "\u202e": "\\u202e", "\udcff": "\\udcff"}
HOSTILE_SHOWN = " ".join(HOSTILE.translate(str.maketrans(_CODES)).split())
MACHINE = {
    "os": "Linux 6.1",
    "torch": "2.13.0+cpu",
    "cpu": "AMD EPYC 9R14",
    "cores": 2,
    "isa": ["avx2", "avx512f", "avx512_bf16"],
    "gpu": None,
    "memory_bytes": 16_000_000_000,
}
BF16, FP32 = "bf16 -> bf16", "fp32 -> fp32"
OPS = [
    records.OpFormats("convolution", "lower", BF16, BF16, 3, 6, "tensor cores and half the bytes"),
    records.OpFormats("addmm", "lower", BF16, BF16, 2, 5, "tensor cores and half the bytes"),
    records.OpFormats("relu", "promote", BF16, BF16, 3, 0, "follows its input"),
    records.OpFormats("log_softmax", "fp32", FP32, FP32, 1, 1, "ends the model: exp overflows"),
    records.OpFormats("nll_loss_forward", "fp32", FP32, FP32, 1, 0, "a loss is a sum over the batch"),
]


@dataclass
class Written:
    """One run to write: its losses, and all else that a run may leave."""

    losses: Sequence[float]
    scales: Sequence[float] = ()
    skipped: Mapping[int, str] = field(default_factory=dict)
    peak: int | None = 400_000_000
    ops: Sequence[records.OpFormats] = ()
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
        seed, twin = int(name.rsplit("-", 1)[1]), "-ulp-" in name
        writer = records.RecordWriter(folder / f"{name}.jsonl")
        begun = run.script, list(run.argv), run.policy, seed, twin, dict(run.machine), "2026-11-21T04:00:00"
        writer.write(records.RunStarted(*begun))
        for i, loss in enumerate(run.losses):
            writer.write(records.LossRecord(i, float(loss), 0.01 * i))
            if run.scales:
                why, at = run.skipped.get(i, ""), 0.01 * i + 0.005
                writer.write(records.UpdateRecord(i, 0, not why, bool(why), run.scales[i], at, why, i < 3))
        if run.peak is not None:
            writer.write(records.MemoryRecord(run.peak, "tensor bytes"))
        if run.ops:
            writer.write(records.OpsRecord(list(run.ops)))
        if run.status is not None:
            writer.write(records.RunEnded(run.status, 0.01 * len(run.losses), list(run.notes)))
        writer.close()
        if run.log:
            (folder / f"{name}.log").write_text(run.log, encoding="utf-8", errors="surrogateescape")
    return directory


def curve(steps: int, seed: int) -> list[float]:
    """A loss that falls as a real one does, noisy from batch to batch."""
    draw = np.random.default_rng(seed)
    t = np.arange(steps) / max(1, steps - 1)
    clean = 2.3 * np.exp(-6 * t) + 0.04
    return (clean * np.exp(0.25 * draw.standard_normal(steps))).tolist()


def drift(losses: Sequence[float], seed: int, size: float) -> list[float]:
    """The same losses with a relative noise that grows over the run, as rounding changes a trajectory."""
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
        "peak_memory_bytes": 251_000_000,
        "fp32_peak_memory_bytes": 412_000_000,
        "memory_how": "tensor bytes",
        "parity": "equivalent",
        "seeds": 3,
        "margin": 0.0021,
        "loss_gap": -0.0003,
        "final_loss": 0.0412,
        "final_metric": 98.4,
        "steps": 300,
        "skipped_steps": 0,
        "reason": "The gap's 90 % interval, from -0.0011 to 0.0005, lies within the margin of 0.0021.",
        "plain": "proven equal (3 runs).",
        "advice": "use bf16",
        "command": "mezzo run --precision bf16 train.py",
    }
    return {**values, **changes}


def verdict(candidates: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema": 1, "baseline": "fp32", "candidates": candidates, "machine": MACHINE, **more}


def healthy(directory: Path, steps: int = 300, seeds: int = 3) -> Path:
    """bf16 equivalent, fp16 consistent with two skips a run: seeds, FP32 twins, a metric, memory, ops."""
    runs: dict[str, Written] = {}
    scales = [2.0 ** (16 - min(2, index // 2)) if index < 200 else 2.0**15 for index in range(steps)]
    skips = dict.fromkeys((1, 3), "inf in the gradients")
    notes = ["2 updates were skipped while the loss scale found its height."]
    fp16_twice = BF16.replace("bf16", "fp16")
    in_fp16 = [
        replace(op, planned=fp16_twice, observed=fp16_twice) if op.planned == BF16 else op for op in OPS
    ]
    in_fp16[2] = replace(in_fp16[2], observed=FP32)
    for seed in range(seeds):
        base, plain = curve(steps, seed), [1.0] * steps
        twin, bf16, fp16 = (drift(base, n + seed, size) for n, size in ((50, 0.06), (0, 0.08), (90, 0.07)))
        runs[f"fp32-{seed}"] = Written(base, plain, peak=412_000_000)
        runs[f"fp32-ulp-{seed}"] = Written(twin, plain, peak=None)
        runs[f"bf16-{seed}"] = Written(bf16, plain, peak=251_000_000, ops=OPS, policy="bf16")
        runs[f"fp16-{seed}"] = Written(fp16, scales, skips, 255_000_000, in_fp16, policy="fp16", notes=notes)
    pairs = [
        {"seed": k, "loss_gap": -0.0003, "metric": 98.3 + 0.1 * k, "fp32_metric": 98.2 + 0.15 * k}
        for k in range(seeds)
    ]
    shared: dict[str, Any] = {"seeds": seeds, "steps": steps, "pairs": pairs}
    bf16_one = candidate(
        **shared,
        loss_gap_interval=[-0.0011, 0.0005],
        power=0.93,
        fp32_loss=0.0415,
        loss_gap_relative=-0.0072,
        margin_relative=0.005,
        noise_floor=0.0009,
        fp32_metric=98.35,
        metric_gap=0.05,
        metric_better="higher",
        metric_gap_interval=[-0.02, 0.12],
        pairs_needed=3,
        metric_pairs_needed=14,
        metric_margin=0.2,
        notes=["seed 0: a note of the verdict"],
    )
    fp16_one = candidate(
        **shared,
        parity="consistent",
        speedup=0.97,
        speedup_interval=[0.94, 1.0],
        skipped_steps=2 * seeds,
        loss_gap=0.0008,
        loss_gap_interval=[-0.0009, 0.0025],
        peak_memory_ratio=0.62,
        reason="No harm seen; the gap's interval reaches past the margin.",
    )
    asked = {"demo": "digits", "target": "digits.py", "precisions": ["bf16", "fp16"], "seeds": seeds}
    request = {**asked, "argv": ["--epochs", "3"]}
    return write(directory, verdict({"bf16": bf16_one, "fp16": fp16_one}, request=request), runs)


def hostile(directory: Path) -> Path:
    """Every text that a script or a user can put into a folder, replaced by one that tries to break out."""
    ops = [records.OpFormats(HOSTILE, HOSTILE, HOSTILE, HOSTILE + "!", 1, 1, HOSTILE, HOSTILE)]
    machine = {HOSTILE.replace("\udcff", ""): HOSTILE, "cpu": HOSTILE, "nested": {HOSTILE: [HOSTILE]}}
    texts: tuple[Any, ...] = [HOSTILE], HOSTILE, HOSTILE, [HOSTILE], HOSTILE, machine
    run = Written(curve(20, 0), [1.0] * 20, {2: HOSTILE}, 1000, ops, 1, *texts)
    ones = {
        HOSTILE: candidate(reason=HOSTILE, parity=HOSTILE, plain=HOSTILE, advice=HOSTILE, command=HOSTILE),
        "bf16": candidate(reason=HOSTILE),
    }
    request = {"target": HOSTILE, "argv": [HOSTILE], "metric": HOSTILE, "precisions": [HOSTILE]}
    found = verdict(ones, request=request) | {"machine": {HOSTILE: HOSTILE}}
    return write(directory, found, {"fp32-0": run, "bf16-0": run, "zz-0": run})


def one_seed(directory: Path) -> Path:
    """One pair, no metric, no memory, no updates, nothing skipped."""
    base = curve(40, 0)
    none = dict.fromkeys(("final_metric", "peak_memory_ratio", "speedup_interval"))
    one = candidate(parity="consistent", seeds=1, steps=40, **none)
    runs = {"fp32-0": Written(base, peak=None), "bf16-0": Written(drift(base, 1, 0.05), peak=None)}
    return write(directory, verdict({"bf16": one}), runs)


def failed(directory: Path) -> Path:
    """A candidate whose loss goes NaN, one that crashes, one that was killed and one that left nothing."""
    base = curve(120, 0)
    sick = drift(base, 1, 0.05)
    sick[60:] = [value * 10 ** (2 * i) for i, value in enumerate(sick[60:75])] + [math.inf] + [math.nan] * 44
    numbers = "speedup", "speedup_interval", "peak_memory_ratio", "loss_gap", "final_loss", "final_metric"
    gone = dict.fromkeys(numbers)
    skips = dict.fromkeys(range(60, 120), "inf in the gradients")
    log = "Traceback (most recent call last):\nRuntimeError: no such kernel"
    runs = {
        "fp32-0": Written(base, [1.0] * 120),
        "fp16-0": Written(sick, [2.0**-i for i in range(120)], skips),
        "bf16-0": Written(drift(base[:30], 2, 0.05), status=1, log=log),
        "tf32-0": Written(base[:50], status=None),
    }
    nan = {"final_loss": "nan", "loss_gap": "nan", "skipped_steps": 60}
    ones = {
        "fp16": candidate(parity="divergent", seeds=1, reason="The loss is NaN from step 76 on.", **nan),
        "bf16": candidate(parity="divergent", seeds=0, reason="It failed.", exit_status=1, **gone),
        "tf32": candidate(parity="inconclusive", seeds=0, **gone),
        "fp8": candidate(parity="inconclusive", seeds=0, reason="No run finished.", **gone),
    }
    return write(directory, verdict(ones) | {"machine": {}}, runs)


def one_step(directory: Path) -> Path:
    """A training of a single step."""
    runs = {"fp32-0": Written([2.3], [1.0]), "bf16-0": Written([2.31], [1.0])}
    one = candidate(seeds=1, steps=1, parity="inconclusive", reason="One step says nothing.")
    return write(directory, verdict({"bf16": one}), runs)


def bare(directory: Path) -> Path:
    """A verdict with a candidate of no keys, and no runs at all."""
    return write(directory, {"candidates": {"bf16": {}}}, {})


def many_ops(directory: Path) -> Path:
    """A candidate with more ops than one wants to see, two of them not as planned."""
    lower = "lower", BF16, BF16
    ops = [records.OpFormats(f"op_{i:02}", *lower, i, 1, "matmul", f"blocks.{i}.up") for i in range(60)]
    ops[7] = records.OpFormats("op_07", "fp32", FP32, BF16, 7, 0, "a sum", "blocks.7.norm")
    ops[9] = records.OpFormats("op_09", "lower", BF16, FP32, 9, 0, "matmul", "head")
    base = curve(50, 0)
    runs = {"fp32-0": Written(base), "bf16-0": Written(base, ops=ops)}
    return write(directory, verdict({"bf16": candidate(seeds=1, steps=50)}), runs)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    one.__name__: one for one in (healthy, hostile, one_seed, failed, one_step, bare, many_ops)
}
