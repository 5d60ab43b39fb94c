"""Ordinary FP32 training scripts that know nothing of Mezzo, and the table that finds them by name.

A demo is a script that anyone could have written: `mezzo compare --demo NAME` runs it exactly as it runs a
script of the user's own, in a process of its own. Nothing of Mezzo is imported in it (CI checks that).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """A demo's name, its script, the pattern of its final metric (one group), what it shows in a line, and the
    framework that it trains with, as `mezzo compare --framework` names it.
    """

    name: str
    path: Path
    metric: str
    summary: str
    framework: str = "pytorch"


_HERE = Path(__file__).parent

DEMOS = {
    demo.name: demo
    for demo in (
        Demo(
            "digits",
            _HERE / "digits.py",
            r"test accuracy: ([0-9.]+) %",
            "a convolutional network on scikit-learn's handwritten digits",
        ),
        Demo(
            "text-gpt",
            _HERE / "text_gpt.py",
            r"validation loss: ([0-9.]+)",
            "a character-level transformer on the source text of Python's standard library",
        ),
        Demo(
            "text-lstm",
            _HERE / "text_lstm.py",
            r"validation loss: ([0-9.]+)",
            "a character-level LSTM on the same text, its hidden state carried from window to window",
        ),
        Demo(
            "transfer",
            _HERE / "transfer.py",
            r"accuracy: ([0-9.]+) %",
            "a convolutional network in Keras, pretrained on the digits 0 to 4 and fine-tuned to 5 to 9",
            framework="keras",
        ),
    )
}

PYTORCH = {name: demo for name, demo in DEMOS.items() if demo.framework == "pytorch"}
"""Those that the verbs for PyTorch alone can run."""


def find(name: str) -> Demo:
    """The demo of that name.

    Raises:
        LookupError: there is none; the message gives the names and the nearest one.
    """
    if name in DEMOS:
        return DEMOS[name]
    near = difflib.get_close_matches(name, DEMOS, n=1, cutoff=0.4)
    mend = f" Did you mean {near[0]!r}?" if near else ""
    raise LookupError(f"unknown demo {name!r}. Use one of {', '.join(sorted(DEMOS))}.{mend}")
