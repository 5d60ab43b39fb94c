"""Ordinary FP32 training scripts that import nothing of Mezzo (CI checks that), and the table that names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """A PyTorch script, and the pattern of its final metric (one group)."""

    path: Path
    metric: str


_HERE = Path(__file__).parent

DEMOS = {
    "digits": Demo(_HERE / "digits.py", r"test accuracy: ([0-9.]+) %"),
    "text-gpt": Demo(_HERE / "text_gpt.py", r"validation loss: ([0-9.]+)"),
}
