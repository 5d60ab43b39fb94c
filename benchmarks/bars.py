"""The goals of the training-step benchmark, as data, and `judge(results)`, which compares results with them.

    python benchmarks/bars.py                     # the table, from benchmarks/results/bench.json
    python benchmarks/bars.py FILE.json

A ratio that is better than its goal is *met*. A worse ratio is *missed* if its whole interval is worse, and *open* if
the interval includes the goal, since the run cannot tell. Bytes have no interval. Goals that a run passed easily
were tightened afterwards; no goal is ever relaxed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
AMP = "amp-bf16"
EXACT = ("mezzo-bf16", "short-bf16", "split-bf16")
"""Mezzo's contenders that have FP32 weights, or all of their 32 bits, and do what torch.amp does."""


@dataclass(frozen=True)
class Bar:
    """A ratio that is to be at most `most`.

    Args:
        what: in words.
        kind: ``"time"``, of whole steps; ``"peak"``, bytes of whole steps; ``"logits"`` or ``"head"``, peak bytes
            of the loss alone (`bench_loss.py`).
        row: of the results; a vocabulary for the loss alone.
        mode: of the row.
        above: contenders, of which the worst counts.
        below: the contender that they are compared with.
        most: of above / below.
    """

    what: str
    kind: str
    row: str
    mode: str
    above: tuple[str, ...]
    below: str
    most: float


ROWS = ("digits", "text-gpt", "gpt", "cnn", "lstm", "fine-tune", "lm-32k")
NEVER_SLOWER = tuple(
    Bar("never slower than torch.amp", "time", row, mode, EXACT, AMP, 1.0)
    for mode in ("eager", "compiled")
    for row in ROWS
)
BARS = (
    *NEVER_SLOWER,
    Bar("1.15 times as fast in the fine-tune", "time", "fine-tune", "eager", ("split-bf16",), AMP, 1 / 1.15),
    Bar("1.10 times as fast on the GPT", "time", "gpt", "eager", ("split-bf16",), AMP, 1 / 1.10),
    *(
        Bar("1.40 times as fast with 32,768 classes", "time", "lm-32k", "eager", (name,), AMP, 1 / 1.40)
        for name in (*EXACT, "fused-loss")
    ),
    *(
        Bar("the loss's peak bytes, logits included", "logits", classes, "", ("mezzo-bf16",), AMP, 0.30)
        for classes in ("32768", "131072")
    ),
    *(
        Bar("the loss's peak bytes, linear layer included", "head", classes, "", ("fused-loss",), AMP, 0.25)
        for classes in ("32768", "131072")
    ),
    Bar("peak bytes, exact", "peak", "gpt", "eager", ("split-bf16",), AMP, 0.72),
    Bar("peak bytes, exact", "peak", "gpt", "eager", ("split-bf16",), "fp32", 0.61),
    Bar("peak bytes, lean", "peak", "gpt", "eager", ("lean-bf16",), AMP, 0.52),
    Bar("peak bytes, lean", "peak", "gpt", "eager", ("lean-bf16",), "fp32", 0.44),
    Bar("peak bytes, exact with GELU recomputed", "peak", "gpt", "eager", ("recompute",), AMP, 0.66),
)


def _time(found: Mapping[str, Any], contender: str) -> tuple[float, list[float]] | None:
    ratio = found["ratios"].get(contender)
    return None if ratio is None else (ratio["ratio"], ratio["interval"])


def _bytes(peaks: Mapping[str, float], contender: str, below: str) -> tuple[float, list[float]] | None:
    if contender not in peaks or below not in peaks:
        return None
    value = peaks[contender] / peaks[below]
    return value, [value, value]


def _found(bar: Bar, results: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, list[float]] | None]]:
    """Contender -> its ratio and interval; None where it was not measured."""
    if bar.kind in ("logits", "head"):
        part = results.get("loss", {}).get(bar.row, {}).get(bar.kind, {})
        for contender in bar.above:
            yield contender, _bytes(part.get("peak_bytes", {}), contender, bar.below)
        return
    found = results["rows"].get(bar.row, {}).get(bar.mode, {})
    for contender in bar.above:
        if "ratios" not in found:
            yield contender, None
        elif bar.kind == "time":
            yield contender, _time(found, contender)
        else:
            yield contender, _bytes(found["peak_bytes"], contender, bar.below)


def _verdict(value: float, low: float, most: float) -> str:
    if value <= most:
        return "met"
    return "missed" if low > most else "open"


def judge(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every bar with the ratio of its worst contender, the interval, and the verdict.

    That is ``met``, ``missed``, ``open`` or ``not measured``, as a bar is if one of its contenders isn't.
    """
    judged = []
    for bar in BARS:
        all_found = dict(_found(bar, results))
        line: dict[str, Any] = {
            "bar": bar.what,
            "kind": bar.kind,
            "row": bar.row,
            "mode": bar.mode,
            "below": bar.below,
            "most": round(bar.most, 4),
        }
        absent = [name for name, found in all_found.items() if found is None]
        if absent:
            judged.append(line | {"contender": absent[0], "verdict": "not measured"})
            continue
        worst, (ratio, interval) = max(
            ((name, found) for name, found in all_found.items() if found), key=lambda each: each[1][0]
        )
        verdict = _verdict(ratio, interval[0], bar.most)
        judged.append(line | {"contender": worst, "ratio": ratio, "interval": interval, "verdict": verdict})
    return judged


def where(line: Mapping[str, Any]) -> str:
    """The row and mode of a judged bar, as a cell."""
    if line["kind"] in ("logits", "head"):
        return f"{int(line['row']):,} classes"
    return f"{line['row']}, {line['mode']}"


def value(line: Mapping[str, Any]) -> str:
    """What a judged bar's ratio is, with its interval if it has one, as a cell."""
    if "ratio" not in line:
        return ""
    low, high = line["interval"]
    return f"{line['ratio']:.3f}" + (f" ({low:.3f} to {high:.3f})" if low < high else "")


WIDTHS = {"where": 21, "worst": 14, "most": 5, "is": 22, "verdict": 12}


def show(judged: list[dict[str, Any]], console: Console) -> None:
    """Print the judged goals in 80 columns, one line per workload under each goal."""
    for what, lines in groupby(judged, key=lambda line: line["bar"]):
        console.print(f"{what}, at most:")
        shown = Table.grid(padding=(0, 1))
        for width in WIDTHS.values():
            shown.add_column(width=width, no_wrap=True)
        for line in lines:
            pair = f"{line['contender'].partition('-')[0]}/{line['below'].partition('-')[0]}"
            shown.add_row(f"  {where(line)}", pair, f"{line['most']:.3f}", value(line), line["verdict"])
        console.print(shown)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "bench.json"
    show(judge(json.loads(path.read_text(encoding="utf-8"))), Console(highlight=False))


if __name__ == "__main__":
    main()
