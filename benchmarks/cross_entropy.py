"""Cross entropy of 16-bit logits, forward and backward: Mezzo's kernel, torch.amp's FP32 copy, and FP32 logits.

    python benchmarks/cross_entropy.py                 # writes benchmarks/results/cross_entropy.json
    python benchmarks/cross_entropy.py --rounds 10 --classes 256 8192 --keep-memory

Every round runs each contender once, in an order that rotates. Rows are as many as 2,048, and fewer where logits and
what is made of them would exceed a few hundred million bytes. `torch.amp` is what autocast does: `cross_entropy` of an
FP32 copy, whose gradient is cast back; `fp32` has FP32 logits. Bytes are the most that tensors occupied at once, the
logits included. Ratios are of medians, with 95 % bootstrap intervals over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clocks import copy_bandwidth, seconds
from mezzo.pytorch.kernels.cross_entropy import cross_entropy_loss
from mezzo.pytorch.machine import describe
from mezzo.pytorch.memory import PeakTensorBytes
from pairs import ratio_of_medians

RESULTS = Path(__file__).parent / "results" / "cross_entropy.json"
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST = 1 << 26  # logits

CONTENDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mezzo": cross_entropy_loss,
    "torch.amp": lambda logits, target: F.cross_entropy(logits.float(), target),
    "fp32": F.cross_entropy,
}


def step(name: str, logits: Tensor, target: Tensor) -> Callable[[], None]:
    """Forward and backward of one contender."""

    def run() -> None:
        logits.grad = None
        CONTENDERS[name](logits, target).backward()

    return run


def peak_bytes(call: Callable[[], None], logits: Tensor) -> int:
    """The most bytes alive during a call, less those that were before, plus the logits."""
    logits.grad = None
    gc.collect()
    watch = PeakTensorBytes()
    watch.start()
    before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _alive()}.values())
    call()
    return watch.stop().peak_bytes - before + logits.nbytes


def _alive() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def measure(fmt: str, classes: int, rounds: int) -> dict[str, Any]:
    rows = min(2048, MOST // classes)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(rows, classes, generator=generator) * 2
    target = torch.randint(0, classes, (rows,), generator=generator)
    low = wide.to(FORMATS[fmt]).requires_grad_()
    wide.requires_grad_()
    logits = {"mezzo": low, "torch.amp": low, "fp32": wide}
    steps = {name: step(name, logits[name], target) for name in CONTENDERS}
    peaks = {name: peak_bytes(call, logits[name]) for name, call in steps.items()}
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            logits[name].grad = None
            times[name].append(seconds(steps[name], "cpu"))
            logits[name].grad = None
    row: dict[str, Any] = {"format": fmt, "rows": rows, "classes": classes, "contenders": {}}
    for name in names:
        ratio = ratio_of_medians(times["torch.amp"], times[name])
        row["contenders"][name] = {
            "median_ms": statistics.median(times[name]) * 1e3,
            "faster_than_amp": [ratio.value, ratio.low, ratio.high],
            "peak_bytes": peaks[name],
            "bytes_a_logit": peaks[name] / (rows * classes),
        }
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("format", "rows x classes", "contender", "ms", "x torch.amp", "95 %", "bytes a logit")
    for row in rows:
        for name, found in row["contenders"].items():
            value, low, high = found["faster_than_amp"]
            shown.add_row(
                row["format"],
                f"{row['rows']:,} x {row['classes']:,}",
                name,
                f"{found['median_ms']:.2f}",
                f"{value:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{found['bytes_a_logit']:.2f}",
            )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--classes", type=int, nargs="+", default=[256, 8192, 32768, 131072])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--keep-memory", action="store_true", help="mezzo.keep_memory() before all contenders"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.keep_memory:
        from mezzo.pytorch.keep_memory import keep_memory

        keep_memory()
    warnings.simplefilter("ignore")
    rows = [measure(fmt, classes, given.rounds) for classes in given.classes for fmt in given.formats]
    found = {
        "machine": describe(),
        "rounds": given.rounds,
        "keep_memory": given.keep_memory,
        "copy_bandwidth": copy_bandwidth("cpu"),
        "rows": rows,
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=110).print(table(rows))


if __name__ == "__main__":
    main()
