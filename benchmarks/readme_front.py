"""What a visitor sees first: speed and memory of each way to use Mezzo, a comparison's output, tested versions."""

from __future__ import annotations

import re
from typing import Any

from mezzo.core.commands import compare_command
from readme_steps import header, machine

WAYS = {
    "amp-bf16": "torch.amp, bf16",
    "short-bf16": "Mezzo, `bf16`",
    "split-bf16": "Mezzo, bf16 weights (`masters=split`)",
    "lean-bf16": "Mezzo, least memory (`masters=split8,state=int8`)",
}
"""Contenders of `bench.json`, and their column heads."""
MODELS = {
    "cnn": "CNN, batch 64",
    "text-gpt": "GPT, 2,048 characters",
    "gpt": "GPT, vocabulary 8,192",
    "lm-32k": "GPT, vocabulary 32,768",
    "lstm": "LSTM, 2 x 512",
    "fine-tune": "GPT, width 1,024, 64 tokens",
}


def gains(results: dict[str, Any]) -> str:
    """One row per model: how many times as fast as FP32, and the share of FP32's peak memory saved."""
    lines = [
        f"Eager training steps on {machine(results)}",
        "(`make bench`). Each cell has the speed over FP32 and the change of peak tensor memory.",
        "",
        *header("model", *WAYS.values()),
    ]
    for name, label in MODELS.items():
        row = results["rows"][name]["eager"]
        cells = [_cell(row, way) for way in WAYS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compared(text: str) -> str:
    """The command that `demo.txt` is the output of, and the lines that answer: precisions, notes, next step."""
    lines = re.findall(r"^(?!Report)\S+: .*", text, re.MULTILINE)
    # Its words may stand in another order than when the demo ran.
    last = "  " + compare_command({"target": "train.py", "precisions": ["bf16"]})
    return "\n".join(("```text", "$ mezzo compare --demo digits", *lines, last, "```"))


def versions(rows: dict[str, dict[str, Any]]) -> str:
    """One row per release of PyTorch, from `versions.json`."""
    lines = header("PyTorch", "Python", "fast tests")
    for row in rows.values():
        if "reason" in row:
            result = f"not installed: {row['reason']}"
        elif row["status"] == 0:
            result = f"{row['tests'] - row['skipped']:,} passed, {row['skipped']:,} skipped"
        else:
            result = f"{len(row['failed'])} of {row['tests']:,} failed"
        lines.append(f"| {row['torch']} | {row['python']} | {result} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], way: str) -> str:
    speed = row["median_seconds"]["fp32"] / row["median_seconds"][way]
    memory = 100 * (row["peak_bytes"][way] / row["peak_bytes"]["fp32"] - 1)
    return f"{speed:.2f}x, {memory:+.0f} %".replace("-0 %", "0 %").replace("+0 %", "0 %")
