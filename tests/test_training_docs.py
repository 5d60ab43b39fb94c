"""Every block of Python in docs/training.md runs, in order, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from mezzo.pytorch.training import mixed_precision

PAGE = Path(__file__).parent.parent / "docs" / "training.md"


def test_the_code_of_the_page_runs() -> None:
    torch.manual_seed(0)
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == 15
    names: dict[str, object] = {}
    try:
        for block in blocks:
            line = text[: block.start(1)].count("\n")
            exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), names)
    finally:
        for mp in list(mixed_precision._ALIVE):
            mp.close()
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert bool(loss.isfinite())
