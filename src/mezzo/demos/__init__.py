"""Ordinary FP32 training scripts that do not use Mezzo, and the table that finds them by name.

`mezzo compare --demo NAME` runs a demo exactly as it runs a user's own script, in a child process. Demos import nothing
of Mezzo (CI checks that).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """A demo: its script, the pattern of its final metric (one group), a one-line summary.

    `framework` is the word of `mezzo compare --framework`.
    """

    name: str
    path: Path
    metric: str
    summary: str
    framework: str = "pytorch"


_HERE = Path(__file__).parent
_ACCURACY, _LOSS = r"accuracy: ([0-9.]+) %", r"validation loss: ([0-9.]+)"
_DIGITS = "a convolutional network on scikit-learn's handwritten digits"
_GPT = "a character-level transformer on the source text of Python's standard library"
_LSTM = "a character-level LSTM on the same text, its hidden state carried from window to window"
_TRANSFER = "a convolutional network in Keras, pretrained on the digits 0 to 4 and fine-tuned to 5 to 9"

DEMOS = {
    "digits": Demo("digits", _HERE / "digits.py", f"test {_ACCURACY}", _DIGITS),
    "text-gpt": Demo("text-gpt", _HERE / "text_gpt.py", _LOSS, _GPT),
    "text-lstm": Demo("text-lstm", _HERE / "text_lstm.py", _LOSS, _LSTM),
    "transfer": Demo("transfer", _HERE / "transfer.py", _ACCURACY, _TRANSFER, framework="keras"),
}

PYTORCH = {name: demo for name, demo in DEMOS.items() if demo.framework == "pytorch"}
"""The demos of the commands that support PyTorch only."""


def find(name: str) -> Demo:
    """The demo of that name.

    Raises:
        LookupError: there is none; the message gives the names and the nearest one.
    """
    if name in DEMOS:
        return DEMOS[name]
    near = difflib.get_close_matches(name, DEMOS, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise LookupError(f"unknown demo {name!r}. Use one of {', '.join(sorted(DEMOS))}.{hint}")
