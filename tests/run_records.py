"""Records such as a watched run leaves, made by code: seeded, and shaped like a small transformer's in fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from comparisons import HOSTILE, MACHINE, OPS, curve
from mezzo.core.overflow import OUTSIDE, OverflowReport, TensorFacts
from mezzo.core.ranges import Histogram, RangeRow
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

MODULES = (
    "embedding",
    *(
        f"blocks.{i}.{part}"
        for i in range(3)
        for part in ("norm", "attention.query", "attention.out", "mlp.up")
    ),
    "head",
)
EXP = OverflowReport(
    cause="overflow",
    module="blocks.1.attention",
    op="exp",
    direction="forward",
    inputs=[TensorFacts("input 0", [32, 4, 64, 64], "fp16", 14.25, 0.00012, 12, 0, 0)],
    outputs=[TensorFacts("output", [32, 4, 64, 64], "fp16", 65504.0, 0.25, 0, 3, 0)],
    propagators=[
        "blocks.1.attention: Tensor.sum",
        "blocks.1.attention: Tensor.__truediv__",
        "blocks.1: linear",
    ],
    line="model.py:48: weights = torch.exp(scores)",
    remedies=[
        "Run this operation in FP32: precision='fp16,op.exp=fp32'.",
        "Subtract the row's maximum before exp, as softmax does.",
        "Use bf16: its range is FP32's.",
    ],
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
    seconds=0.004,
)
SCALE = OverflowReport(
    cause="loss scale",
    module="head",
    op="AddmmBackward0",
    direction="backward",
    inputs=[TensorFacts("gradient of output", [32, 10], "fp16", 61000.0, 0.001, 0, 0, 0)],
    seconds=0.03,
    kept_bytes=1_200_000,
)


def lognormal(
    draw: np.random.Generator, mean: float, spread: float, elements: int = 4096, zeros: float = 0.0
) -> Histogram:
    """The histogram of so many log-normal numbers: `mean` and `spread` of their log2."""
    numbers = 2.0 ** (mean + spread * draw.standard_normal(elements))
    numbers[draw.random(elements) < zeros] = 0.0
    return counted(numbers)


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
        found += [
            RangeRow(module, "weight", "fp32", lognormal(draw, -4.5, 1.2), "weight"),
            RangeRow(module, "activation", format, lognormal(draw, wide - 1, 1.5 + 0.8 * wide, zeros=0.3)),
            RangeRow(
                module, "activation gradient", format, lognormal(draw, -31 + 9 * deep - 4 * progress, 3.0)
            ),
            RangeRow(
                module,
                "weight gradient",
                "fp32",
                lognormal(draw, -22 + 5 * deep - 3 * progress, 2.5),
                "weight",
            ),
            RangeRow(
                module, "update ratio", "fp32", lognormal(draw, -7 - 5 * progress - deep, 1.5), "weight"
            ),
        ]
    return found


def records(
    *,
    steps: int = 240,
    every: int = 8,
    modules: Sequence[str] = MODULES,
    format: str = "fp16",
    seed: int = 0,
    findings: bool = True,
) -> list[Record]:
    """A run of fp16: the scale probes twice at the start, and three steps are alarms."""
    draw = np.random.default_rng(seed)
    causes = {1: SCALE, 3: SCALE, 90: EXP, 91: EXP, 170: ROOT} if findings and format == "fp16" else {}
    scale, found = (2.0**16 if format == "fp16" else 1.0), []
    made: list[Record] = [
        RunStarted(
            "train.py", ["--epochs", "3"], format, seed, False, dict(MACHINE), "2026-11-21T04:00:00+00:00"
        )
    ]
    for index, loss in enumerate(curve(steps, seed)):
        at = 0.05 * index
        skipped = index in causes
        made.append(LossRecord(index, math.inf if causes.get(index) is EXP else loss, at))
        made.append(
            UpdateRecord(
                index, 0, not skipped, skipped, scale, at + 0.04, "inf in the gradients" if skipped else ""
            )
        )
        if index % every == 0:
            made.append(RangesRecord(index, 0, at, scale, rows(draw, modules, index / max(1, steps), format)))
        if skipped:
            found.append(index)
            made.append(OverflowRecord(index, 0, at, scale, causes[index]))
            scale /= 2
    made += [MemoryRecord(255_000_000, "tensor bytes"), OpsRecord(list(OPS))]
    return [*made, RunEnded(0, 0.05 * steps, ["5 updates were skipped."] if found else [])]


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
    draw = np.random.default_rng(0)
    facts = TensorFacts(HOSTILE, [2, 3], HOSTILE, 1.0, 0.5, 1, 1, 1)
    finding = OverflowReport(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        [facts],
        [facts],
        [HOSTILE],
        HOSTILE,
        HOSTILE,
        [HOSTILE],
        note=HOSTILE,
    )
    seen = [
        RangeRow(HOSTILE, what, HOSTILE, lognormal(draw, -8, 2), HOSTILE)
        for what in (
            "weight",
            "activation",
            "activation gradient",
            "weight gradient",
            "update ratio",
            HOSTILE,
        )
    ]
    return [
        RunStarted(HOSTILE, [HOSTILE], HOSTILE, 0, False, {"cpu": HOSTILE}, HOSTILE),
        LossRecord(0, 1.0, 0.0),
        UpdateRecord(0, 0, False, True, 2.0**10, 0.0, HOSTILE),
        RangesRecord(0, 0, 0.0, 2.0**10, seen),
        OverflowRecord(0, 0, 0.0, 2.0**10, finding),
        RunEnded(1, 1.0, [HOSTILE]),
    ]
