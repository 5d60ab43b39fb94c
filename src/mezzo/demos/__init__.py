"""Ordinary FP32 training scripts that import nothing of Mezzo (CI checks that), and the table that names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """A script, the pattern of its final metric (one group), and its word of `mezzo compare --framework`."""

    path: Path
    metric: str
    framework: str = "pytorch"


_HERE = Path(__file__).parent
_ACCURACY = r"accuracy: ([0-9.]+) %"

DEMOS = {
    "digits": Demo(_HERE / "digits.py", f"test {_ACCURACY}"),
    "text-gpt": Demo(_HERE / "text_gpt.py", r"validation loss: ([0-9.]+)"),
    "transfer": Demo(_HERE / "transfer.py", _ACCURACY, framework="keras"),
}

PYTORCH = {name: demo for name, demo in DEMOS.items() if demo.framework == "pytorch"}
"""The demos of the commands that support PyTorch only."""
