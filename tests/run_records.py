"""Records such as a watched run leaves, made by code: seeded, and shaped like a small transformer's in fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from comparisons import HOSTILE, MACHINE, OPS, curve
from mezzo.core.overflow import OUTSIDE, OverflowReport, TensorFacts
from mezzo.core.ranges import WHAT, Histogram, RangeRow
from mezzo.core.records import (
    LossRecord,
    MemoryRecord,
    OpsRecord,
    OverflowRecord,
    RangesRecord,
    Record,
    RecordWriter,
    RunEnded,
    RunStarted,
    UpdateRecord,
)

_PARTS = ("norm", "attention.query", "attention.out", "mlp.up")
MODULES = ("embedding", *(f"blocks.{i}.{part}" for i in range(3) for part in _PARTS), "head")
EXP = OverflowReport(
    cause="overflow",
    module="blocks.1.attention",
    op="exp",
    direction="forward",
    inputs=[TensorFacts("input 0", [32, 4, 64, 64], "fp16", 14.25, 0.00012, 12, 0, 0)],
    outputs=[TensorFacts("output", [32, 4, 64, 64], "fp16", 65504.0, 0.25, 0, 3, 0)],
    propagators=["blocks.1.attention: Tensor.sum", "blocks.1: linear"],
    line="model.py:48: weights = torch.exp(scores)",
    remedies=["Run this operation in FP32: precision='fp16,op.exp=fp32'.", "Use bf16: its range is FP32's."],
    seconds=0.21,
    kept_bytes=8_400_000,
)
ROOT = OverflowReport(
    cause="invalid",
    module=OUTSIDE,
    op="SqrtBackward0",
    direction="backward",
    inputs=[TensorFacts("gradient of output", [], "fp32", 128.0, 128.0, 0, 0, 0)],
    outputs=[TensorFacts("gradient of input", [], "fp32", 0.0, 0.0, 0, 1, 0)],
    line="train.py:91: penalty = (weights ** 2).sum().sqrt()",
    how="live",
    remedies=["Add a small number under the root: (x + 1e-12).sqrt()."],
)
SCALE = OverflowReport(
    cause="loss scale",
    module="head",
    op="AddmmBackward0",
    direction="backward",
    inputs=[TensorFacts("gradient of output", [32, 10], "fp16", 61000.0, 0.001, 0, 0, 0)],
)


def counted(numbers: np.ndarray) -> Histogram:  # type: ignore[type-arg]
    """The histogram of some numbers, by the definition."""
    size = np.abs(numbers.astype(np.float64))
    finite = size[np.isfinite(size) & (size > 0)]
    exponents = np.frexp(finite)[1] - 1
    lowest = int(exponents.min()) if len(finite) else 0
    return Histogram(
        lowest,
        np.bincount(exponents - lowest).tolist() if len(finite) else [],
        zeros=int((size == 0).sum()),
        infinities=int(np.isinf(size).sum()),
        nans=int(np.isnan(size).sum()),
        largest=float(finite.max()) if len(finite) else 0.0,
    )


def rows(draw: np.random.Generator, modules: Sequence[str], progress: float, format: str) -> list[RangeRow]:
    """One watched step: gradients shrink with depth and over the run; some updates are too small to matter."""
    found = []
    for depth, module in enumerate(modules):
        deep = depth / max(1, len(modules) - 1)
        wide = 6.0 if module.endswith("query") else 1.0
        for what, in_format, mean, spread, zeros, name in (
            ("weight", "fp32", -4.5, 1.2, 0.0, "weight"),
            ("activation", format, wide - 1, 1.5 + 0.8 * wide, 0.3, ""),
            ("activation gradient", format, -31 + 9 * deep - 4 * progress, 3.0, 0.0, ""),
            ("weight gradient", "fp32", -22 + 5 * deep - 3 * progress, 2.5, 0.0, "weight"),
            ("update ratio", "fp32", -7 - 5 * progress - deep, 1.5, 0.0, "weight"),
        ):
            numbers = 2.0 ** (mean + spread * draw.standard_normal(4096))
            numbers[draw.random(4096) < zeros] = 0.0
            found.append(RangeRow(module, what, in_format, counted(numbers), name))
    return found


def records(
    *, steps: int = 240, every: int = 8, modules: Sequence[str] = MODULES, findings: bool = True
) -> list[Record]:
    """A run of fp16: the scale probes twice at the start, and three steps are alarms."""
    draw = np.random.default_rng(0)
    causes = {1: SCALE, 3: SCALE, 90: EXP, 91: EXP, 170: ROOT} if findings else {}
    scale = 2.0**16
    started = RunStarted(
        "train.py", ["--epochs", "3"], "fp16", 0, False, dict(MACHINE), "2026-11-21T04:00:00"
    )
    made: list[Record] = [started]
    for index, loss in enumerate(curve(steps, 0)):
        at, skipped = 0.05 * index, index in causes
        why = "inf in the gradients" if skipped else ""
        made.append(LossRecord(index, math.inf if causes.get(index) is EXP else loss, at))
        made.append(UpdateRecord(index, 0, not skipped, skipped, scale, at + 0.04, why))
        if index % every == 0:
            made.append(RangesRecord(index, 0, at, scale, rows(draw, modules, index / steps, "fp16")))
        if skipped:
            made.append(OverflowRecord(index, 0, at, scale, causes[index]))
            scale /= 2
    made += [MemoryRecord(255_000_000, "tensor bytes"), OpsRecord(list(OPS))]
    return [*made, RunEnded(0, 0.05 * steps, ["5 updates were skipped."] if findings else [])]


def skip(index: int, finding: OverflowReport | None = None, scale: float = 8.0) -> list[Record]:
    """A skipped update, and its overflow report."""
    made: list[Record] = [UpdateRecord(index, 0, False, True, scale, 0.0, "inf")]
    return made if finding is None else [*made, OverflowRecord(index, 0, 0.0, scale, finding)]


def write(path: Path, made: Sequence[Record]) -> Path:
    """Write records to a file, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(path)
    for record in made:
        writer.write(record)
    writer.close()
    return path


def hostile() -> list[Record]:
    """Every text of a watched run's records replaced by one that tries to break out of the page."""
    text = HOSTILE
    facts = [TensorFacts(text, [2, 3], text, 1.0, 0.5, 1, 1, 1)]
    finding = OverflowReport(text, text, text, text, facts, facts, [text], text, text, [text], note=text)
    seen = [RangeRow(text, what, text, counted(2.0 ** np.arange(-9.0, 1.0)), text) for what in (*WHAT, text)]
    return [
        RunStarted(text, [text], text, 0, False, {"cpu": text}, text),
        LossRecord(0, 1.0, 0.0),
        UpdateRecord(0, 0, False, True, 2.0**10, 0.0, text),
        RangesRecord(0, 0, 0.0, 2.0**10, seen),
        OverflowRecord(0, 0, 0.0, 2.0**10, finding),
        RunEnded(1, 1.0, [text]),
    ]
